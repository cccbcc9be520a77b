"""Whom `bench compare` runs beside us. Starts nothing and measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pippin.bench.client.wire import Target
from pippin.bench.errors import BenchError
from pippin.bench.servers.processes import mlx_lm_server, transformers_server


@dataclass(frozen=True)
class Rival:
    name: str
    library: Literal["mlx", "torch"]  # that it computes with
    serve: Callable[[Path, Sequence[str]], AbstractContextManager[Target]]  # with more options


MLX_LM = Rival("mlx-lm", "mlx", mlx_lm_server)
TRANSFORMERS = Rival("transformers", "torch", transformers_server)
RIVALS = (MLX_LM, TRANSFORMERS)


def rival_of(name: str) -> Rival:
    found = next((rival for rival in RIVALS if rival.name == name), None)
    if found is None:
        names = ", ".join(rival.name for rival in RIVALS)
        raise BenchError(f"nobody here is called {name!r} to compare against: {names}")
    return found
