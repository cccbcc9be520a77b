"""What a config leaves open is decided once, and what cannot be found is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from pippin.config import Config, ModelConfig, ServerConfig
from pippin.errors import LoadError
from pippin.resolve import resolve


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
