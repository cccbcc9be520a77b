"""Finds a model's files: demo model, directory, or Hugging Face hub. Reads no weights."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from pippin.config import ModelConfig
from pippin.errors import LoadError
from pippin.hub.pull import HUB_ID, download
from pippin.text.tokenizer import read_json

CHECKOUT_MODELS = Path(__file__).parents[1] / "models"  # in no wheel: 40 MB
DEMO_PACKAGE = "pippin_demo"
CHECKPOINT = "a directory with config.json and model*.safetensors (GGUF is not read)"


def bundled_models() -> dict[str, Path]:
    """Models that need no download, by name: a checkout's own, or those of pippin[demo]."""
    demo = find_spec(DEMO_PACKAGE)
    folders = [*map(Path, demo.submodule_search_locations or ())] if demo is not None else []
    configs = [
        path for folder in [*folders, CHECKOUT_MODELS] for path in folder.glob("*/config.json")
    ]
    return {path.parent.name: path.parent for path in configs}


def find_checkpoint(config: ModelConfig) -> Path:
    """The directory of a model's files, downloaded if need be (with the hub's progress bars)."""
    name = config.model
    bundled = bundled_models()
    if name in bundled:
        return bundled[name]
    path = Path(name).expanduser()
    if path.is_dir():
        return check_checkpoint(path)
    if path.exists():
        raise LoadError(f"model {name!r} is a file: give {CHECKPOINT}")
    if name == ModelConfig.model:
        raise LoadError(
            f'the demo model {name} is not installed: pip install "pippin[demo]", or give a model: '
            "a directory, or a Hugging Face id such as Qwen/Qwen3.5-0.8B"
        )
    if not HUB_ID.fullmatch(name):
        raise LoadError(
            f"no model {name!r} was found: it is neither a directory, nor a Hugging Face id such "
            f"as owner/name, nor an installed demo model ({', '.join(sorted(bundled)) or 'none'})"
        )
    return check_checkpoint(download(name, config.revision))


def model_name(config: ModelConfig) -> str:
    """The last part of a model's id or path. A download's own path ends in a commit."""
    path = Path(config.model).expanduser()
    return path.resolve().name if path.is_dir() else path.name


def checkpoint_names(path: Path) -> tuple[str, ...]:
    """The id that a checkpoint was downloaded by, and its last part; of any other, its directory's
    name. The hub's cache has `models--ORG--NAME/snapshots/COMMIT`."""
    for directory in path.parents:
        kind, _, id = directory.name.partition("--")
        if kind == "models" and id:
            return (id.replace("--", "/", 1), id.rpartition("--")[2])
    return (path.resolve().name,)


def check_checkpoint(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise LoadError(f"{path} has no config.json: give {CHECKPOINT}")
    _refuse_code(path)
    if not any(path.glob("model*.safetensors")):
        raise LoadError(f"{path} has no model*.safetensors: {_other_weights(path)}")
    return path


def _refuse_code(path: Path) -> None:
    """A checkpoint that needs its own Python code is refused before anything is loaded."""
    if (file := read_json(path / "config.json").get("model_file")) is not None:
        raise LoadError(
            f"{path} needs its own model code ({file}), and Pippin never runs code from a "
            "checkpoint: use a checkpoint of a supported architecture"
        )
    tokenizer = read_json(path / "tokenizer_config.json").get("auto_map")
    if tokenizer is not None and not (path / "tokenizer.json").is_file():
        raise LoadError(
            f"{path} has no tokenizer.json, and its tokenizer is Python code ({tokenizer}), which "
            "Pippin never runs: use a checkpoint with a tokenizer.json"
        )


def _other_weights(path: Path) -> str:
    pickles = [f.name for kind in ("*.bin", "*.pt", "*.pth", "*.ckpt") for f in path.glob(kind)]
    if pickles:
        return (
            f"{sorted(pickles)[0]} is a pickle, which can run code when it is loaded: convert it "
            "to safetensors"
        )
    return "Pippin loads no other format of weights"
