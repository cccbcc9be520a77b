"""Who may import whom, read from the source with `ast`."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from cases import cases

SRC = Path(__file__).parent.parent / "src" / "pippin"
ANYTHING = None

# The longest matching name decides. `errors` and its own package are open to everyone; `.` is
# `pippin` itself.
TABLE = """\
version:
types:
errors:
logs:
amounts:
config: amounts types
messages: types
metrics: types
cache: types
cache.entries: types
cache.disk: cache.entries types
text:
sequences: messages text types
embedding: messages sequences types
tasks:
decode: types
backends:
backends.fallbacks:
backends.base: backends.fallbacks cache.entries types
backends.sampling: backends.base types
backends.warm_up: backends.base types
backends.chunking: backends.base types
backends.host:
backends.masks:
backends.mtp_weights:
backends.step: backends.base backends.sampling cache.entries types
backends.fake: backends.base backends.masks backends.step cache.entries types
backends.mlx: backends.base backends.chunking backends.fallbacks backends.host backends.masks
    backends.mtp_weights backends.sampling backends.step cache.entries config types
backends.torch: amounts backends.base backends.chunking backends.fallbacks backends.host
    backends.masks backends.mtp_weights backends.sampling backends.step cache.entries types
scheduler: backends.base backends.masks backends.warm_up cache decode messages metrics types
engine: amounts backends cache config decode logs messages metrics scheduler types version
engine.engine_spec: cache config scheduler.request
engine.grammar_zygote: decode text types
engine.engine_client: engine.events.schema engine.kv_events messages
engine.engine_pool: engine.engine_client engine.kv_events messages
engine.kv_events: cache messages types
engine.events: backends.base cache messages metrics scheduler types
engine.events.schema: types
api: amounts config decode.json_schema decode.size embedding engine.engine_client engine.engine_pool
    hub messages sequences switching tasks text types
offline: api.requests.body api.requests.sampling_fields config embedding engine.build_loop
    engine.engine_client messages metrics scheduler.loop sequences startup.resolve tasks text types
startup: amounts api backends.host backends.mlx.refusals backends.nvidia backends.torch.config
    config engine.engine_client engine.engine_pool engine.events hub logs messages supervision
    switching text version
startup.server_file:
hub: amounts startup.server_file
terminal: . config startup.checkpoint startup.server_file
terminal.doctor: . amounts backends config offline.llm startup.resolve types version
switching: engine.engine_pool messages
supervision: config engine.engine_client engine.engine_spec messages
bench: version
"""
MAY_IMPORT: dict[str, set[str] | None] = {
    name: {imported.strip(".") for imported in allowed.split()}
    for name, _, allowed in (row.partition(":") for row in TABLE.replace("\n ", "").splitlines())
} | dict.fromkeys(["", "__main__", "cli"], ANYTHING)
FOREIGN = {
    **dict.fromkeys(["mlx", "mlx_lm"], "backends.mlx"),
    **dict.fromkeys(["torch", "triton", "safetensors"], "backends.torch"),
    "ray": "pippin_ray",
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
    *("api", "bench", "cli", "offline", "startup", "supervision", "terminal"),
    *("engine.engine_client", "engine.engine_pool"),
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
