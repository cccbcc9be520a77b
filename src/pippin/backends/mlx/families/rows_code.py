"""Gives a model's parts code that runs rows of different lengths, where mlx-lm's own cannot.

Only for families whose code counts on one position for all rows, which no cache view can answer.
"""

from __future__ import annotations

import importlib

from mlx.nn.layers.base import Module

_PACKAGE = "pippin.backends.mlx.families"
_MODULES = {"mlx_lm.models.llama4": "llama4", "mlx_lm.models.minimax_m3_vl": "minimax_m3"}


def use_rows_code(model: Module) -> None:
    for _, part in model.named_modules():
        module = _MODULES.get(type(part).__module__)
        if module is not None:
            classes = importlib.import_module(f"{_PACKAGE}.{module}").CLASSES
            part.__class__ = classes.get(type(part), type(part))
