"""What Triton makes of a kernel that reads and writes one place. Compiles for a GPU; needs none.

The interpreter runs a program as one thread, so it cannot show what its warps do to each other.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")
pytest.importorskip("triton", reason="triton is not installed: torch for GPUs brings it")

COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

{kernel}
dtype, names = sys.argv[1], kernel.arg_names
types = dict.fromkeys(values, f"*{{dtype}}") | others
types |= dict.fromkeys(constants, "constexpr")
aligned = [(i, 0) if name in others else (i,) for i, name in enumerate(names) if name in aligned]
source = ASTSource(
    kernel,
    signature={{name: types.get(name, "i32") for name in names}},
    constexprs={{(names.index(name),): value for name, value in constants.items()}},
    attrs={{place: [["tt.divisibility", 16]] for place in aligned}},
)
target, options = GPUTarget("cuda", 90, 32), {{"num_warps": 4, "launch_pdl": True}}
print(triton.compile(source, target=target, options=options).asm["ptx"])
"""


def compiled(kernel: str, dtype: str) -> str:
    """PTX."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE.format(kernel=kernel), dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


CONVOLUTION_OF_ONE_ROW = """
from pippin.backends.torch.kernels.epilogues import CONV, ConvStep
from pippin.backends.torch.kernels.products import _product as kernel

constants = dict(bias=None, residual=None, K=128, NORM=True, BIAS=False, EPILOGUE=CONV, TAPS=4)
constants |= dict(LINES=4, BLOCK_N=4, BLOCK_K=128, PDL=True)
values, others = ("x", "w", "out"), dict(norm="*fp32", eps="fp32")
others |= dict(conv=ConvStep(f"*{sys.argv[1]}", f"*{sys.argv[1]}", "*i32", "*i32"))
aligned = ("w", "conv", "conv_stride", "num_out")
"""
INPUTS_AFTER_CHUNKS = """
from pippin.backends.torch.kernels.recurrent.convolution import KEPT_BLOCK, _keep_inputs as kernel
from pippin.backends.torch.step.words import BlockInputs

constants = dict(KEPT=3, LINES=4, BLOCK=KEPT_BLOCK)
values, others = ("x", "conv"), dict(blocks=BlockInputs(*["*i32"] * 7))
aligned = ("x", "conv", "x_stride", "conv_stride", "num_channels")
"""


@pytest.mark.parametrize(
    ("kernel", "num_loads"),
    [(CONVOLUTION_OF_ONE_ROW, 6), (INPUTS_AFTER_CHUNKS, 7)],
    ids=["step", "chunks"],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_last_inputs_are_read_by_all_warps_before_one_is_written(
    kernel: str, num_loads: int, dtype: str
) -> None:
    """They may lie where the new ones go. Warps meet between the last load and the first store."""
    found = re.findall(r"\b(?:ld\.global|st\.global|bar\.sync)\b", compiled(kernel, dtype))
    assert found.count("ld.global") >= num_loads, "the kernel was not compiled as it is run"
    first_store = found.index("st.global")
    assert "ld.global" not in found[first_store:]
    last_load = first_store - 1 - found[:first_store][::-1].index("ld.global")
    assert "bar.sync" in found[last_load:first_store]


DRAFTS = {
    "look up": """
from pippin.backends.torch.kernels.places import _expand as kernel

constants = dict(WIDTH=3, LANES=4, SPAN=9, SPAN_LANES=16)
values = ()
others = {name: "*i32" for name in kernel.arg_names[:11]}
aligned = ()
""",
    "convolve": """
from pippin.backends.torch.kernels.recurrent.delta import CONV_BLOCK, _conv_verify as kernel

constants = dict(TAPS=4, WIDTH=3, KEPT=4, BLOCK=CONV_BLOCK, PDL=True)
values = ("projected", "conv", "kept", "taps", "mixed", "replayed")
others = {name: "*i32" for name in ("slots", "states_in", "states_out", "counts")}
aligned = ()
""",
    "recur": """
from pippin.backends.torch.kernels.recurrent.delta import _delta_verify as kernel

constants = dict(K_HEADS=2, V_HEADS=4, DK=64, DV=64, COLUMNS=8, WIDTH=3, KEPT=4, PDL=True)
values = ("projected", "mixed", "replayed")
others = {name: "*fp32" for name in ("decay", "dt_bias", "state", "out")}
others |= {name: "*i32" for name in ("states_in", "states_out", "counts")}
aligned = ()
""",
    "place heads": """
from pippin.backends.torch.kernels.attention.step import _place_heads as kernel

constants = dict(HEADS=4, KV_HEADS=2, GATED=True, NORM=True, D=64, ROTATED=32, FIRST=0, PDL=True)
values, aligned = ("qkv", "queries", "kv"), ()
others = {name: "*fp32" for name in ("q_norm", "k_norm", "cos_table", "sin_table")}
others |= dict(positions="*i32", cells="*i32", eps="fp32")
""",
    "place keys": """
from pippin.backends.torch.kernels.attention.step import _place_heads as kernel

