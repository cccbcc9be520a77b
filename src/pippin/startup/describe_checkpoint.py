"""What a checkpoint's files say about it, for clients. Reads no weights."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

from pippin.api.model_info import CheckpointInfo
from pippin.text.tokenizer import Tokenizer, read_json

log = logging.getLogger(__name__)

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


def log_unserved(name: str, checkpoint: CheckpointInfo) -> None:
    if checkpoint.unserved:
        log.warning(
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
    text = config.get("text_config")
    of_text = text if isinstance(text, dict) else {}
    names = (config.get(n) or of_text.get(n) for n in ("dtype", "torch_dtype"))
    name = next(filter(None, names), "")
    return {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}.get(str(name), str(name))


def context_length(path: Path) -> int:
    """In tokens, as config.json has it."""
    return _number(path, ("max_position_embeddings", "seq_length"), 4096)


def most_context(path: Path) -> int | None:
    """What --max-len may be at the most: more than `context_length` where the rotation of positions
    is scaled to more. None: config.json has no limit, as of models without positions."""
    options = _options(path)
    most = next((n for name in CONTEXT if isinstance(n := options.get(name), int)), None)
    rope = options.get("rope_parameters") or options.get("rope_scaling")
    if most is None or not isinstance(rope, dict):
        return most
    factor, trained = rope.get("factor"), rope.get("original_max_position_embeddings")
    if isinstance(factor, int | float) and isinstance(trained, int):
        return max(most, int(factor * trained))
    return most


def vocabulary_size(path: Path) -> int:
    return _number(path, ("vocab_size",), 0) or len(Tokenizer.load(path).vocabulary)


def _number(path: Path, names: tuple[str, ...], default: int) -> int:
    options = _options(path)
    found = (options.get(name) for name in names)
    return next((n for n in found if isinstance(n, int) and n > 0), default)


def _options(path: Path) -> dict[str, Any]:
    """Of the model of text."""
    config = read_json(path / "config.json")
    text = config.get("text_config")
    return {**config, **(text if isinstance(text, dict) else {})}
