"""`pippin list` and `pippin rm`: the models in the hub's cache. Knows no options."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from pippin.amounts import show_bytes
from pippin.errors import ConfigError
from pippin.hub.cached_models import (
    CachedModel,
    cached_models,
    delete_cached_model,
    find_cached_model,
)
from pippin.startup.servable import is_servable


def list_models(*, as_json: bool) -> None:
    described = [_describe(model) for model in cached_models()]
    if as_json:
        print(json.dumps(described, indent=2))
        return
    if not described:
        print("No model is in the Hugging Face hub's cache. `pippin pull MODEL` downloads one.")
        return
    table = Table("model", "size", "last used", "can be served", box=None)
    for model in described:
        reason = f": {model['reason']}" if model["reason"] else ""
        used = model["last_used"].replace("T", " ").removesuffix("+00:00")
        table.add_row(
            model["name"], show_bytes(model["bytes"]), used, f"{model['servable']}{reason}"
        )
    Console().print(table)


def remove_model(name: str, *, confirmed: bool) -> None:
    model = find_cached_model(name)
    if not confirmed and not _confirm(model):
        print("Nothing was deleted.")
        return
    freed = delete_cached_model(model)
    print(f"Deleted {model.name}: {freed:,} bytes freed.")


def _describe(model: CachedModel) -> dict[str, Any]:
    servable, reason = ("unknown", "") if model.snapshot is None else is_servable(model.snapshot)
    server = model.server()
    return {
        "name": model.name,
        "bytes": model.nbytes,
        "last_used": datetime.fromtimestamp(model.used_s, UTC).isoformat(timespec="seconds"),
        "servable": servable,
        "reason": reason,
        "path": str(model.snapshot or model.path),
        "served_at": None if server is None else server.url,
    }


def _confirm(model: CachedModel) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(f"rm of {model.name} asks first, and there is no terminal: use --yes")
    asked = f"Delete {model.name} ({show_bytes(model.nbytes)}) from {model.path}? [y/N] "
    return input(asked).strip().lower() in ("y", "yes")
