"""Log lines as text and as JSON."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from pippin.logs import JSONFormatter, TextFormatter, configure_logging
from pippin.startup import resolve


def record(message: str = "request", *, failed: bool = False) -> logging.LogRecord:
    error = None
    if failed:
        try:
            raise KeyError("why")
        except KeyError:
            error = sys.exc_info()
    made = logging.LogRecord("pippin.requests", logging.INFO, __file__, 1, message, None, error)
    made.fields = {"id": "req_1", "status": 200, "prompt": 'two "words"\nand a line', "none": ""}
    return made


def test_text_is_one_line_of_names_and_values() -> None:
    line = TextFormatter().format(record())
    fields = r'id=req_1 status=200 prompt="two \"words\"\nand a line" none=""'
    assert line.endswith(f" INFO request {fields}")
    assert "\n" not in line


def test_json_is_one_object_a_line() -> None:
    line = JSONFormatter().format(record(failed=True))
    assert "\n" not in line
    told = json.loads(line)
    assert (told["level"], told["message"], told["id"]) == ("info", "request", "req_1")
    assert told["status"] == 200
    assert "KeyError: 'why'" in told["exception"]


def test_a_server_logs_requests_and_why_it_has_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    names = ("pippin.requests", resolve.__name__)
    for name in names:
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    monkeypatch.setattr(logging.getLogger("pippin"), "level", logging.WARNING)
    configure_logging("text")
    assert all(logging.getLogger(name).isEnabledFor(logging.INFO) for name in names)
    assert not logging.getLogger("pippin.scheduler").isEnabledFor(logging.INFO)
