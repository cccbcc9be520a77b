"""The lines of a batch's input: read within bounds, checked, and which of them still run.

Knows no field of a request but its model and whether it asks for a stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from pippin.api.batches.batch import LineError
from pippin.api.requests.json_scan import check_json_size
from pippin.errors import NotFound, RequestError, cut

MAX_LINES = 50_000  # as OpenAI's
MAX_CUSTOM_ID_CHARS = 256
MAX_ERRORS = 100  # that are reported of one file
_DISCARDED_BYTES = 1 << 20  # read at a time of what is too long


class InputLine(msgspec.Struct, frozen=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Peek(msgspec.Struct, frozen=True):
    model: Any = None
    stream: Any = None


@dataclass(frozen=True)
class LineRules:
    max_line_bytes: int
    check_model: Callable[[str], None]  # raises NotFound


class LineFault(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        self.code = code
        self.message = message
        self.param = param


def check_lines(path: Path, endpoint: str, rules: LineRules) -> tuple[int, list[LineError]]:
    """How many requests a file has, and what is wrong with its lines."""
    known: set[str] = set()
    errors: list[LineError] = []
    for number, text in _numbered(path, rules.max_line_bytes):
        if number > MAX_LINES:
            message = f"the file has more than {MAX_LINES:,} lines, the limit for one batch"
            return 0, [LineError("too_many_tasks", message, number)]
        try:
            line = _checked(text, endpoint, rules)
            if line is None:
                continue
            if line.custom_id in known:
                raise LineFault(
                    "duplicate_custom_id",
                    f"the custom_id {cut(line.custom_id)!r} was used on an earlier line; each "
                    "line needs its own",
                    "custom_id",
                )
            known.add(line.custom_id)
        except LineFault as fault:
            errors.append(LineError(fault.code, fault.message, number, fault.param))
            if len(errors) == MAX_ERRORS:
                break
    if not known and not errors:
        errors.append(LineError("empty_file", "the input file has no requests"))
    return len(known), errors


class WaitingLines:
    """Lines that have no result yet. Threads may share it."""

    def __init__(self, path: Path, max_line_bytes: int, done: Container[str]) -> None:
        self._lines = _numbered(path, max_line_bytes)
        self._done = done
        self._lock = threading.Lock()

    def next(self) -> InputLine | None:
        with self._lock:
            for _, text in self._lines:
                assert text is not None, "checked"
                if not text.strip():
                    continue
                line = msgspec.json.decode(text, type=InputLine)
                if line.custom_id not in self._done:
                    return line
            return None

    def close(self) -> None:
        with self._lock:
            self._lines.close()


def _numbered(path: Path, most: int) -> Generator[tuple[int, bytes | None], None, None]:
    """Each line with its number; None for the text of one that is too long."""
    with path.open("rb") as file:
        number = 0
        while text := file.readline(most + 1):
            number += 1
            if len(text) > most and not text.endswith(b"\n"):
                _skip_line(file)
                yield number, None
            else:
                yield number, text


def _skip_line(file: BinaryIO) -> None:
    while (piece := file.readline(_DISCARDED_BYTES)) and not piece.endswith(b"\n"):
        pass


def _checked(text: bytes | None, endpoint: str, rules: LineRules) -> InputLine | None:
    """None for an empty line."""
    if text is None:
        raise LineFault(
            "line_too_long",
            f"the line is longer than {rules.max_line_bytes:,} bytes (--max-body-bytes)",
        )
    if not text.strip():
        return None
    try:
        check_json_size(text, "the line")
        line = msgspec.json.decode(text, type=InputLine)
        body = msgspec.json.decode(line.body, type=_Peek)
    except msgspec.ValidationError as error:
        raise LineFault("invalid_request", f"the line is not a request: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineFault("invalid_json_line", f"the line is not valid JSON: {error}") from error
    except RequestError as error:
        raise LineFault("invalid_json_line", error.message) from error
    _check_request(line, body, endpoint, rules)
    return line


def _check_request(line: InputLine, body: _Peek, endpoint: str, rules: LineRules) -> None:
    if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise LineFault(
            "invalid_request",
            f"custom_id has {len(line.custom_id):,} characters; it must have 1 to "
            f"{MAX_CUSTOM_ID_CHARS}",
            "custom_id",
        )
    if line.method != "POST":
        given = cut(line.method)
        raise LineFault("invalid_request", f'method is {given!r}; it must be "POST"', "method")
    if line.url != endpoint:
        raise LineFault(
            "url_mismatch",
            f"url is {cut(line.url)!r}; it must be the endpoint of the batch, {endpoint!r}",
            "url",
        )
    if body.stream not in (None, False):
        raise LineFault(
            "invalid_request", "body.stream is not supported in a batch: leave it out", "stream"
        )
    if not isinstance(body.model, str):
        raise LineFault("invalid_request", "body.model is required; it must be a string", "model")
    try:
        rules.check_model(body.model)
    except NotFound as error:
        raise LineFault("model_not_found", error.message, "model") from error
