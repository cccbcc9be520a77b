"""What a config leaves open: backend, length, draft model, and drafts by what was measured."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from bundled import BUNDLED_PATH
from pippin import LLM
from pippin.config import Config, EngineConfig, ModelConfig, ServerConfig
from pippin.errors import ConfigError, LoadError
from pippin.startup import resolve as measured_gain
from pippin.startup.launch import with_batch_running
from pippin.startup.resolve import (
    MOST_KEPT,
    Gain,
    choose_backend,
    gains_path,
    keep_gain,
    resolve,
    resolve_draft_model,
    served_by,
)


def test_a_missing_model_is_named_with_what_was_tried(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"no model 'nothing'.*stories-hybrid-20m"):
        resolve(Config(model=ModelConfig(model="nothing")))
    with pytest.raises(LoadError, match=r"has no config\.json"):
        resolve(Config(model=ModelConfig(model=str(tmp_path))))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LoadError, match=r"has no model\*\.safetensors"):
        resolve(Config(model=ModelConfig(model=str(tmp_path))))
    with pytest.raises(LoadError, match="is a file"):
        resolve(Config(model=ModelConfig(model=str(tmp_path / "config.json"))))


def test_resolve_decides_what_was_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pippin.startup.resolve.compute_capability", lambda: None)
    resolved = resolve(Config())
    assert resolved.model.backend == "mlx"
    assert Path(resolved.model.model, "model.safetensors").is_file()
    assert resolved.server.served_name == "stories-hybrid-20m"
    named = resolve(Config(server=ServerConfig(served_name="mine")))
    assert named.server.served_name == "mine"


def test_files_and_batches_have_a_directory_for_each_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pippin.startup.resolve.user_state_path", tmp_path.joinpath)
    named = {
        name: Path(str(resolve(Config(server=ServerConfig(served_name=name))).server.batch_dir))
        for name in ("mine", "org/model-4bit", "../..", "..")
    }
    assert named["mine"] == tmp_path / "pippin" / "batches" / "mine"
    assert named["org/model-4bit"].name == "org_model-4bit"
    assert {path.parent for path in named.values()} == {named["mine"].parent}, "none escapes"
    assert ".." not in {path.name for path in named.values()}
    given = resolve(Config(server=ServerConfig(batch_dir="here", batch_running=3))).server
    assert (given.batch_dir, given.batch_running) == ("here", 3)
    assert with_batch_running(given, num_slots=64).batch_running == 3
    default = resolve(Config()).server
    assert [with_batch_running(default, n).batch_running for n in (2, 64, 256)] == [1, 16, 64]
    assert list(tmp_path.iterdir()) == [], "nothing is created"


class Installed:
    """Stands in for what is installed: packages, each with its library or without one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._folder = folder
        self._found: dict[str, SimpleNamespace] = {}
        monkeypatch.setattr("pippin.startup.resolve.find_spec", self._found.get)

    def add(self, package: str, library: str | None) -> None:
        place = self._folder / package
        (place / "lib").mkdir(parents=True)
        if library is not None:
            (place / "lib" / library).touch()
        self._found[package] = SimpleNamespace(submodule_search_locations=[str(place)])


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Installed:
    return Installed(monkeypatch, tmp_path)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pippin.startup.resolve.compute_capability", lambda: (9, 0))


def test_auto_is_mlx_where_it_can_run(installed: Installed) -> None:
    installed.add("torch", "libtorch_cpu.so")
    assert choose_backend("auto", BUNDLED_PATH) == "torch"
    installed.add("mlx", "libmlx.so")
    assert choose_backend("auto", BUNDLED_PATH) == "mlx"


def test_mlx_without_its_library_cannot_run(installed: Installed) -> None:
    """On Linux `mlx` is a wheel without a library: `pip install pippin[torch]` brings it so."""
    installed.add("mlx", None)
    with pytest.raises(LoadError, match="neither mlx nor torch"):
        choose_backend("auto", BUNDLED_PATH)
    assert choose_backend("mlx", BUNDLED_PATH) == "mlx"  # it is tried, and says what it lacks
    installed.add("torch", "libtorch_cpu.so")
    assert choose_backend("auto", BUNDLED_PATH) == "torch"


@pytest.mark.usefixtures("gpu")
def test_auto_is_torch_on_an_nvidia_gpu(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.add("mlx", "libmlx.so")
    assert choose_backend("auto", BUNDLED_PATH) == "mlx"
    installed.add("torch", "libtorch_cuda.so")
    assert choose_backend("auto", BUNDLED_PATH) == "torch"
    assert choose_backend("mlx", BUNDLED_PATH) == "mlx"
    for options in (EngineConfig(wired=True), EngineConfig(buffer_limit=5)):
        assert choose_backend("auto", BUNDLED_PATH, options) == "mlx"
    for capability in (None, (7, 5)):
        monkeypatch.setattr(
            "pippin.startup.resolve.compute_capability", lambda found=capability: found
        )
        assert choose_backend("auto", BUNDLED_PATH) == "mlx"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gemma4_text"},
        {"quantization": {"bits": 3, "group_size": 64}},
        {"head_dim": 80},
        {"num_attention_heads": None},
    ],
)
def test_what_torch_lacks_kernels_for_is_mlx_on_a_gpu_too(
    change: dict[str, object], installed: Installed, tmp_path: Path
) -> None:
    installed.add("mlx", "libmlx.so")
    installed.add("torch", "libtorch_cuda.so")
    config = {
        "model_type": "qwen3",
        "hidden_size": 128,
        "num_attention_heads": 4,
        "head_dim": 32,
        "vocab_size": 100,
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-6,
    }

    def chosen(config: dict[str, object]) -> str:
        given = {key: value for key, value in config.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(given))
        return choose_backend("auto", tmp_path)

    assert chosen(config) == "torch"
    windows = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    assert chosen(config | windows) == "torch"
    assert chosen(config | {"quantization": {"bits": 4, "group_size": 64}}) == "torch"
    assert chosen(config | change) == "mlx"


