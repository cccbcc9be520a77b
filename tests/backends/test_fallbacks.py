"""What a backend does in a slower way: logged once, listed by /status and `pippin doctor`."""

from __future__ import annotations

import pytest

from builders import make_client
from pippin.backends.fallbacks import Fallback, Fallbacks, note_fallback, noted_in


def test_a_fallback_is_logged_once_and_listed(caplog: pytest.LogCaptureFixture) -> None:
    fallbacks = Fallbacks()
    with noted_in(fallbacks):
        for reason in ("it is off by 2", "it is off by 2", "it crashed"):
            note_fallback("no kernel attends", reason)
    note_fallback("of no backend", "it is logged alone")
    expected = [Fallback("no kernel attends", why) for why in ("it is off by 2", "it crashed")]
    assert list(fallbacks) == expected
    said = [record.getMessage() for record in caplog.records]
    assert said == [*map(str, expected), "of no backend: it is logged alone"]


def test_status_lists_what_the_backend_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_client().loop
    assert loop.status()["fallbacks"] == []
    monkeypatch.setattr(loop.backend, "fallbacks", (Fallback("prompts", "off"),))
    assert loop.status()["fallbacks"] == ["prompts: off"]
