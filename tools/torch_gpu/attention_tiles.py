"""Variants of a decode step's attention, against the present kernel and the time to read its keys and values."""

from __future__ import annotations

import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from torch_gpu.plays import replayed_ms

from pippin.backends.torch.kernels.attention import step
from pippin.backends.torch.kernels.attention.step import attention_step
from pippin.backends.torch.kernels.dependent import dependent
from pippin.backends.torch.kernels.products import precision_of
from pippin.backends.torch.models.attention_layer import AttentionLayer
from pippin.backends.torch.models.parts import Norm
from pippin.backends.torch.models.rope import Rope
from pippin.backends.torch.shapes import AttentionShape, RopeShape

from torch_gpu.attention_variants import _attend, _list, _sum  # isort: skip

GRID, FOUND, LISTED = range(3)
ATTENTION = {"0.6B": (16, 8, 128, False), "0.8B": (8, 2, 256, True)}  # heads, of keys, channels, gated
KINDS = {  # and how many rows
    "0.6B": {"8 x 512": 8, "32 x 512": 32, "64 mixed": 64, "256 mixed": 256},
    "0.8B": {"32 x 512": 32, "64 mixed": 64},
}
TABLE_WIDTH = 4096
REPEATS = 20
MOST_ROWS = 256
MIXED = 50, 2500  # tokens
POOL_CELLS = 400_000
MOST_SECONDS = 75.0
# Most stretches of a row, or programs beyond one a row; and the least tokens of a stretch.
POLICIES = {
    GRID: [(8, 256), (16, 256), (16, 128), (32, 64)],
    FOUND: [(1024, 64), (2048, 64), (2048, 128), (4096, 64), (4096, 128), (8192, 128)],
    LISTED: [(1024, 64), (2048, 64), (2048, 128), (4096, 64), (4096, 128), (8192, 128)],
}


@dataclass(frozen=True)
class Variant:
    """Of the kernels in `attention_variants.py`."""

    by: int  # GRID, FOUND or LISTED
    block: int  # tokens
    warps: int
    ahead: int = 0  # blocks in registers; 0: asynchronous copies
    stages: int = 1
    together: int = 1  # heads of keys
    alone: bool = True
    registers: int | None = None  # of a thread, at most
    last_first: bool = False
    touch: int = 0  # tokens that are brought into the L2 first
    sum_warps: int = 4
    parts: int = 8  # stretches that are added up at a time

    def __str__(self) -> str:
        copies = f"{self.ahead} ahead" if self.ahead else f"{self.stages} stages"
        words = [("grid", "found", "listed")[self.by], f"{self.block}/{self.warps}w", copies, f"{self.together} heads"]
        words += [f"at most {self.registers} registers"] * (self.registers is not None) + ["last first"] * self.last_first
        words += [f"touches {self.touch}"] * (self.touch > 0)
        words += [f"sum {self.parts}/{self.sum_warps}w"] * ((self.parts, self.sum_warps) != (8, 4))
        return ", ".join(words) + ("" if self.alone else ", never alone")


