"""Log records as text or JSON lines on stderr, with the request id where there is one.

No prompt and no generated text is ever handed to a logger.
"""

from __future__ import annotations

import json
import logging
import sys

from core.config import LogConfig

_EXTRA = "request_id"


class _TextFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {process} %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        request_id = getattr(record, _EXTRA, None)
        return f"{line} request_id={request_id}" if request_id else line


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
        request_id = getattr(record, _EXTRA, None)
        if request_id:
            fields[_EXTRA] = request_id
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def configure(config: LogConfig, *, process: str) -> None:
    """Send this process's records to stderr; `process` ("router", "prefill-0") is in every line."""
    handler = logging.StreamHandler(sys.stderr)
    is_json = config.format == "json"
    handler.setFormatter(_JsonFormatter(process) if is_json else _TextFormatter(process))
    logging.basicConfig(level=config.level.upper(), handlers=[handler], force=True)