@pytest.mark.parametrize(
    ("config", "most"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"text_config": {"max_position_embeddings": 8192}}, 8192),
        ({"n_positions": 1024}, 1024),
        (
            {
                "max_position_embeddings": 32_768,
                "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32_768},
            },
            131_072,
        ),
        (
            {
                "max_position_embeddings": 131_072,
                "rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131_072,
        ),
        ({}, None),
    ],
)
def test_a_context_beyond_the_checkpoint_s_is_refused_with_both_numbers(
    config: dict[str, object], most: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (tmp_path / "model.safetensors").write_bytes(b"")

    def asked(max_len: int) -> int | None:
        model = ModelConfig(str(tmp_path), backend="mlx", max_len=max_len)
        return resolve(Config(model=model)).model.max_len

    assert asked(most or 1_000_000) == (most or 1_000_000)
    if most is not None:
        numbers = rf"--max-len is {most + 1:,} tokens, and \S+ holds {most:,}"
        with pytest.raises(ConfigError, match=numbers):
            asked(most + 1)


Change = Callable[[dict[str, Any]], None]


def make_draft(folder: Path, change: Change = lambda _: None) -> str:
    """Files of a checkpoint; `change`: its tokenizer's."""
    tokenizer = json.loads((BUNDLED_PATH / "tokenizer.json").read_text())
    change(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_PATH / name, folder)
    (folder / "model.safetensors").touch()
    return str(folder)


@pytest.mark.parametrize(("given", "found"), [(None, "draft"), ("auto", "auto"), ("draft",) * 2])
def test_a_draft_model_turns_drafts_on(tmp_path: Path, given: Any, found: str) -> None:
    engine = EngineConfig(draft_model=make_draft(tmp_path), speculate=given)
    assert resolve_draft_model(engine, BUNDLED_PATH).speculate == found


def test_drafts_that_are_off_need_no_draft_model(tmp_path: Path) -> None:
    engine = EngineConfig(draft_model=make_draft(tmp_path), speculate="off")
    assert resolve_draft_model(engine, BUNDLED_PATH) == EngineConfig(speculate="off")


def swap(tokenizer: dict[str, Any]) -> None:
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]


def add(tokenizer: dict[str, Any]) -> None:
    token = tokenizer["added_tokens"][0] | {"id": 8192, "content": "<|more|>"}
    tokenizer["added_tokens"].append(token)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (swap, "token 300 is .* there and .* in the model, and 2 tokens differ"),
        (add, "token 8,192 is '<|more|>' there and missing in the model, and 1 tokens differ"),
    ],
    ids=["ids", "vocabulary"],
)
def test_another_tokenizer_is_refused(tmp_path: Path, change: Change, said: str) -> None:
    engine = EngineConfig(draft_model=make_draft(tmp_path, change))
    said = said.replace("|", r"\|")
    with pytest.raises(LoadError, match=f"has another tokenizer than the model: {said}"):
        resolve_draft_model(engine, BUNDLED_PATH)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (EngineConfig(speculate="draft"), "no draft model is given: add --draft-model"),
        (EngineConfig(draft_model="x", speculate="mtp"), "speculate is mtp, which does not use it"),
        (EngineConfig(draft_model="no/such/model"), "no model 'no/such/model' was found"),
    ],
)
def test_what_does_not_go_together_is_refused(engine: EngineConfig, said: str) -> None:
    with pytest.raises(LoadError, match=said):
        resolve_draft_model(engine, BUNDLED_PATH)


def test_deterministic_engines_have_no_draft_model(tmp_path: Path) -> None:
    engine = EngineConfig(draft_model=make_draft(tmp_path), deterministic=True)
    with pytest.raises(ConfigError, match="remove --speculate or --deterministic"):
        resolve_draft_model(engine, BUNDLED_PATH)


def test_a_backend_without_draft_models_refuses_it(tmp_path: Path) -> None:
    engine = EngineConfig(draft_model=make_draft(tmp_path))
    with pytest.raises(LoadError, match="an option of mlx and torch, and this is fake"):
        LLM(config=Config(model=ModelConfig(backend="fake"), engine=engine))


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
        lambda patch: patch.setattr(measured_gain, "installed_versions", lambda _: {"mlx": "99"}),
        lambda patch: patch.setenv("MLX_DEFAULT_DEVICE", "cpu"),
    ],
    ids=["GPU", "no GPU", "CPU", "threads", "version", "library", "mlx device"],
)
def test_another_machine_or_version_has_measured_nothing(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure()
    assert chosen() == "auto"
    change(monkeypatch)
    assert chosen() == "off"


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
