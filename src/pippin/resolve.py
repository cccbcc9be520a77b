"""Decides what a config leaves open, once, at start-up. Reads no weights."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path

from pippin.api.http.keys import read_key_file
from pippin.checkpoint import find_checkpoint, model_name
from pippin.config import BackendName, Config
from pippin.errors import LoadError


def resolve(config: Config) -> Config:
    """Every "auto" that can be decided without the device; the model as a directory."""
    model, server = config.model, config.server
    keys = read_key_file(server.api_key_file) if server.api_key_file is not None else ()
    path = find_checkpoint(model)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            model,
            model=str(path),
            backend=choose_backend(model.backend),
        ),
        server=dataclasses.replace(
            server,
            served_name=server.served_name or model_name(model),
            api_key=(*server.api_key, *keys),
        ),
    )


def choose_backend(name: str) -> BackendName:
    """`auto`: mlx where it can run, else torch. Imports neither of them."""
    match name:
        case "mlx" | "torch" | "fake":
            return name
    if has_mlx():
        return "mlx"
    if find_spec("torch") is not None:
        return "torch"
    raise LoadError("neither mlx nor torch can run here: pip install 'pippin[cpu]' or '[torch]'")


def has_mlx() -> bool:
    """Whether its library is there: on Linux the wheel `mlx` comes without one."""
    found = find_spec("mlx")
    folders = found.submodule_search_locations if found is not None else None
    return any(any(Path(folder, "lib").glob("libmlx.*")) for folder in folders or ())
