"""`pippin deploy ray`: reads the file of a deployment. Imports no Ray."""

from __future__ import annotations

import difflib
import json
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from cyclopts import App, Parameter
from cyclopts.config import Dict

from pippin.cli.model_commands import serve
from pippin.cli.options import SECTIONS, option_name, without_headings
from pippin.cli.settings import KEYS, MODELS, SECRETS, Setting, read_config_file
from pippin.config import Config
from pippin.deploy.plan import Plan, PrefillConfig, RayConfig
from pippin.deploy.run_on_ray import run_on_ray
from pippin.deploy.serve_options import serve_config
from pippin.errors import ConfigError

TABLES = ("ray", "prefill")
T = TypeVar("T", RayConfig, PrefillConfig)

deploy = App(name="deploy", help="Run several engines on a cluster.")


@deploy.command
def ray(
    file: Path,
    *,
    address: str = "auto",
    dry_run: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Run replicas of an engine on Ray Serve, with autoscaling and Ray's prefix-aware router.

    Requires `pip install 'pippin[ray]'` and a Ray cluster: `ray start --head` starts one. Returns
    when the models are loaded; the deployment keeps running. `serve status` shows it, `serve
    shutdown` ends it. Values of PIPPIN_ variables and of pippin.toml are not used.

    Parameters
    ----------
    file
        TOML: options of `pippin serve` by their names, and sections [ray] and [prefill].
    address
        Address of the cluster. `auto`: the one on this machine, or that of RAY_ADDRESS.
    dry_run
        Check the file and print it as a config for `serve deploy`. Starts nothing, needs no Ray.
    """
    plan = read_plan(file)
    if dry_run:
        print(json.dumps(serve_config(plan), indent=2))
        return
    url = run_on_ray(plan, address)
    print(f"Serving at {url}. `serve status` shows the deployment, `serve shutdown` ends it.")


def read_plan(path: Path) -> Plan:
    settings = read_config_file(path, KEYS, TABLES)
    tables = {setting.name: setting for setting in settings if setting.name in TABLES}
    ray_table, prefill_table = tables.get("ray"), tables.get("prefill")
    return Plan(
        _config([setting for setting in settings if setting.name not in TABLES]),
        RayConfig() if ray_table is None else _section(ray_table, RayConfig),
        None if prefill_table is None else _section(prefill_table, PrefillConfig),
    )


def _config(settings: list[Setting]) -> Config:
    """As `pippin serve` reads them, or the error that it would report."""
    for setting in settings:
        if setting.name == MODELS:
            raise ConfigError(
                f"{setting.place}: a deployment serves one model: write it as model = and remove "
                "[models]"
            )
        if setting.name in SECRETS:
            raise ConfigError(
                f"{setting.place}: Ray's dashboard and logs would show {setting.name}: write it "
                f"into a file of its own on every machine and set {setting.name}-file"
            )
    sources = [
        Dict({setting.name: setting.value}, source=setting.place, use_commands_as_keys=False)
        for setting in settings
    ]
    options = App(name="pippin serve", config=sources)
    options.default(serve)
    _, bound, _ = options.parse_args([])
    given = {name: value for name, value in bound.arguments.items() if name in SECTIONS}
    return Config(**{name: without_headings(name, value) for name, value in given.items()})


def _section(setting: Setting, kind: type[T]) -> T:
    table: Any = setting.value
    where = f"{setting.place}: section [{setting.name}]"
    if not isinstance(table, dict):
        raise ConfigError(f"{setting.place}: {setting.name} is a section: write [{setting.name}]")
    known = [option_name(field.name) for field in fields(kind)]
    for key in table:
        if option_name(key) not in known:
            near = difflib.get_close_matches(option_name(key), known, n=1)
            meant = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise ConfigError(f"{where} has no {key}; {meant}")
    try:
        return msgspec.convert({key.replace("-", "_"): table[key] for key in table}, kind)
    except msgspec.ValidationError as error:  # also of a ConfigError: its checks run inside
        raise ConfigError(f"{where}: {error}") from error
