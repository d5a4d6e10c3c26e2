"""deploy.readiness: one line on the pipe, whole or not at all."""

from __future__ import annotations

import os

import pytest

from deploy.readiness import Readiness, Report, StartRefused, announce, describe, parse

READY = Readiness("prefill-0", 7, "127.0.0.1:4000", fabric="nixl", transport="ucx (cma)")


@pytest.mark.parametrize("report", [READY, StartRefused("model 'x': no")])
def test_report_crosses_the_pipe_and_the_pipe_is_closed(report: Report) -> None:
    reading, writing = os.pipe()
    announce(writing, report)
    with os.fdopen(reading, "rb") as pipe:
        assert parse(pipe.read()) == report  # read() returns, since the other end is closed


def test_launcher_that_is_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    announce(writing, READY)


def test_cut_line_is_no_report() -> None:
    assert parse(b"") is None
    assert parse(b'{"type":"rea') is None


def test_without_a_launcher_a_person_reads_it(capsys: pytest.CaptureFixture[str]) -> None:
    announce(None, READY)
    assert capsys.readouterr().out == (
        "prefill-0    ready  pid 7        127.0.0.1:4000  over nixl, ucx (cma)\n"
    )
    announce(None, StartRefused("said on stderr by the command line"))
    assert capsys.readouterr().out == ""


def test_router_has_no_fabric() -> None:
    assert describe(Readiness("router", 8, "http://h:1")).endswith("http://h:1")
