"""Who may import whom, read from the source with `ast`."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from cases import cases

SRC = Path(__file__).parent.parent / "src" / "pippin"
ANYTHING = None

# The longest matching name decides. `errors` and its own package are open to everyone.
MAY_IMPORT: dict[str, set[str] | None] = {
    "version": set(),
    "types": set(),
    "errors": set(),
    "logs": set(),
    "amounts": set(),
    "durations": set(),
    "config": {"types", "amounts", "durations"},
    "messages": {"types"},
    "metrics": {"types"},
    "cache": {"types"},
    "cache.entries": {"types"},
    "cache.disk": {"types", "cache.entries"},
    "text": {"types", "messages"},
    "sequences": {"types", "messages", "text"},
    "embedding": {"types", "messages", "sequences"},
    "tasks": set(),
    "decode": {"types"},
    "backends": set(),
    "backends.fallbacks": set(),
    "backends.base": {"types", "cache.entries", "backends.fallbacks"},
    "backends.sampling": {"types", "backends.base"},
    "backends.warm_up": {"types", "backends.base"},
    "backends.chunking": {"types", "backends.base"},
    "backends.host": set(),
    "backends.masks": set(),
    "backends.mtp_weights": set(),
    "backends.draft_limits": set(),
    "backends.draft_texts": {"backends.base", "backends.step_outputs"},
    "backends.fingerprint_reads": {"backends.base"},
    "backends.step_outputs": {"types", "backends.base", "backends.fingerprint_reads"},
    "backends.fake": {
        *("types", "cache.entries", "backends.base", "backends.masks", "backends.step_outputs"),
    },
    "backends.mlx": {
        *("types", "cache.entries", "config"),
        *("backends.base", "backends.host", "backends.fallbacks"),
        *("backends.chunking", "backends.masks", "backends.sampling"),
        *("backends.fingerprint_reads", "backends.step_outputs", "backends.mtp_weights"),
        "backends.draft_limits",
        "backends.draft_texts",
    },
    "backends.torch": {
        *("types", "amounts", "cache.entries", "backends.base", "backends.host"),
        "backends.fallbacks",
        *("backends.chunking", "backends.masks", "backends.sampling"),
        *("backends.fingerprint_reads", "backends.step_outputs", "backends.mtp_weights"),
        "backends.draft_limits",
        "backends.draft_texts",
    },
    "scheduler": {
        *("types", "cache", "decode", "messages", "metrics"),
        *("backends.base", "backends.masks", "backends.warm_up"),
    },
    "engine": {
        *("version", "types", "amounts", "config", "logs", "messages", "metrics", "decode"),
        *("cache", "backends", "scheduler"),
    },
    "engine.engine_spec": {"config"},
    "engine.model_vocabulary": {"types", "text", "decode"},
    "engine.grammar_zygote": {"decode", "engine.model_vocabulary"},
    "engine.message_pump": {"messages", "engine.events", "scheduler.loop"},
    "engine.engine_client": {
        *("messages", "engine.clients.watchers", "engine.clients.suspects"),
        *("engine.clients.questions", "engine.clients.replica_number"),
    },
    "engine.clients": {
        *("messages", "engine.engine_client", "engine.clients.suspects", "engine.clients.watchers"),
        "engine.kv_events.block_hashes",
    },
    "engine.clients.questions": {"messages"},
    "engine.clients.replica_number": set(),
    "engine.kv_events.block_hashes": {"types", "cache.entries"},
    "engine.clients.suspects": {"messages", "engine.clients.delta_queue"},
    "engine.clients.delta_queue": {"messages"},
    "engine.clients.watchers": {"messages", "engine.events.schema"},
    "engine.events": {"types", "messages", "metrics", "cache", "scheduler", "backends.base"},
    "engine.events.schema": {"types"},
    "api": {
        *("types", "text", "messages", "sequences", "embedding", "tasks", "config"),
        *("decode.closed_objects", "decode.expressed_schema", "decode.expressions"),
        *("decode.json_schema", "decode.size"),
        *("engine.engine_client", "engine.clients.watchers", "hub", "durations", "switching"),
    },
    "offline": {
        *("types", "config", "messages", "metrics", "text", "sequences", "embedding", "tasks"),
        *("engine.build_loop", "engine.message_pump", "engine.engine_client"),
        "scheduler.loop",
        "startup.resolve",
    },
    "offline.offline_requests": {
        *("types", "config", "messages", "text", "sequences", "embedding"),
        *("api.requests.sampling_fields", "api.requests.salts", "api.requests.token_ids"),
    },
    "offline.router": {"messages", "scheduler.loop"},
    "offline.progress": set(),
    "startup": set(),
    "startup.find_checkpoint": {"config", "text", "hub.download"},
    "startup.describe_checkpoint": {"text", "api.model_info"},
    "startup.memory_shares": {
        *("amounts", "config", "text", "backends.host", "backends.nvidia"),
    },
    "startup.on_demand_models": {
        *("amounts", "config", "durations", "text", "api", "switching"),
        *("startup.describe_checkpoint", "startup.find_checkpoint", "startup.memory_remedy"),
        *("startup.memory_shares", "startup.supervised_engine"),
    },
    "startup.drafts": {
        *("version", "config", "text", "startup.find_checkpoint"),
        *("backends.host", "backends.nvidia"),
    },
    "startup.resolve": {
        *("config", "startup.drafts", "startup.find_checkpoint", "api.http.keys"),
        *("backends.nvidia", "backends.torch.config", "startup.describe_checkpoint"),
    },
    "startup.servable": {
        *("text", "backends.mlx.families.refusals", "backends.torch.config"),
        *("startup.find_checkpoint", "startup.resolve"),
    },
    "startup.memory_remedy": {"amounts", "config", "backends.host"},
    "startup.port": {"config"},
    "startup.devices": {"config", "backends.nvidia"},
    "startup.server_file": set(),
    "startup.replica_plans": {"amounts", "config", "backends.host"},
    "startup.supervised_engine": {
        *("config", "messages", "engine.engine_client", "engine.clients", "supervision"),
        "startup.replica_plans",
    },
    "startup.launch": {
        *("config", "logs", "messages", "text", "engine.events", "api"),
        *("engine.engine_client", "startup.supervised_engine", "startup.replica_plans"),
        *("startup.devices", "startup.memory_remedy", "startup.port", "startup.resolve"),
        *("startup.describe_checkpoint", "startup.find_checkpoint", "startup.server_file"),
        "startup.on_demand_models",
    },
    "hub": {"amounts", "startup.server_file"},
    "terminal": set(),
    "terminal.hub_cache": {"amounts", "hub", "startup.servable"},
    "terminal.server_client": set(),
    "terminal.find_server": {"startup.server_file", "terminal.server_client"},
    "terminal.server_status": {"terminal.find_server", "terminal.server_client"},
    "terminal.chat": {"", "config", "terminal.find_server", "terminal.server_client"},
    "terminal.coding_agents": set(),
    "terminal.launch_agent": {
        *("terminal.coding_agents", "terminal.find_server", "terminal.server_client"),
    },
    "terminal.run_model": {
        *("config", "startup.find_checkpoint", "startup.server_file"),
        *("terminal.chat", "terminal.server_client"),
    },
    "terminal.cache_directory": {"cache.disk"},
    "terminal.doctor": {
        *("", "types", "amounts", "config", "offline.offline_requests", "startup.resolve"),
        *("startup.drafts", "backends.host", "backends.nvidia", "backends.mlx", "backends.torch"),
        "backends.fallbacks",
    },
    "service": set(),
    "switching": {"messages", "engine.engine_client"},
    "deploy": {
        *("config", "api", "engine.engine_client", "startup.launch"),
        *("startup.memory_remedy", "startup.resolve", "startup.supervised_engine"),
    },
    "supervision": {
        "messages",
        "config",
        *("engine.engine_client", "engine.engine_spec", "engine.exit_times"),
    },
    "bench": {""},
    **dict.fromkeys(["", "__main__", "cli"], ANYTHING),
}
FOREIGN = {
    **dict.fromkeys(["mlx", "mlx_lm"], "backends.mlx"),
    **dict.fromkeys(["torch", "triton", "safetensors"], "backends.torch"),
    "ray": "deploy",
}
EXEMPT = {"terminal.doctor"}


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path: Path) -> set[str]:
    """Dotted names of every module that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found.add(node.module)
    return found


