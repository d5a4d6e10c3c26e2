"""core.log: one line a record, with process and request id, as text or JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from core.config import LogConfig
from core.log import configure


@pytest.fixture(autouse=True)
def root_logger_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_text_lines_name_process_and_request(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogConfig(), process="prefill-0")
    logging.getLogger("engine").warning("slow", extra={"request_id": "r-1~ab.2/1"})
    logging.getLogger("engine").info("plain")
    logging.getLogger("engine").debug("hidden")
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("WARNING prefill-0 engine: slow request_id=r-1")
    assert second.endswith("INFO    prefill-0 engine: plain")


def test_text_lines_say_when(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure(LogConfig(), process="router")
    logger = logging.getLogger("web")
    for created in (0.25, 0.75, 61.0):
        record = logger.makeRecord("web", logging.INFO, "", 0, "up", (), None)
        record.created, record.msecs = created, created % 1 * 1000
        logger.handle(record)
    times = [line.split(" INFO")[0] for line in capsys.readouterr().err.splitlines()]
    assert [time[-7:] for time in times] == [":00,250", ":00,750", ":01,000"]
    assert times[0][:-4] == times[1][:-4] < times[2][:-4]


def test_json_lines_hold_fields_and_the_exception_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure(LogConfig(format="json", level="error"), process="router")
    try:
        int("broken")
    except ValueError:
        logging.getLogger("web").exception("failed", extra={"request_id": "r-2~ab.3"})
    logging.getLogger("web").warning("hidden")
    (line,) = capsys.readouterr().err.splitlines()
    record = json.loads(line)
    assert (record["process"], record["level"], record["message"]) == ("router", "error", "failed")
    assert record["request_id"] == "r-2"
    assert "ValueError: invalid literal" in record["exception"]


def test_json_line_without_request_has_no_such_field(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogConfig(format="json"), process="router")
    logging.getLogger("web").info("up")
    assert "request_id" not in json.loads(capsys.readouterr().err)
