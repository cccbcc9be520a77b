"""`--speculate` where nothing is given: what `pippin doctor` measured of the same decides."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bundled import BUNDLED_PATH
from pippin import LLM
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.startup import resolve as measured_gain
from pippin.startup.resolve import (
    MOST_KEPT,
    Gain,
    gains_path,
    keep_gain,
    resolve,
    served_by,
)

CONFIG = Config(ModelConfig(backend="fake"))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measured_gain, "user_cache_path", tmp_path.joinpath)
    monkeypatch.setattr(measured_gain, "gpu_name", lambda: "NVIDIA H200")


def measure(config: Config = CONFIG, ratio: float = 1.5, *, same_reply: bool = True) -> Gain:
    gain = Gain(served_by(resolve(config).model), ratio, same_reply, "2026-11-19")
    keep_gain(gain)
    return gain


def chosen(config: Config = CONFIG) -> str | None:
    return resolve(config).engine.speculate


def with_engine(**options: Any) -> Config:
    return replace(CONFIG, engine=EngineConfig(**options))


def test_nothing_was_measured() -> None:
    assert chosen() == "off"


@pytest.mark.parametrize(
    ("ratio", "same_reply", "found"),
    [(1.5, True, "auto"), (1.05, True, "auto"), (1.04, True, "off"), (1.5, False, "off")],
)
def test_what_was_measured_last_decides(
    ratio: float, same_reply: bool, found: str, caplog: pytest.LogCaptureFixture
) -> None:
    measure(ratio=3.0)
    measure(ratio=ratio, same_reply=same_reply)
    with caplog.at_level(logging.INFO, logger="pippin"):
        assert chosen() == found
    reasons = [r.getMessage() for r in caplog.records if "speculate" in r.getMessage()]
    assert len(reasons) == (found == "auto")
    if reasons:
        expected = f"speculate: auto: pippin doctor measured {ratio:.2f} times as fast here on 2026"
        assert reasons[0].startswith(expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(measured_gain, "gpu_name", lambda: "NVIDIA A10"),
        lambda patch: patch.setattr(measured_gain, "gpu_name", lambda: None),
        lambda patch: patch.setattr(measured_gain, "cpu_name", lambda: "another"),
        lambda patch: patch.setattr(measured_gain, "num_threads", lambda: 99),
        lambda patch: patch.setattr(measured_gain, "__version__", "99.0.0"),
        lambda patch: patch.setenv("MLX_DEFAULT_DEVICE", "cpu"),
    ],
    ids=["GPU", "no GPU", "CPU", "threads", "version", "mlx device"],
)
def test_another_machine_or_version_has_measured_nothing(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure()
    assert chosen() == "auto"
    change(monkeypatch)
    assert chosen() == "off"


@pytest.mark.parametrize("backend", measured_gain.LIBRARIES)
def test_another_version_of_a_library_has_measured_nothing(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(ModelConfig(backend=backend))
    versions: dict[str, str] = {}
    monkeypatch.setattr("importlib.metadata.version", lambda name: versions.get(name, "1.0"))
    measure(config)
    assert chosen(config) == "auto"
    for library in measured_gain.LIBRARIES[backend]:
        versions[library] = "1.1"
        assert chosen(config) == "off"
        versions.clear()


def test_another_model_backend_or_type_has_measured_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED_PATH, folder)
    copied = Config(ModelConfig(str(folder), backend="fake"))
    measure()
    assert chosen(copied) == "off"
    assert chosen(Config(ModelConfig(backend="mlx"))) == "off"
    assert chosen(Config(ModelConfig(backend="fake", dtype="float32"))) == "off"
    measure(copied)
    assert chosen(copied) == "auto"
    os.utime(folder / "model.safetensors", (1, 1))  # other weights in the same place
    assert chosen(copied) == "off"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"{}", b"[{}]", b"\xff\xfe"],
    ids=["empty", "cut", "another's", "fields", "bytes"],
)
def test_a_damaged_file_is_reported_once_and_says_nothing(
    content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    measure()
    gains_path().write_bytes(content)
    with caplog.at_level(logging.WARNING, logger="pippin"):
        assert chosen() == "off"
    (record,) = caplog.records
    assert f"{gains_path()} is not read" in record.getMessage()
    measure()
    assert chosen() == "auto"


@pytest.mark.parametrize("given", ["off", "suffix", "mtp", "auto"])
def test_what_is_given_stays(given: str, caplog: pytest.LogCaptureFixture) -> None:
    for ratio in (0.5, 1.5):
        measure(ratio=ratio)
        with caplog.at_level(logging.INFO, logger="pippin"):
            assert chosen(with_engine(speculate=given)) == given
    assert "speculate" not in caplog.text


@pytest.mark.parametrize("option", ["deterministic", "safe"])
def test_engines_that_have_no_drafts_do_not_ask(
    option: str, caplog: pytest.LogCaptureFixture
) -> None:
    measure()
    gains_path().write_bytes(b"it is not even read")
    with caplog.at_level(logging.INFO, logger="pippin"):
        assert chosen(with_engine(**{option: True})) == "off"
    assert "speculate" not in caplog.text
    assert "is not read" not in caplog.text


def test_one_gain_is_kept_of_each_and_no_more_than_the_last_ones() -> None:
    first = measure(ratio=0.5)
    assert measure(ratio=2.0).served == first.served
    for number in range(MOST_KEPT):
        served = first.served | {"model": str(number)}
        keep_gain(Gain(served, 1.0, True, "2026-11-19"))
    kept = msgspec.json.decode(gains_path().read_bytes())
    assert [gain["served"]["model"] for gain in kept] == [*map(str, range(MOST_KEPT))]
    assert [path.name for path in gains_path().parent.iterdir()] == [gains_path().name]


def test_llm_has_the_same_default() -> None:
    for ratio, found in ((1.0, "off"), (1.5, "auto")):
        measure(ratio=ratio)
        with LLM(config=CONFIG) as llm:
            assert llm.config.engine.speculate == found
            assert (llm.loop.scheduler.speculation is not None) == (found == "auto")
