"""Log records as text or JSON lines on stderr, with the client's request id where there is one.

No prompt and no generated text is ever handed to a logger.
"""

from __future__ import annotations

import json
import logging
import sys

from core.config import LogConfig
from core.ids import client_id_of

_EXTRA = "request_id"


class _TextFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {process} %(name)s: %(message)s")
        self._second = (-1, "")  # since the epoch, and as it is written

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        request_id = _client_id(record)
        return f"{line} request_id={request_id}" if request_id else line

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - logging's name
        second = int(record.created)
        if second != self._second[0]:
            whole, _, _ = super().formatTime(record, datefmt).rpartition(",")
            self._second = (second, whole)
        return f"{self._second[1]},{int(record.msecs):03d}"


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = _client_id(record)
        if request_id:
            fields[_EXTRA] = request_id
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _client_id(record: logging.LogRecord) -> str:
    """Return the `x-request-id` that a search starts from, whatever name a process goes by."""
    return client_id_of(str(getattr(record, _EXTRA, None) or ""))


def configure(config: LogConfig, *, process: str) -> None:
    """Send this process's records to stderr; `process` ("router", "prefill-0") is in every line."""
    handler = logging.StreamHandler(sys.stderr)
    is_json = config.format == "json"
    handler.setFormatter(_JsonFormatter(process) if is_json else _TextFormatter(process))
    # Who wrote a line is in it already; asking for threads and processes is a fifth of its cost.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(level=config.level.upper(), handlers=[handler], force=True)
