"""Operations of ours in mlx's graphs on Linux CPUs, and mlx's own functions by means of them.

What mlx has as one kernel on a GPU is a dozen operations on a CPU: a norm, a rotation. Each costs
the host some microseconds, and a chunk of a prompt had two thousand of them. Ours are C++
(cpp/library.cpp), a module that is compiled by g++ with mlx's headers, Python's, and the nanobind
that mlx was built with. They take float32 alone; everything else is handed to mlx, as all is where
they cannot be compiled.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
import platform
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.activations import swiglu as _mlx_lm_swiglu

from pippin.backends.host import num_threads
from pippin.backends.mlx.cpu.build import SOURCES, build
from pippin.backends.mlx.device import on_cpu

MODULE = "pippin_operations"
FLAGS = (
    # The last: what is static in a header belongs to one library, not to the process.
    *("-O3", "-march=native", "-std=c++20", "-shared", "-fPIC", "-fno-gnu-unique"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
    *("-fvisibility=hidden", "-DNDEBUG", "-DNB_DOMAIN=mlx"),  # mlx's types of Python objects
)

AHEAD_TASKS = 50  # of ten dispatches each; a node takes two, and a step with drafts has 200
AHEAD_TOKENS = 16  # of all rows: more of them keep mlx busy, and their arrays are large

ROPE_OPTIONS = {"traditional", "base", "scale", "offset", "freqs"}

# As they were: substitutions.py binds these names anew.
_mlx_rms_norm, _mlx_rope = mx.fast.rms_norm, mx.fast.rope


@dataclass(frozen=True)
class OperationsReport:
    """The module as cpp/library.cpp has it, or why there is none."""

    module: Any = None
    reason: str | None = None


@functools.cache
def find_operations() -> OperationsReport:
    """The first call on a machine compiles them, for half a minute."""
    if platform.system() != "Linux":
        return OperationsReport(reason="they are for Linux")
    try:
        import nanobind
    except ModuleNotFoundError:
        return OperationsReport(reason="nanobind is not installed: pip install 'pippin[cpu]'")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        return OperationsReport(reason=f"no Python.h in {headers} (`apt install python3-dev`)")
    lib = Path(mx.__file__).resolve().parent / "lib"  # links to one mlx are one mlx
    nanobind_home = Path(nanobind.include_dir()).parent
    places = (lib.parent / "include", headers, nanobind_home / "include")
    includes = [f"-I{place}" for place in (*places, nanobind_home / "ext/robin_map/include")]
    links = (f"-L{lib}", "-lmlx", f"-Wl,-rpath,{lib}")
    sources = (SOURCES / "library.cpp", nanobind_home / "src/nb_combined.cpp")
    libmlx = (lib / "libmlx.so").stat()
    versions = importlib.metadata.version("mlx"), nanobind.__version__, sys.version
    facts = (*versions, libmlx.st_size, libmlx.st_mtime_ns)
    try:
        path = build("operations", sources, (*FLAGS, *includes, *links), facts)
        loader = ExtensionFileLoader(MODULE, str(path))
        spec = spec_from_loader(MODULE, loader)
        assert spec is not None
        module = module_from_spec(spec)
        loader.exec_module(module)
        module.start(num_threads())
        module.swiglu(mx.ones(1), mx.ones(1))
    except (OSError, ImportError) as error:
        return OperationsReport(reason=str(error))
    except TypeError:  # its arrays are not mlx's
        reason = f"mlx was built with another nanobind than {nanobind.__version__}"
        return OperationsReport(reason=reason)
    return OperationsReport(module)


_in_use: ContextVar[bool] = ContextVar("pippin_operations", default=True)


def operations() -> Any:
    """The module; None where mlx's own are to be used."""
    return find_operations().module if _in_use.get() and on_cpu() else None


def _loaded() -> Any:
    """The module if something has asked for it, as nothing does with --safe."""
    return find_operations().module if find_operations.cache_info().currsize else None


def check_operations() -> None:
    """Call once a step was computed: what fails in mlx's threads cannot raise there. Its results
    are no numbers, or tokens of -1."""
    ours = _loaded()
    failure = None if ours is None else ours.take_failure()
    if failure is not None:
        raise RuntimeError(
            f"a CPU operation of Pippin's failed: {failure}. --safe computes with mlx's own"
        )


@contextmanager
def without_operations() -> Iterator[None]:
    """mlx's own inside, in this thread: with --safe, and to compare with."""
    token = _in_use.set(False)
    try:
        yield
    finally:
        _in_use.reset(token)


def compile_without_fusing() -> bool:
    """From now on, in this process: `mx.compile` keeps graphs and fuses no kernels, for each of
    which mlx would call g++, some forty times for a model's decode step. Whether functions can be
    compiled."""
    if platform.system() != "Linux" or not on_cpu():
        return True
    ours = _loaded()
    if ours is None:
        mx.disable_compile()
        return False
    ours.compile_without_fusing()
    return True


