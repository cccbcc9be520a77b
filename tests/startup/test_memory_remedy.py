"""Errors about memory name what to do: an amount that works, or a smaller model."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bundled import BUNDLED_PATH
from cases import cases
from pippin.amounts import option_bytes, parse_memory
from pippin.backends.fake import FakeBackend
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.engine.build_loop import build_loop, load_backend
from pippin.errors import LoadError
from pippin.startup.engines import with_remedy


def ignore(stage: str) -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["mlx", "torch"])
@pytest.mark.parametrize("budget", ["1MB", "30MB"])
def test_a_budget_that_is_too_small_names_one_that_is_not(backend: str, budget: str) -> None:
    model = ModelConfig(str(BUNDLED_PATH), backend=backend, dtype="float32")  # type: ignore[arg-type]
    config = Config(model, EngineConfig(max_running=2, memory=budget))
    loaded = load_backend(config, ignore)
    with pytest.raises(LoadError, match=r"memory: the model uses .* of a budget of") as refused:
        build_loop(config, ignore, backend=loaded)
    found = re.search(r"start with --memory ([\d.]+[GM]B) or more", refused.value.message)
    assert found is not None, refused.value.message
    enough = replace(config, engine=replace(config.engine, memory=found[1]))
    build_loop(enough, ignore, backend=loaded).close()


@pytest.mark.slow
def test_a_model_that_the_device_is_too_small_for_names_no_budget() -> None:
    model = ModelConfig(str(BUNDLED_PATH), backend="mlx", dtype="float32")
    config = Config(model, EngineConfig(memory="1MB"))
    loaded = load_backend(config, ignore)
    loaded.device = replace(loaded.device, memory_bytes=10**6)  # type: ignore[misc]
    with pytest.raises(
        LoadError, match=r"the device has 1\.0 MB: use a smaller or quantized model"
    ):
        build_loop(config, ignore, backend=loaded)


def test_a_backend_that_has_no_room_is_closed_unless_it_is_the_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it has claimed of the device would be missing at the next try in this process."""
    closed: list[FakeBackend] = []
    monkeypatch.setattr(FakeBackend, "limit_memory", lambda self, budget: 0)
    monkeypatch.setattr(FakeBackend, "close", lambda self: closed.append(self))
    config = Config(ModelConfig(backend="fake"))
    with pytest.raises(LoadError, match="memory"):
        build_loop(config, ignore)
    assert len(closed) == 1
    with pytest.raises(LoadError, match="memory"):
        build_loop(config, ignore, backend=FakeBackend())
    assert len(closed) == 1


@cases("nbytes", [1, 999, 10**5, 10**6 + 1, 999_999_999, 6_250_000_001, 10**14])
def test_an_amount_to_give_is_never_rounded_down(nbytes: int) -> None:
    assert nbytes <= parse_memory(option_bytes(nbytes)) <= 1.1 * nbytes + 1000


@pytest.mark.parametrize(
    "reason",
    [
        "the engine process was killed by SIGKILL",
        "could not load m: std::bad_alloc",
        "could not load m: [metal::malloc] Attempting to allocate 99 bytes",
        "could not load m: Unable to allocate 3. GiB for an array",
    ],
)
def test_an_engine_that_ran_out_of_memory_is_explained(tmp_path: Path, reason: str) -> None:
    with (tmp_path / "model-00001-of-00001.safetensors").open("wb") as file:
        file.truncate(2_500_000_000)  # sparse
    explained = with_remedy(reason, Config(ModelConfig(str(tmp_path))))
    assert explained.startswith(reason)
    assert "The weights are 2.5 GB on disk, and this machine has" in explained
    assert "use a smaller or quantized model, or lower --max-model-len" in explained


@pytest.mark.parametrize(
    "reason", ["memory: the model uses 5.0 GB of a budget of 4.0 GB", "could not load m: no layers"]
)
def test_other_reasons_stay_as_they_are(reason: str) -> None:
    assert with_remedy(reason, Config()) == reason
