"""Imports mlx-lm's models and its reader of checkpoints, without the rest of mlx-lm.

`import mlx_lm` brings its tokenizers, and with them transformers, and with that torch where it is
installed: seconds and 200 MB in each process that computes, and nothing of it is used here. So the
package is put in place without its own code. That runs when other code in this process uses more of
mlx-lm than its models; the models are then the same ones.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

PACKAGE = "mlx_lm"
READER = f"{PACKAGE}.utils"
# What the reader's file imports, and `load_model` has no use for.
UNUSED = {
    f"{PACKAGE}.tokenizer_utils": ("TokenizerWrapper", "load"),
    "huggingface_hub": ("snapshot_download",),
}
SHADOWED = ("convert", "generate")  # files whose names the package gives to functions


class ModelsAlone(ModuleType):
    """mlx_lm before its own code has run."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._run_own_code()
        return getattr(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in SHADOWED:  # such a file was imported by its full name
            self._run_own_code()

    def _run_own_code(self) -> None:
        self.__class__ = ModuleType  # type: ignore[assignment]
        spec = self.__spec__
        assert isinstance(spec, ModuleSpec)
        assert spec.loader is not None
        spec.loader.exec_module(self)


def put_in_place() -> None:
    """Before anything imports mlx_lm. Imports nothing itself: mlx would read its environment."""
    if PACKAGE in sys.modules:
        return
    spec = find_spec(PACKAGE)
    assert spec is not None
    package = module_from_spec(spec)
    package.__class__ = ModelsAlone
    sys.modules[PACKAGE] = package


def import_load_model() -> Callable[..., Any]:
    """mlx-lm's own `load_model`."""
    package = sys.modules[PACKAGE]
    if not isinstance(package, ModelsAlone):
        return importlib.import_module(READER).load_model  # type: ignore[no-any-return]
    stand_ins = {name: _names(name, has) for name, has in UNUSED.items() if name not in sys.modules}
    sys.modules |= stand_ins
    try:
        reader = importlib.import_module(READER)
    finally:  # other code that imports these gets them whole
        for name in (*stand_ins, READER):
            sys.modules.pop(name, None)
        vars(package).pop("utils", None)
    return reader.load_model  # type: ignore[no-any-return]


def _names(module: str, names: tuple[str, ...]) -> ModuleType:
    stand_in = ModuleType(module)
    vars(stand_in).update(dict.fromkeys(names))
    return stand_in
