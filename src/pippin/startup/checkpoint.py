"""A model's files: found (demo model, directory, or Hugging Face hub), checked and described.

Reads no weights.
"""

from __future__ import annotations

import hashlib
import logging
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pippin.api.model_info import CheckpointInfo, ModelInfo
from pippin.config import Config, ModelConfig
from pippin.errors import LoadError
from pippin.hub import HUB_ID, download
from pippin.text.bundle import TextBundle
from pippin.text.tokenizer import Tokenizer, read_json

logger = logging.getLogger(__name__)

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


# How families name it.
CONTEXT = ("max_position_embeddings", "seq_length", "n_positions", "n_ctx", "max_seq_len")
_TOWERS = {"image": "vision_config", "audio": "audio_config"}


def describe_checkpoint(path: Path) -> CheckpointInfo:
    """The digest is of the configuration and of the names and sizes of the weights' files."""
    config = read_json(path / "config.json")
    weights = sorted((file.name, file.stat().st_size) for file in path.glob("model*.safetensors"))
    digest = hashlib.sha256((path / "config.json").read_bytes())
    digest.update(repr(weights).encode())
    return CheckpointInfo(
        family=str(config.get("model_type", "")),
        quantization=_quantization(config),
        nbytes=sum(nbytes for _, nbytes in weights),
        digest=digest.hexdigest(),
        unserved=tuple(kind for kind in ("image", "audio") if config.get(_TOWERS[kind])),
    )


def load_text(config: Config) -> TextBundle:
    server = config.server
    parsers = {"tool_parser": server.tool_parser, "reasoning_parser": server.reasoning_parser}
    return TextBundle.load(Path(config.model.model), **parsers)


def model_info(config: Config, max_len: int, vocab_size: int, **further: Any) -> ModelInfo:
    """What clients read of a resolved config's model; logs what is not served of it."""
    path, name = Path(config.model.model), str(config.server.served_name)
    checkpoint = describe_checkpoint(path)
    log_unserved(name, checkpoint)
    return ModelInfo(
        name,
        max_len,
        vocab_size,
        created_s=int(time.time()),
        aliases=config.server.alias,
        checkpoint_names=checkpoint_names(path),
        checkpoint=checkpoint,
        **further,
    )


def log_unserved(name: str, checkpoint: CheckpointInfo) -> None:
    if checkpoint.unserved:
        logger.warning(
            "%s reads %s too, but only its text part is served: what a request contains of that is "
            "omitted, and its reply lists it (--images refuse: HTTP 400)",
            name,
            " and ".join(checkpoint.unserved),
        )


def _quantization(config: dict[str, Any]) -> str:
    """Of MLX's checkpoints the bits of a weight, else the type of the numbers."""
    quantized = config.get("quantization") or config.get("quantization_config")
    if isinstance(quantized, dict):
        bits = quantized.get("bits")
        return f"Q{bits}" if bits is not None else str(quantized.get("quant_method", "")).upper()
    own = text_options(config)
    places = [place.get(n) for n in ("dtype", "torch_dtype") for place in (config, own)]
    name = next(filter(None, places), "")
    return {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}.get(str(name), str(name))


def context_length(path: Path) -> int:
    """In tokens, as config.json has it."""
    return _number(path, ("max_position_embeddings", "seq_length")) or 4096


def most_context(path: Path) -> int | None:
    """What --max-len may be at the most: more than `context_length` where the rotation of positions
    is scaled to more. None: config.json has no limit, as of models without positions."""
    options = text_options(read_json(path / "config.json"))
    most = next((n for name in CONTEXT if isinstance(n := options.get(name), int)), None)
    rope = options.get("rope_parameters") or options.get("rope_scaling")
    if most is None or not isinstance(rope, dict):
        return most
    factor, trained = rope.get("factor"), rope.get("original_max_position_embeddings")
    if isinstance(factor, int | float) and isinstance(trained, int):
        return max(most, int(factor * trained))
    return most


def vocabulary_size(path: Path) -> int:
    return _number(path, ("vocab_size",)) or len(Tokenizer.load(path).vocabulary)


def _number(path: Path, names: tuple[str, ...]) -> int | None:
    options = text_options(read_json(path / "config.json"))
    found = (options.get(name) for name in names)
    return next((n for n in found if isinstance(n, int) and n > 0), None)


def text_options(config: dict[str, Any]) -> dict[str, Any]:
    """Of the model of text, where a checkpoint has others too."""
    text = config.get("text_config")
    return {**config, **(text if isinstance(text, dict) else {})}
