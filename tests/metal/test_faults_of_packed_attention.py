"""Packed attention with a fault in it: the kernel that no Mac could compile, and planted ones."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal.compiled_kernel import CompileError
from metal.emulator import EmulatedKernel, needs_clang, use_emulator
from metal.generated_source import KernelFault
from metal.packed_rows import Rows
from pippin.backends.mlx.gpu import packed_attention
from pippin.backends.mlx.gpu.packed_attention import ATTEND, attend_packed

pytestmark = [needs_clang, pytest.mark.slow]

OLD = Path(__file__).parent / "fixtures" / "attend_packed_44e5d13.metal"
NAMES = (
    *("q", "k", "v", "tail_k", "tail_v", "main_k", "main_v"),
    *("places", "visible_tail", "cursor", "scale", "sinks"),
)
# As that commit cut it for 32 heads over 4 of 128 channels.
OLD_FORM = {"D": 128, "Dv": 128, "Sinks": False, "Threads": 256, "Tail": 64, "Queries": 8}
OLD_FORM |= {"Shares": 1, "Lanes": 16, "Vec": 8, "Ahead": 2, "Whole": True}


@pytest.fixture(autouse=True)
def _emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    use_emulator(monkeypatch)


def run_old(header: str, source: str) -> Any:
    kernel = EmulatedKernel(
        *("old", NAMES, ["out", "weights", "new_tail_k", "new_tail_v"], source, header),
        ensure_row_contiguous=False,
    )
    new, tail, main = (
        mx.zeros(shape, mx.bfloat16) for shape in ((1, 4, 1, 128), (1, 4, 64, 128), (4, 64, 128))
    )
    return kernel(
        inputs=[
            *(mx.zeros((1, 32, 1, 128), mx.bfloat16), new, new, tail, tail, main, main),
            *(
                mx.array([[0, 3]]),
                mx.ones((1, 64), mx.bool_),
                mx.array([17]),
                mx.ones(1),
                mx.zeros(1),
            ),
        ],
        template=[("T", mx.bfloat16), ("O", mx.bfloat16), *OLD_FORM.items()],
        grid=(256, 4, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(1, 32, 1, 128), (1,), tail.shape, tail.shape],
        output_dtypes=[mx.bfloat16, mx.float32, mx.bfloat16, mx.bfloat16],
    )


@pytest.mark.parametrize(
    ("named", "words"),
    [
        # mlx then writes a signature that ends after its first output.
        ("", "expected ';' at end of declaration"),
        ("// thread_position_in_grid\n", "undeclared identifier 'thread_position_in_threadgroup'"),
    ],
)
def test_attributes_that_a_header_alone_names_are_not_declared(named: str, words: str) -> None:
    header, source = OLD.read_text().split("\n\n", 1)
    with pytest.raises(CompileError, match=words):
        run_old(header + "\n", named + source)


def test_with_its_header_in_the_source_that_kernel_has_too_much_threadgroup_memory() -> None:
    with pytest.raises(KernelFault, match="33280 bytes of threadgroup memory: Metal has 32768"):
        run_old("", OLD.read_text())


@cache
def few_rows() -> Rows:
    return Rows([5, 40], (4, 1), 32, seed=0)


def off_by() -> float:
    """How far the kernel is from numpy, tails and all."""
    rows = few_rows()
    results = rows.attend(attend_packed, sinks=False, num_segments=2)
    expected = [rows.expected(sinks=False), *rows.tails.copy()]
    for tail, new in zip(expected[1:], rows.new, strict=True):
        tail[:, :, 17] = new[:, :, 0]
    errors = [np.abs(a - b).max() for a, b in zip(results, expected, strict=True)]
    return float(np.max(errors))  # which passes on what is not a number


def plant(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    assert ATTEND.count(old) == 1, f"{old!r} is not once in the kernel"
    monkeypatch.setattr(packed_attention, "ATTEND", ATTEND.replace(old, new))


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
KEY_BARRIER = f"{BARRIER}  // new_key"
SUMS_BARRIER = f"{BARRIER}\n    for (int at = me; at < Queries"


UNWRITTEN, MEMORY = "which nothing has written", "bytes of threadgroup memory: Metal has 32768"
ROW, WRITES = "threadgroup_position_in_grid.z", "if (me % 32 < Lanes"
FAULTS = {
    "a missing barrier": (SUMS_BARRIER, SUMS_BARRIER.removeprefix(BARRIER), f"race|{UNWRITTEN}"),
    "and of the key": (KEY_BARRIER, "", f"race|{UNWRITTEN}"),
    "an off-by-one row": (f"{ROW};", f"{ROW} + 1;", "out of bounds"),
    "a wrong SIMD width": ("distance < 32;", "distance < 64;", "SIMD shuffle from lane"),
    "an uninitialised tail of threadgroup memory": (
        *(f"{WRITES}) {{", f"{WRITES} && me < Threads - 32) {{"),
        f"threadgroup memory, {UNWRITTEN}",
    ),
    "33 KiB": (
        *("sums[WARPS][Queries][Dv];", "sums[33 * 256 / Queries / Dv][Queries][Dv];"),
        rf"3[34]\d\d\d {MEMORY}",
    ),
    "a race": ("sums[warp][n][(i / Vec)", "sums[0][n][(i / Vec)", "race: write after write"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_reported(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    old, new, words = FAULTS[name]
    plant(monkeypatch, old, new)
    with pytest.raises(KernelFault, match=words):
        off_by()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("num_main = end2 + own[7];", "num_main = end2 + own[7] + 1;"),
        ("end1 = end0 + own[3];", "end1 = end0;"),
        ("i < Tail * D / Vec;", "i < Tail * D / Vec - 1;"),
    ],
    ids=["column", "segment", "tail"],
)
def test_a_fault_that_breaks_no_rule_gives_wrong_numbers(
    monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    plant(monkeypatch, old, new)
    assert not off_by() < 1e-3


def test_without_a_fault_the_kernel_is_right() -> None:
    assert off_by() < 2e-6