@contextmanager
def running_ahead(num_tokens: int) -> Iterator[None]:
    """Inside, the host submits a step of so many tokens without waiting until most of it was
    computed: mlx blocks a thread that is some fifty nodes ahead of its own. A decode step has more,
    so its launch took as long as the step, and in the time that the host then needed for the next
    one mlx ran dry. All arrays of such a step are there at once, so work that takes much memory is
    not to run ahead: mlx waits for memory only where it may block."""
    ours = operations()
    if ours is None or num_tokens > AHEAD_TOKENS:
        yield
        return
    ours.run_ahead(AHEAD_TASKS)
    try:
        yield
    finally:
        ours.run_ahead(-AHEAD_TASKS)


def narrowed(x: mx.array) -> mx.array:
    """In 16 bits where that loses nothing, as where a checkpoint's numbers have no more."""
    for dtype in (mx.bfloat16, mx.float16):
        narrow = x.astype(dtype)
        if mx.array_equal(narrow.astype(x.dtype), x).item():
            return narrow
    return x


def are_float32(*arrays: mx.array) -> bool:
    return all(array.dtype == mx.float32 for array in arrays)


class LinearWeights(NamedTuple):
    panels: mx.array  # as `pack` makes them
    bias: mx.array | None
    num_outputs: int


class LinearLayers:
    """Those of one input: of each x @ weight.T + bias, all of them together as one operation."""

    def __init__(self, layers: Sequence[LinearWeights]) -> None:
        arrays = [array for layer in layers for array in (layer.panels, layer.bias)]
        self._arrays = [array for array in arrays if array is not None]
        self._num_outputs = [layer.num_outputs for layer in layers]

    def __call__(self, x: mx.array) -> list[mx.array]:
        results: list[mx.array] = operations().linear(x, self._arrays, self._num_outputs)
        return results


def pack(weight: mx.array) -> mx.array:
    """[outputs, inputs] as panels.h has them: [panels, inputs, outputs of a panel]."""
    narrow, panel = narrowed(weight), operations().PANEL
    num_out, num_in = narrow.shape
    padded = mx.pad(narrow, [(0, -num_out % panel), (0, 0)])
    return mx.contiguous(padded.reshape(-1, panel, num_in).transpose(0, 2, 1))


def rms_norm(x: mx.array, weight: mx.array | None, eps: float, **options: Any) -> mx.array:
    """Drop-in for `mx.fast.rms_norm`."""
    ours = operations()
    given = (x,) if weight is None else (x, weight)
    if ours is None or options or not x.size or not are_float32(*given):
        return _mlx_rms_norm(x, weight, eps, **options)
    y: mx.array = ours.rms_norm(x, weight, eps)
    return y


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Drop-in for `mlx_lm.models.activations.swiglu`: silu(gate) * x."""
    ours = operations()
    fits = x.size and x.shape == gate.shape and are_float32(gate, x)
    y: mx.array = (_mlx_lm_swiglu if ours is None or not fits else ours.swiglu)(gate, x)
    return y


def attention(
    queries: mx.array,  # [B, Hq, S, D]
    keys: mx.array,  # [B, Hkv, L, D]
    values: mx.array,  # [B, Hkv, L, Dv]
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    **options: Any,
) -> mx.array:
    """Drop-in for `mx.fast.scaled_dot_product_attention`. Ours keeps no scores."""
    ours = operations()
    known = sinks is None and _is_simple(mask, queries, keys)
    if ours is None or not known or not are_float32(queries, keys, values):
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks, **options
        )
    allowed = mask if isinstance(mask, mx.array) else None
    out: mx.array = ours.attention(queries, keys, values, scale, allowed, isinstance(mask, str))
    return out


def _is_simple(mask: mx.array | str | None, queries: mx.array, keys: mx.array) -> bool:
    """The same for all heads, and nothing is added."""
    if not isinstance(mask, mx.array):
        return True
    each_row = (queries.shape[0], 1, queries.shape[2], keys.shape[2])
    return bool(mask.dtype == mx.bool_) and mask.shape in (each_row, (1, *each_row[1:]))


def rope(x: mx.array, dims: int, **options: Any) -> mx.array:
    """Drop-in for `mx.fast.rope`."""
    ours = operations()
    known = options.keys() <= ROPE_OPTIONS and not options["traditional"]
    if ours is None or not known or x.ndim != 4 or not x.size or not are_float32(x):
        return _mlx_rope(x, dims, **options)
    offset, freqs = options["offset"], options.get("freqs")
    if not _is_known(offset, x.shape[0]):
        return _mlx_rope(x, dims, **options)
    if freqs is None:
        inverse = frequencies(dims, options["base"])
    else:
        inverse = 1.0 / freqs.astype(mx.float32)
    y: mx.array = ours.rope(x, inverse, offset, options["scale"])
    return y


def _is_known(offset: int | mx.array, num_rows: int) -> bool:
    if isinstance(offset, int):
        return True
    return offset.dtype == mx.int32 and offset.ndim <= 1 and offset.size in (1, num_rows)


@lru_cache(maxsize=16)
def frequencies(dims: int, base: float) -> mx.array:
    """As mlx computes them, to the last bit: they are multiplied by positions."""
    half = dims // 2
    step = mx.array(math.log(base) / half, mx.float32)
    inverse = mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * step)
    mx.eval(inverse)
    return inverse