constants = dict(HEADS=4, KV_HEADS=2, GATED=True, NORM=True, D=64, ROTATED=32, FIRST=4, PDL=True)
constants |= dict(queries=None)
values, aligned = ("qkv", "queries", "kv"), ()
others = {name: "*fp32" for name in ("q_norm", "k_norm", "cos_table", "sin_table")}
others |= dict(positions="*i32", cells="*i32", eps="fp32")
""",
    "accept": """
from pippin.backends.torch.kernels.places import _accept as kernel

constants, values, aligned = dict(WIDTH=3), (), ()
others = {name: "*i32" for name in kernel.arg_names[:8]}
""",
}


@pytest.mark.parametrize("name", DRAFTS)
def test_kernels_of_drafts_compile_for_a_gpu(name: str) -> None:
    """The interpreter takes what a compiler does not, types of branches above all."""
    assert "st.global" in compiled(DRAFTS[name], "bf16")


WORD_SUMS = """
from pippin.backends.torch.kernels.word_sums import _sum_words as kernel

constants, values, others, aligned = dict(BLOCK=4096), (), dict(runs="*i64"), ("runs",)
"""


def test_sums_of_words_at_addresses_compile_for_a_gpu() -> None:
    ptx = compiled(WORD_SUMS, "bf16")
    assert "ld.global.b32" in ptx
    assert "st.global.b64" in ptx


FEW_ROWS = """
from pippin.backends.torch.kernels.products import _in_registers as kernel

constants = dict(bias=None, residual=None, K=1024, NORM=True, BIAS=False, EPILOGUE=0, ROWS=2)
constants |= dict(BLOCK_N=4, BLOCK_K=1024, PDL=True)
values, others, aligned = ("x", "w", "out"), dict(norm="*fp32", eps="fp32"), ("x", "w", "num_out")
"""
BY_TENSOR_CORES = (
    FEW_ROWS.replace("_in_registers", "_by_tensor_cores")
    .replace("ROWS=2", "ROWS=8, PARTS=4")
    .replace("BLOCK_N=4", "BLOCK_N=16")
)


@pytest.mark.parametrize("kernel", [CONVOLUTION_OF_ONE_ROW, FEW_ROWS, BY_TENSOR_CORES])
def test_weights_are_loaded_before_a_kernel_waits_for_the_one_before_it(kernel: str) -> None:
    """And the kernel behind it may start at once."""
    loads = re.findall(r"griddepcontrol\.\w+|ld\.global", compiled(kernel, "bf16"))
    waits = loads.index("griddepcontrol.wait")
    assert loads[0] == "griddepcontrol.launch_dependents"
    assert loads[1:waits].count("ld.global") >= 2
    assert "ld.global" in loads[waits:], "x cannot be there before"


PACKED = """
from pippin.backends.torch.kernels.packed.numbers import PackedArrays
from pippin.backends.torch.kernels.packed.products import _few_rows as kernel

constants = dict(bias=None, K=1024, KIND=0, GROUP=64, PER_WORD=8, OFFSET=True, BIAS=False, ROWS=1)
constants |= dict(TWO_AT_A_TIME=True, COLUMNS=32, WARPS=4, RUNS=1, PDL=True)
values, others = ("x", "out"), dict(weight=PackedArrays("*i32", *["*bf16"] * 2))
aligned = ("x", "weight", "out", "N")
"""


def test_packed_weights_go_from_memory_to_tensor_cores_in_registers() -> None:
    """Loaded ahead, four words of each of a thread's four rows at a time. Shared memory has x."""
    found = compiled(PACKED, "bf16")
    waits, multiplied = found.index("griddepcontrol.wait"), found.rindex("mma.sync")
    assert len(re.findall(r"ld\.global\S*\.v4", found[:waits])) == 4
    assert re.search(r"ld\.global\S*\.v4", found[waits:multiplied]), "the next words"
    assert found.count("mma.sync") == 16
    # The 256 numbers of a thread would take 32 of them.
    assert len(re.findall(r"st\.shared|stmatrix|shfl", found[:multiplied])) <= 4


PACKED_EXPERTS = """
from pippin.backends.torch.kernels.experts import _expert_product as kernel
from pippin.backends.torch.kernels.packed.numbers import PackedArrays

constants = dict(K=512, CHOSEN=2, SWIGLU=True, ORDERED=True, PAIRS=16, ROWS=16, CHANNELS=64)
constants |= dict(STAGES=1, PRECISION="tf32", KIND=3, GROUP=128, PER_WORD=4, OFFSET=False)
constants |= dict(TWO_AT_A_TIME=False, COLUMNS=32, WARPS=4, RUNS=1, PDL=True)
values, aligned = ("x", "out"), ("x", "w", "out", "N")
others = {name: "*i32" for name in ("experts", "order", "firsts", "ends")}
others |= dict(w=PackedArrays("*i32", *["*fp32"] * 2))
"""


@pytest.mark.parametrize("pairs", [1, 16])
def test_packed_experts_compile_for_a_gpu(pairs: int) -> None:
    kernel = PACKED_EXPERTS.replace("PAIRS=16", f"PAIRS={pairs}")
    assert "mma.sync" in compiled(kernel, "bf16")
