"""Where a model's files come from, what they are called, and that none of them is run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from bundled import BUNDLED_PATH
from pippin.backends.mlx.load import load
from pippin.backends.torch.config import read_config
from pippin.config import Config, ModelConfig
from pippin.errors import LoadError
from pippin.hub import HUB_FILES, HUB_FOLDERS
from pippin.startup.checkpoint import (
    checkpoint_names,
    describe_checkpoint,
    find_checkpoint,
    log_unserved,
)
from pippin.startup.resolve import resolve
from pippin.text.bundle import TextBundle
from pippin.text.tokenizer import Tokenizer


def checkpoint(path: Path, *, weights: str = "model.safetensors", **config: Any) -> ModelConfig:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (path / weights).write_bytes(b"")
    return ModelConfig(model=str(path))


def served_name(model: ModelConfig) -> str | None:
    return resolve(Config(model=model)).server.served_name


def test_a_checkpoint_has_the_name_of_its_directory_or_its_id_on_the_hub() -> None:
    assert checkpoint_names(Path("/models/Qwen3.5-0.8B")) == ("Qwen3.5-0.8B",)
    cached = Path("/cache/hub/models--Qwen--Qwen3.5-0.8B/snapshots/0123")
    assert checkpoint_names(cached) == ("Qwen/Qwen3.5-0.8B", "Qwen3.5-0.8B")
    assert checkpoint_names(Path("/hub/models--gpt2/snapshots/0123")) == ("gpt2", "gpt2")


def test_a_model_is_served_under_the_last_part_of_its_id(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    snapshot = tmp_path / "snapshots" / "2f5ab0"
    snapshot.parent.mkdir()
    checkpoint(snapshot)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(snapshot))
    assert served_name(ModelConfig(model="Qwen/Qwen3.5-0.8B")) == "Qwen3.5-0.8B"


def test_a_directory_is_served_under_its_name_however_it_is_spelt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "my-model"
    assert served_name(checkpoint(path)) == "my-model"
    assert served_name(ModelConfig(model=f"{path}/")) == "my-model"
    monkeypatch.chdir(path)
    assert served_name(ModelConfig(model=".")) == "my-model"
    assert served_name(ModelConfig()) == "stories-hybrid-20m"


def test_the_demo_model_is_the_checkouts_or_an_installed_package_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pippin.startup.checkpoint.CHECKOUT_MODELS", tmp_path / "nothing")
    monkeypatch.setattr("pippin.startup.checkpoint.DEMO_PACKAGE", "some_demo")
    with pytest.raises(LoadError, match=r'not installed: pip install "pippin\[demo\]", or give'):
        find_checkpoint(ModelConfig())
    with pytest.raises(LoadError, match=r"nor an installed demo model \(none\)"):
        find_checkpoint(ModelConfig(model="stories"))
    package = tmp_path / "some_demo"
    package.mkdir()
    (package / "__init__.py").touch()
    checkpoint(package / "stories-hybrid-20m")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_checkpoint(ModelConfig()) == package / "stories-hybrid-20m"


def test_only_what_is_read_is_downloaded() -> None:
    files = [
        *("config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"),
        *("tokenizer.json", "chat_template.jinja", "merges.txt"),
        *("consolidated.safetensors", "original/consolidated.00.pth", "original/params.json"),
        *("pytorch_model.bin", "modeling_own.py", "onnx/model.safetensors", "README.md"),
    ]
    kept = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=HUB_FILES, ignore_patterns=HUB_FOLDERS
    )
    assert list(kept) == files[:6]


def test_pickles_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"pytorch_model\.bin is a pickle"):
        find_checkpoint(checkpoint(tmp_path, weights="pytorch_model.bin"))


def test_gguf_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for model, why in ((tmp_path, "has no config.json"), (tmp_path / "model.gguf", "is a file")):
        with pytest.raises(LoadError, match=rf"{why}: give a directory .*GGUF is not read"):
            find_checkpoint(ModelConfig(str(model)))


@pytest.mark.parametrize("nbytes", [4, 1000, 40_000_000])
def test_a_file_of_weights_that_was_cut_off_is_refused_by_name(nbytes: int, tmp_path: Path) -> None:
    shutil.copy(BUNDLED_PATH / "config.json", tmp_path)
    whole = (BUNDLED_PATH / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:nbytes])
    with pytest.raises(LoadError, match=r"model\.safetensors cannot be read, perhaps its download"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_file_that_is_nested_too_deeply_is_refused_by_name(name: str, tmp_path: Path) -> None:
    shutil.copytree(BUNDLED_PATH, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}")
    readers: list[Callable[[Path], object]] = [Tokenizer.load]
    if name == "config.json":
        readers = [lambda path: find_checkpoint(ModelConfig(str(path))), load, read_config]
    for read in readers:
        with pytest.raises(LoadError, match=re.escape(name)):
            read(tmp_path)


def test_a_model_with_code_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"its own model code \(own\.py\)"):
        find_checkpoint(checkpoint(tmp_path, model_file="own.py"))


def test_a_tokenizer_that_is_code_is_refused(tmp_path: Path) -> None:
    model = checkpoint(tmp_path)
    config = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match="its tokenizer is Python code"):
        find_checkpoint(model)


@pytest.mark.slow
def test_code_that_lies_beside_the_weights_is_not_run(tmp_path: Path) -> None:
    """Many checkpoints name code for other programs in `auto_map`; here it is only passed over."""
    path, ran = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(BUNDLED_PATH, path)
    (path / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Own: pass")
    names = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    auto_map = dict.fromkeys(names, "own.Own")
    for name in ("config.json", "tokenizer_config.json"):
        known = json.loads((path / name).read_text()) if (path / name).exists() else {}
        (path / name).write_text(json.dumps({**known, "auto_map": auto_map}))
    found = find_checkpoint(ModelConfig(model=str(path)))
    TextBundle.load(found)
    load(found)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("config", "unserved"),
    [
        ({"vision_config": {"depth": 2}}, ("image",)),
        ({"vision_config": {"depth": 2}, "audio_config": {"depth": 2}}, ("image", "audio")),
        ({"vision_config": None}, ()),
        ({}, ()),
    ],
)
def test_a_model_that_is_served_without_its_tower_says_so(
    tmp_path: Path,
    config: dict[str, Any],
    unserved: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = Path(checkpoint(tmp_path / "model", **config).model)
    described = describe_checkpoint(path)
    assert described.unserved == unserved
    log_unserved("qwen", described)
    assert ("qwen reads " + " and ".join(unserved) in caplog.text) == bool(unserved)