class AttentionCase:
    """One step's attention: rows of these lengths, the new token not counted, with pools that take turns."""

    def __init__(self, layer: AttentionLayer, lengths: Sequence[int], kv: torch.Tensor) -> None:
        self.layer, self.kv, device = layer, kv, kv.device
        shape, self.num_rows = layer.shape, len(lengths)
        self.num_cells = sum(lengths) + self.num_rows
        generator = torch.Generator().manual_seed(0)
        places = torch.randperm(self.num_cells, generator=generator, dtype=torch.int32)
        table = torch.zeros(self.num_rows + 1, TABLE_WIDTH, dtype=torch.int32)
        for slot, (length, cells) in enumerate(zip(lengths, places[self.num_rows :].split(list(lengths))), start=1):
            table[slot, :length] = cells
        self.table = table.to(device)
        slot, position = range(1, self.num_rows + 1), list(lengths)
        words = {"slot": list(slot), "position": position, "cell": places[: self.num_rows].tolist()}
        words = {name: torch.tensor(value, dtype=torch.int32, device=device) for name, value in words.items()}
        self.inputs = SimpleNamespace(**words)
        width = (shape.num_heads * (2 if shape.gated else 1) + 2 * shape.num_kv_heads) * shape.head_dim
        self.qkv = torch.randn(self.num_rows, width, generator=generator).to(kv.dtype).to(device)
        self.copies = max(1, min(REPEATS, len(kv) // self.num_cells))
        self.read_us = sum(lengths) * kv[0].nbytes / 4.3e12 * 1e6

    def pool(self, number: int) -> torch.Tensor:
        first = number % self.copies * self.num_cells
        return self.kv[first : first + self.num_cells]

    def present(self, number: int = 0) -> torch.Tensor:
        return attention_step(self.qkv, self.layer, self.pool(number), self.table, self.inputs, early=True)  # type: ignore[arg-type]


class Attend:
    """A variant, for one case: `most` stretches of a row (GRID) or programs in all, and the least tokens of one."""

    def __init__(self, variant: Variant, case: AttentionCase, most: int, least: int, *, compile_only: bool = False) -> None:
        shape, layer, device = case.layer.shape, case.layer, case.kv.device
        self.variant, self.case, self.compile_only = variant, case, compile_only
        groups, num_rows = shape.num_kv_heads // variant.together, case.num_rows
        self.grid = (groups, num_rows, most) if variant.by == GRID else (groups, num_rows + most // groups)
        stretches = num_rows * most if variant.by == GRID else self.grid[1]
        options = {"dtype": torch.float32, "device": device}
        self.parts = [torch.empty(stretches * shape.num_heads, *size, **options) for size in ((shape.head_dim,), (), ())]
        self.items = torch.empty(self.grid[1], 8, dtype=torch.int32, device=device)
        self.rows = torch.empty(num_rows, 2, dtype=torch.int32, device=device)
        self.lengths = {"num_rows": num_rows, "programs": self.grid[1], "splits": most, "least": least}
        self.lengths["window"] = layer.scoring.window
        self.constants = {"WINDOW": layer.scoring.window > 0, "BLOCK": variant.block, "ROWS": MOST_ROWS}
        self.model = {"HEADS": shape.num_heads, "D": shape.head_dim, "GATED": shape.gated}
        self.model |= {"SINKS": layer.scoring.sinks is not None, "BY": variant.by, "ALONE": variant.alone}
        self.dependent = dependent(device)
        if variant.by == LISTED:
            self.write_list()

    def launch(self, kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        if self.compile_only:
            kernel.warmup(grid=grid, **arguments, **self.dependent)
        else:
            kernel[grid](**arguments, **self.dependent)

    def write_list(self) -> None:
        lengths = {name: value for name, value in self.lengths.items() if name != "splits"}
        inputs = {"slots": self.case.inputs.slot, "positions": self.case.inputs.position}
        written = {"items": self.items, "rows": self.rows}
        self.launch(_list, (self.case.num_rows + 1,), **inputs, **written, **lengths, **self.constants, num_warps=1)

    def __call__(self, number: int = 0, *, sums: bool = True) -> torch.Tensor:
        case, layer, variant, shape = self.case, self.case.layer, self.variant, self.case.layer.shape
        norms, scoring, inputs = layer.head_norms, layer.scoring, self.case.inputs
        kv = case.pool(number)
        out = torch.empty(case.num_rows, shape.num_heads * shape.head_dim, dtype=case.qkv.dtype, device=kv.device)
        shared = dict(zip(("partial", "tops", "masses"), self.parts)) | {"qkv": case.qkv, "out": out, "sinks": scoring.sinks}
        shared |= {"positions": inputs.position, "row_stride": case.qkv.stride(0)}
        self.launch(
            _attend,
            self.grid,
            **shared,
            q_norm=norms[0].weight if norms else None,
            k_norm=norms[1].weight if norms else None,
            cos_table=layer.rope.cos,
            sin_table=layer.rope.sin,
            kv=kv,
            table=case.table,
            slots=inputs.slot,
            cells=inputs.cell,
            items=self.items,
            kv_stride=kv.stride(0),
            table_stride=case.table.stride(0),
            eps=norms[0].eps if norms else 0.0,
            scale=scoring.scale,
            softcap=scoring.softcap,
            **self.lengths,
            **self.constants,
            **self.model,
            KV_HEADS=shape.num_kv_heads,
            NORM=norms is not None,
            ROTATED=layer.rope.dim,
            SOFTCAP=scoring.softcap > 0.0,
            GROUP=max(16, 1 << (shape.num_heads // shape.num_kv_heads * variant.together - 1).bit_length()),
            PRECISION=precision_of(kv.dtype),
            LAST_FIRST=variant.last_first,
            STAGES=variant.stages,
            AHEAD=variant.ahead,
            TOGETHER=variant.together,
            TOUCH=variant.touch,
            TOUCHING=f"cp.async.bulk.prefetch.L2.global [$1], {shape.head_dim * variant.together * 2}; mov.u32 $0, 0;",
            num_warps=variant.warps,
            maxnreg=variant.registers,
        )
        if sums:
            used = {**shared, **self.lengths, **self.constants, **self.model, "rows": self.rows}
            self.launch(_sum, (case.num_rows, shape.num_heads), **used, PARTS=variant.parts, num_warps=variant.sum_warps)
        return out


# What looks best stands first: time may end.
BOTH = [
    Variant(FOUND, 16, 2, stages=5),
    Variant(FOUND, 32, 4, stages=5),
    Variant(FOUND, 16, 4, stages=5, together=2),
]
ATTENTION_VARIANTS = {
    "0.6B": [
        Variant(FOUND, 32, 2, ahead=1),
        *BOTH,
        Variant(FOUND, 16, 2, stages=5, touch=128),
        Variant(FOUND, 32, 2, ahead=1, touch=128),
        Variant(GRID, 32, 2, ahead=1),
        Variant(GRID, 16, 2, stages=5),
        Variant(LISTED, 32, 2, ahead=1),
        Variant(LISTED, 16, 2, stages=5),
        Variant(LISTED, 16, 2, stages=5, touch=128),
        Variant(FOUND, 32, 2, stages=5),
        Variant(FOUND, 32, 4, stages=3, touch=128),
        Variant(FOUND, 32, 4, stages=3),
        Variant(FOUND, 32, 4, ahead=1),
        Variant(FOUND, 16, 1, stages=5),
        Variant(FOUND, 32, 2, ahead=1, sum_warps=1, parts=4),
        Variant(FOUND, 32, 2, ahead=1, alone=False),
        Variant(GRID, 32, 2, ahead=1, alone=False),
        Variant(GRID, 32, 2, ahead=1, last_first=True),
        Variant(LISTED, 32, 4, stages=5),
        Variant(GRID, 32, 4, stages=5),
        Variant(FOUND, 64, 4, stages=3),
        Variant(FOUND, 16, 2, stages=7),
        Variant(FOUND, 16, 2, ahead=2),
        Variant(FOUND, 32, 4, stages=5, together=2),
    ],
    "0.8B": [
        Variant(FOUND, 32, 4, ahead=1),
        *BOTH,
        Variant(FOUND, 16, 4, stages=5),
        Variant(FOUND, 16, 4, stages=5, touch=128),
        Variant(FOUND, 32, 4, ahead=1, touch=128),
        Variant(GRID, 32, 4, ahead=1),
        Variant(GRID, 16, 4, stages=5),
        Variant(LISTED, 32, 4, ahead=1),
        Variant(LISTED, 16, 4, stages=5),
        Variant(FOUND, 32, 8, stages=5),
        Variant(FOUND, 16, 4, ahead=1),
        Variant(FOUND, 32, 4, ahead=1, sum_warps=1, parts=4),
        Variant(GRID, 32, 4, ahead=1, last_first=True),
        Variant(FOUND, 16, 4, stages=5, registers=128),
        Variant(FOUND, 16, 4, stages=7),
    ],
}


def tiny_pools(device: torch.device) -> dict[str, AttentionCase]:
    return {name: AttentionCase(make_layer(name, device), [5], make_pool(name, 64, device)) for name in ATTENTION}


def make_pool(name: str, num_cells: int, device: torch.device) -> torch.Tensor:
    _, kv_heads, dim, _ = ATTENTION[name]
    return torch.randn(num_cells, 2, kv_heads, dim, device=device, dtype=torch.bfloat16)


def make_layer(name: str, device: torch.device) -> AttentionLayer:
    heads, kv_heads, dim, gated = ATTENTION[name]
    rope = RopeShape(dim // 4 if gated else dim, 1e6)
    shape = AttentionShape(heads, kv_heads, dim, rope, dim**-0.5, qk_norm="head", gated=gated)
    norm = Norm(torch.ones(dim, device=device), 1e-6)
    return AttentionLayer(shape, None, None, Rope.of(rope, TABLE_WIDTH, device), norm, norm)  # type: ignore[arg-type]


def compile_variant(name: str, variant: Variant) -> str:
    """In a process of its own, into Triton's cache; what went wrong."""
    try:
        with torch.inference_mode():
            Attend(variant, tiny_pools(torch.device("cuda"))[name], 256, 64, compile_only=True)()
    except Exception as error:  # noqa: BLE001
        return repr(error)[:200]
    return ""


def run_present(name: str, num_rows: int) -> None:
    """The same, of the present kernel, which is compiled for each number of stretches."""
    device = torch.device("cuda")
    with torch.inference_mode():
        AttentionCase(make_layer(name, device), [5] * num_rows, make_pool(name, 6 * num_rows, device)).present()


def compile_all() -> list[tuple[str, Variant]]:
    """Those that can be compiled, in turns of the models."""
    jobs = [(name, variant) for name, variants in ATTENTION_VARIANTS.items() for variant in variants]
    jobs.sort(key=lambda job: ATTENTION_VARIANTS[job[0]].index(job[1]))
    compiled = []
    with ProcessPoolExecutor(14, multiprocessing.get_context("spawn")) as compilers:
        for name, kinds in KINDS.items():
            for num_rows in kinds.values():
                compilers.submit(run_present, name, num_rows)
        waiting = [(job, compilers.submit(compile_variant, *job)) for job in jobs]
        for job, done in waiting:
            try:
                error = done.result(timeout=60)
            except Exception as failure:  # noqa: BLE001
                print(f"{job[0]} {job[1]}: compiled when it is run, {failure!r}")
                error = ""
            if error:
                print(f"{job[0]} {job[1]}: left out, {error}", flush=True)
            else:
                compiled.append(job)
    return compiled


def make_cases(device: torch.device) -> dict[tuple[str, str], AttentionCase]:
    rng = np.random.default_rng(0)
    cases = {}
    for name, kinds in KINDS.items():
        kv, layer = make_pool(name, POOL_CELLS, device), make_layer(name, device)
        for kind, n in kinds.items():
            lengths = rng.permutation(np.geomspace(*MIXED, n)).astype(int) if "mixed" in kind else np.full(n, 512)
            cases[name, kind] = AttentionCase(layer, lengths.tolist(), kv)
    return cases


def timed(run: Callable[[int], object]) -> float:
    """Microseconds, on a stream of its own."""
    torch.cuda.synchronize()
    return replayed_ms(lambda: [run(n) for n in range(REPEATS)]) / REPEATS * 1e3


def time_variant(variant: Variant, case: AttentionCase, expected: torch.Tensor, found: dict[str, tuple[float, str]]) -> str:
    """Into `found`, all policies; the best two in words."""
    times = {}
    for most, least in POLICIES[variant.by]:
        policy = f"{most}, {least}"
        try:
            attend = Attend(variant, case, most, least)
            difference = (attend().float() - expected).abs().max().item()
            is_right = difference < 0.02 * expected.abs().max().item()
            us, says = timed(attend), "" if is_right else f" WRONG by {difference:.3f}"
        except Exception as error:  # noqa: BLE001
            us, says = 1e9, f" {error!r}"[:150]
        times[policy] = us, says
        found[f"{variant}; {policy}"] = us, says
    best = sorted(times.items(), key=lambda item: item[1][0])[:2]
    return ", ".join(f"{us:.1f} ({policy}){says}" for policy, (us, says) in best)


def time_all() -> None:
    """Variants of a decode step's attention, compiled in processes of their own, against the present kernel."""
    began, device = time.perf_counter(), torch.device("cuda")
    compiled = compile_all()
    print(f"{len(compiled)} variants compiled after {time.perf_counter() - began:.1f} s", flush=True)
    cases = make_cases(device)
    found: dict[tuple[str, str], dict[str, tuple[float, str]]] = {key: {} for key in cases}

    def time_present(when: str) -> None:
        for key, case in cases.items():
            us = timed(case.present)
            found[key][f"present, {when}"] = us, ""
            print(f"present, {' '.join(key)}: {us:.1f} us; to read it {case.read_us:.1f}", flush=True)

    time_present("first")
    expected = {key: case.present().float() for key, case in cases.items()}
    for model, variant in compiled:
        if time.perf_counter() - began > MOST_SECONDS:
            print(f"no time left for {model} {variant}")
            continue
        line = [f"{k}: {time_variant(variant, cases[m, k], expected[m, k], found[m, k])}" for m, k in cases if m == model]
        print(f"{time.perf_counter() - began:5.1f} s  {model} {variant}\n         " + "; ".join(line), flush=True)
    time_present("last")
    for key, times in found.items():
        print(f"\n{' '.join(key)}, to read it {cases[key].read_us:.1f} us; by time: us, variant, most and least")
        ranked = sorted(times.items(), key=lambda item: item[1][0])
        shown = ranked[:14] + [item for item in ranked[14:] if item[0].startswith("present")]
        print("\n".join(f"  {us:7.1f}  {name}{says}" for name, (us, says) in shown), flush=True)
        best = next((name for name, _ in ranked if not name.startswith("present")), "")
        time_parts(cases[key], best, [variant for model, variant in compiled if model == key[0]])


def time_parts(case: AttentionCase, best: str, variants: list[Variant]) -> None:
    """Of the present kernels and of the fastest variant, the first kernel alone; and the list."""
    with patch.object(step, "_combine", defaultdict(lambda: lambda *_, **__: None)):
        print(f"  the present first kernel alone: {timed(case.present):.1f}")
    for variant in variants:
        for most, least in POLICIES[variant.by]:
            if f"{variant}; {most}, {least}" == best:
                attend = Attend(variant, case, most, least)
                print(f"  the fastest variant's: {timed(lambda n: attend(n, sums=False)):.1f}")
                if variant.by == LISTED:
                    print(f"  its list, once a step: {timed(lambda n: attend.write_list()):.1f}", flush=True)
