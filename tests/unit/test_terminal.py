"""deploy.terminal: one line a complaint, and no trouble when nobody reads."""

from __future__ import annotations

import errno
import io
import sys

import pytest

from deploy.terminal import complain, say, show


def test_complaint_is_one_line_whatever_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    complain("first\nsecond\t third")
    say("to stdout")
    captured = capsys.readouterr()
    assert captured.err == "dovetail: first second third\n"
    assert captured.out == "to stdout\n"


def test_closed_stream_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    say("lost")
    show("lost")


def test_reader_who_left_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Broken())
    say("lost")
    with pytest.raises(BrokenPipeError):
        show("made for nobody")


def test_full_disk_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(sys, "stdout", Full())
    say("lost")
    show("lost")
