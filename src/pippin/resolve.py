"""Decides what a config leaves open, once, at start-up. Reads no weights."""

from __future__ import annotations

import dataclasses

from pippin.api.http.keys import read_key_file
from pippin.checkpoint import find_checkpoint, model_name
from pippin.config import Config


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
            backend="mlx" if model.backend == "auto" else model.backend,
        ),
        server=dataclasses.replace(
            server,
            served_name=server.served_name or model_name(model),
            api_key=(*server.api_key, *keys),
        ),
    )
