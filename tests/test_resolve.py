"""What a config leaves open is decided once, and what cannot be found is named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from pippin.config import Config, ModelConfig, ServerConfig
from pippin.errors import LoadError
from pippin.resolve import choose_backend, resolve


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


def test_resolve_decides_what_was_left_open() -> None:
    resolved = resolve(Config())
    assert resolved.model.backend == "mlx"
    assert Path(resolved.model.model, "model.safetensors").is_file()
    assert resolved.server.served_name == "stories-hybrid-20m"
    named = resolve(Config(server=ServerConfig(served_name="mine")))
    assert named.server.served_name == "mine"


def test_auto_is_what_can_run_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On Linux `mlx` is a wheel without a library: `pip install pippin[torch]` brings it so."""
    (tmp_path / "lib").mkdir()
    library = tmp_path / "lib" / "libmlx.so"
    library.touch()
    found = {"mlx": SimpleNamespace(submodule_search_locations=[str(tmp_path)]), "torch": object()}
    monkeypatch.setattr("pippin.resolve.find_spec", found.get)
    assert choose_backend("auto") == "mlx"
    library.unlink()
    assert choose_backend("auto") == "torch"
    assert choose_backend("mlx") == "mlx"  # what was asked for is tried, and says what it lacks
    del found["mlx"]
    assert choose_backend("auto") == "torch"
    del found["torch"]
    with pytest.raises(LoadError, match="neither mlx nor torch"):
        choose_backend("auto")