def layer(name: str) -> str:
    """The longest entry of the table that is `name` or a package around it."""
    return max((entry for entry in MAY_IMPORT if within(name, entry)), key=len)


def within(name: str, package: str) -> bool:
    return name == package or (bool(package) and name.startswith(package + "."))


FILES = sorted(SRC.rglob("*.py"))


@cases("path", FILES, ids=[module_name(path) or "pippin" for path in FILES])
def test_imports_stay_within_the_layer(path: Path) -> None:
    name = module_name(path)
    allowed = MAY_IMPORT[layer(name)]
    if allowed is ANYTHING:
        return
    own = {name.removeprefix("pippin.") for name in imports(path) if name.startswith("pippin.")}
    for imported in own | ({""} if "pippin" in imports(path) else set()):
        permitted = {*allowed, "errors", layer(name)}
        assert any(within(imported, package) for package in permitted), (
            f"{name} may not import {imported}"
        )


@cases("path", FILES, ids=[module_name(path) or "pippin" for path in FILES])
def test_array_libraries_stay_inside_their_backend(path: Path) -> None:
    name = module_name(path)
    for imported in imports(path):
        home = FOREIGN.get(imported.split(".")[0])
        if home is not None and layer(name) not in EXEMPT:
            assert within(name, home), f"{name} imports {imported}"


def test_torchs_compiler_is_not_imported_at_a_start() -> None:
    """It takes 5 seconds; what leads to it is not easily seen."""
    leading = ("torch._dynamo", "torch._inductor", "torch.compiler", "torch.nn.attention")
    for path in FILES:
        for imported in imports(path):
            assert not any(within(imported, name) for name in leading), (path, imported)


SERVER_ONLY = (
    *("api", "bench", "cli", "deploy", "offline", "service", "startup", "supervision", "terminal"),
    *("engine.engine_client", "engine.clients.watchers"),
)


def test_nothing_that_an_engine_process_imports_leads_to_the_server_the_page_or_benchmarks() -> (
    None
):
    """Through any number of imports, and those inside functions."""
    files = {module_name(path): path for path in FILES}
    found: set[str] = set()
    todo = ["engine.run"]
    while todo:
        name = todo.pop()
        if name in found or name not in files:
            continue
        found.add(name)
        todo += [
            name.removeprefix("pippin.")
            for name in imports(files[name])
            if name.startswith("pippin.")
        ]
    assert len(found) > 100
    assert [name for name in sorted(found) if any(within(name, part) for part in SERVER_ONLY)] == []


def test_a_module_without_a_layer_is_noticed() -> None:
    with pytest.raises(ValueError, match="empty"):
        layer("surprise")


def test_no_two_test_files_have_one_name() -> None:
    """Pytest imports them by it: the second would not be collected, and none of the suite run."""
    files = Path(__file__).parent.rglob("*.py")
    names = [path.name for path in files if path.name != "conftest.py"]
    assert [name for name in sorted(set(names)) if names.count(name) > 1] == []
