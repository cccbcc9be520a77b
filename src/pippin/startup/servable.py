"""Whether a checkpoint can be served, as far as its small files say. Reads no weights."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pippin.backends.torch.config import FAMILIES, read_shape
from pippin.errors import LoadError, UnsupportedLayout
from pippin.startup.find_checkpoint import check_checkpoint
from pippin.startup.resolve import has_mlx
from pippin.text.tokenizer import read_json

Servable = Literal["yes", "no", "unknown"]


def is_servable(path: Path) -> tuple[Servable, str]:
    """With the reason, where it is not. `unknown`: only loading it shows whether it is."""
    try:
        check_checkpoint(path)
        config = read_json(path / "config.json")
        family = str(config.get("model_type"))
        if has_mlx():
            _check_family(family)
            if _has_file_in_mlx_lm(family):
                return "yes", ""
        if family in FAMILIES and find_spec("torch") is not None:
            read_shape(config)  # it refuses what torch lacks of a family
            return "yes", ""
    except LoadError as error:
        return "no", error.message
    return "unknown", ""


def _check_family(family: str) -> None:
    from pippin.backends.mlx.families.refusals import check  # prepares mlx's import

    try:
        check(family)
    except UnsupportedLayout:
        if family not in FAMILIES:
            raise


def _has_file_in_mlx_lm(family: str) -> bool:
    found = find_spec("mlx_lm")
    folders = found.submodule_search_locations if found is not None else None
    return family.isidentifier() and any(
        Path(folder, "models", f"{family}.py").is_file() for folder in folders or ()
    )
