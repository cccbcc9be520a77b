"""What a config leaves open is decided once, and what cannot be found is named."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from bundled import BUNDLED_PATH
from pippin.config import Config, EngineConfig, ModelConfig, ServerConfig
from pippin.errors import ConfigError, LoadError
from pippin.startup.launch import with_batch_running
from pippin.startup.resolve import choose_backend, resolve


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
