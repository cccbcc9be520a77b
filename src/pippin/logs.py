"""The format of log lines: text or JSON.

A record's `fields` (a dictionary, in `extra`) follow its words as `name=value`, or are members of
its JSON object.
"""

from __future__ import annotations

import json
import logging
from typing import Any, Literal


def configure_logging(format: Literal["text", "json"]) -> None:
    """Log requests, warnings and errors of this process to standard error, and why it has drafts
    that it was not asked for."""
    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter() if format == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in ("pippin.requests", "pippin.startup.resolve"):
        logging.getLogger(name).setLevel(logging.INFO)


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's own name)
        fields = (f" {name}={_shown(value)}" for name, value in _fields(record).items())
        return super().formatMessage(record) + "".join(fields)


class JSONFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _shown(value: object) -> str:
    """A word as it is; what would not be one word, or not one line, in quotes."""
    text = str(value)
    return text if text.isprintable() and not set(text) & set(' "=') and text else json.dumps(text)
