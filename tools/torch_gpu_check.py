"""The torch backend on an NVIDIA GPU: is it right, does it race, how fast is it? Five minutes.

    python tools/torch_gpu_check.py [--only correct,mixed,races,decode]

    correct     a tiny hybrid of random weights: kernels and captured graphs against plain operations
                on the GPU and on the CPU
    mixed       decode rows beside chunks of prompts in one forward: the tokens are those apart, and the times
    moe         experts, in a hybrid and in a model of attention: kernels and captured graphs against
                plain operations on the GPU; --deterministic to the bit, alone and in company
    packed      products with packed weights against plain operations; 4 bits against bfloat16 in decode
                steps of Qwen3.5-0.8B's and Qwen3-0.6B's shapes
    agreement   what is tried at load: that each kernel agrees with plain operations, in seconds
    races       200 random schedules, launched ahead of a GPU that is held up, against the same ones
                with a wait after each step: tokens, and the bits of what was kept
    drafts      200 random schedules with drafts, half of them ahead of a GPU that is held up: the tokens
                are those without drafts
    waits       nothing between a plan and its launch waits for the device
    decode      Qwen3.5-0.8B's shape in bfloat16, random weights: ms a step, and of a prompt of 8,192 tokens
    tails       requests of all kinds and lengths after load, without drafts and with some: nothing is compiled or
                captured for them, and without drafts the first of a shape takes at most 50 ms longer than the next one
    host        prompts that come back from pinned memory of the host: the same tokens, both times,
                and the gaps of streams meanwhile

Sections are independent: one that fails prints why, and the next one runs. The end and the exit
status report which ones failed. Needs torch, triton, safetensors and numpy, and `host` all of
pippin[torch]; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import importlib.metadata as metadata
import sys
import time
import traceback
from collections.abc import Callable

import torch

from torch_gpu.right import correct
from torch_gpu.drafts import drafts
from torch_gpu.host import host
from torch_gpu.mixed import mixed
from torch_gpu.moe import agreement, moe
from torch_gpu.packed import decode, packed
from torch_gpu.races import races, waits
from torch_gpu.tails import tails

LIMIT_SECONDS = 420.0  # no section is started after that
STARTED = time.perf_counter()


def environment() -> None:
    print(*(f"{name} {metadata.version(name)}" for name in ("torch", "triton", "numpy")), sep="\n")
    print(torch.cuda.get_device_name(), torch.version.cuda)


def section(name: str, run: Callable[[], None]) -> bool:
    """Whether it passed."""
    began = time.perf_counter()
    print(f"\n== {name}", flush=True)
    passed = False
    try:
        with torch.inference_mode():
            run()
        torch.cuda.synchronize()
        passed = True
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        sys.stderr.flush()
    print(f"-- {name}: {time.perf_counter() - began:.1f} s", flush=True)
    return passed


SECTIONS = {
    run.__name__: run
    for run in (environment, correct, mixed, moe, packed, agreement, races, drafts, waits, decode, host, tails)
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between")
    names = parser.parse_args().only.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"no section {unknown[0]!r}: there are {', '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        parser.error("this needs an NVIDIA GPU")
    results = {}
    for name in names:
        if time.perf_counter() - STARTED > LIMIT_SECONDS:
            results[name] = "no time left"
        else:
            results[name] = "passed" if section(name, SECTIONS[name]) else "FAILED"
    print(f"\n{time.perf_counter() - STARTED:.0f} s in all")
    for name, what in results.items():
        print(f"{name:12} {what}")
    return 0 if set(results.values()) == {"passed"} else 1


if __name__ == "__main__":
    sys.exit(main())
