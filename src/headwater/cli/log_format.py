"""How a command that runs for long writes its log: lines for people, or one JSON object a line for programs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from headwater.first_compile import COMPILING, tell_first_compile
from headwater.log_fields import LogEvent, fields

logger = logging.getLogger(__name__)

TEXT = "%(asctime)s %(levelname)s %(message)s"
FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")

_OWN_MEMBERS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""What every record has; all else was given with the message."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the fields that the message came with."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        about = {name: value for name, value in vars(record).items() if name not in _OWN_MEMBERS}
        if about:
            told["fields"] = about
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


def set_up_logging(log_format: str, *, level: str = "info") -> None:
    """Write the log of this process to its standard error, from this level on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    tell_first_compile(lambda: logger.info(COMPILING, extra=fields(event=LogEvent.COMPILING)))
    for talkative in ("asyncio", "py4j", "uvicorn"):
        logging.getLogger(talkative).setLevel(logging.WARNING)
    if log_format == "json":
        # What Python itself would write there is text.
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    about = fields(error=kind.__name__, reason=str(error))
    logger.critical("the process ends: %s", error, exc_info=(kind, error, traceback), extra=about)
