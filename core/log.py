"""Logging of a process: JSON lines on one stream, with the request and the worker that a line belongs to.

Call sites use stdlib `logging` only; the context travels in context variables. Knows no service.
"""

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from core.errors import ConfigError

_request_id: ContextVar[str] = ContextVar("tandem_request_id", default="")
_worker_id: ContextVar[str] = ContextVar("tandem_worker_id", default="")

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


@contextmanager
def log_context(*, request_id: str = "", worker_id: str = "") -> Generator[None]:
    """Attach ids to every line that this task (and tasks it starts) logs inside; empty leaves the outer value."""
    tokens = [
        (variable, variable.set(value))
        for variable, value in ((_request_id, request_id), (_worker_id, worker_id))
        if value
    ]
    try:
        yield
    finally:
        for variable, token in reversed(tokens):
            variable.reset(token)


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time, level, process name, logger, message, ids, extras, traceback."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._name,
            "logger": record.name,
            "message": record.getMessage(),
        }
        ids = {"request_id": _request_id.get(), "worker_id": _worker_id.get()}
        line.update({key: value for key, value in ids.items() if value})
        for key, value in vars(record).items():
            if key not in _STANDARD and not key.startswith("_"):
                line.setdefault(key, value)
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def configure(name: str, level: str = "INFO", stream: TextIO | None = None) -> logging.Handler:
    """Send all logging of this process to `stream` (stderr) as JSON lines; replaces an earlier call's handler.

    Returns the handler, so that a test can take it away again. Raises `ConfigError` for an unknown level.
    """
    if level.upper() not in LEVELS:
        raise ConfigError(f"log level {level!r} is unknown; use one of {', '.join(LEVELS)}", param="log_level")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(name))
    root = logging.getLogger()
    for old in list(root.handlers):
        if isinstance(old.formatter, JsonFormatter):
            root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    return handler
