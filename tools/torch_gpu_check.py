"""The torch backend on an NVIDIA GPU: is it right, how fast is it, and where does a step's time go?

    python tools/torch_gpu_check.py [--only correct,decode,prefill,products,profile]

Correctness is checked on the bundled model in float32: kernels and captured graphs against plain
operations on the GPU and on the CPU. Times are of Qwen3.5-0.8B's shape in bfloat16 with random
weights. Every section stands alone: one that fails prints why, and the next one runs. Needs torch,
triton and numpy; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import traceback
import types
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

try:
    import msgspec  # noqa: F401
except ImportError:  # a machine with torch alone: rows of plans need no more of it than this

    class Struct:
        def __init_subclass__(cls, **_: Any) -> None: ...

        def __init__(self, *values: Any, **named: Any) -> None:
            names = list(type(self).__annotations__)
            for name, value in [*zip(names, values), *named.items()]:
                setattr(self, name, value)

    sys.modules["msgspec"] = types.SimpleNamespace(Struct=Struct)  # type: ignore[assignment]

import numpy as np
import torch

from pippin.backends.base import Admit, DecodeRow, PrefillRow, Retire, StepPlan
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.config import ModelShape, read_shape
from pippin.backends.torch.load import LoadedModel, load
from pippin.backends.torch.models.build import build_decoder
from pippin.types import SamplingParams

BUNDLED = ROOT / "src" / "pippin" / "models" / "stories-hybrid-20m"
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.8, top_k=20, top_p=0.95)
CONTEXT = 512
LIMIT_SECONDS = 230.0

SHAPE: dict[str, Any] = {
    "model_type": "qwen3_5",
    "tie_word_embeddings": True,
    "text_config": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "vocab_size": 248_320,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
}


class RandomWeights:
    """Of a hybrid's shape; the same for the same name."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device

    def has(self, name: str) -> bool:
        return not name.endswith("bias") or name.endswith("dt_bias")

    def take(self, name: str, *, exact: bool = False) -> torch.Tensor:
        size = self._size(name.split("layers.")[-1])
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(size, generator=generator, device=self._device)
        if name.endswith("norm.weight"):
            values = values * 0.0 + ("linear_attn.norm" in name)
        elif len(size) > 1:
            values = values * 0.02
        return values.to(torch.float32 if exact else self._dtype)

    def _size(self, name: str) -> tuple[int, ...]:
        shape, delta = self._shape, self._shape.delta
        assert delta is not None
        heads, kv, hidden = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, shape.hidden
        values = delta.num_v_heads * delta.v_dim
        sizes: dict[str, tuple[int, ...]] = {
            "embed_tokens": (shape.vocab_size, hidden),
            "q_norm": (shape.head_dim,),
            "k_norm": (shape.head_dim,),
            "linear_attn.norm": (delta.v_dim,),
            "norm": (hidden,),
            "q_proj": (2 * heads, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, heads),
            "in_proj_qkv": (delta.num_channels, hidden),
            "in_proj_z": (values, hidden),
            "in_proj_b": (delta.num_v_heads, hidden),
            "in_proj_a": (delta.num_v_heads, hidden),
            "conv1d": (delta.num_channels, 1, delta.num_taps),
            "A_log": (delta.num_v_heads,),
            "dt_bias": (delta.num_v_heads,),
            "out_proj": (hidden, values),
            "gate_proj": (shape.intermediate, hidden),
            "up_proj": (shape.intermediate, hidden),
            "down_proj": (hidden, shape.intermediate),
        }
        return next(size for part, size in sizes.items() if part in name)


@cache
def random_model() -> LoadedModel:
    device, shape = torch.device("cuda"), read_shape(SHAPE)
    weights = RandomWeights(shape, torch.bfloat16, device)
    with torch.inference_mode():
        decoder = build_decoder(shape, weights, torch.bfloat16, device, shape.max_len)
    return LoadedModel(decoder, "random", shape.max_len)


class Play:
    """Requests through the backend's own launches, two steps in flight."""

    def __init__(self, backend: TorchBackend, num_rows: int, context: int, params: SamplingParams = GREEDY) -> None:
        self.backend, self.context = backend, context
        self.slots = range(1, num_rows + 1)
        self.steps = 0
        rng = np.random.default_rng(0)
        vocab = backend.spec.vocab_size
        prompts = {s: rng.integers(10, vocab, context).astype(np.int32) for s in self.slots}
        self.tokens: dict[int, list[int]] = {slot: [] for slot in self.slots}
        for slot, prompt in prompts.items():
            admit = Admit(slot, params, (), prompt, seed=slot)
            row = PrefillRow(slot, 0, prompt, samples=True)
            self.take(self.launch(admit=(admit,), prefill=(row,)).wait())

    def launch(self, **fields: Any) -> Any:
        self.steps += 1
        return self.backend.launch(StepPlan(self.steps, **fields))

    def take(self, result: Any) -> None:
        for slot, token in result.tokens.items():
            self.tokens[slot].append(token)

    def decode(self, num_steps: int) -> list[float]:
        """Seconds between results."""
        times, waiting = [], None
        for _ in range(num_steps):
            began = time.perf_counter()
            rows = tuple(DecodeRow(slot, self.context) for slot in self.slots)
            self.context += 1
            launched = self.launch(decode=rows)
            if waiting is not None:
                self.take(waiting.wait())
            waiting = launched
            times.append(time.perf_counter() - began)
        self.take(waiting.wait())
        return times

    def end(self) -> None:
        self.launch(retire=tuple(Retire(slot) for slot in self.slots)).wait()


def section(name: str, run: Callable[[], None]) -> None:
    began = time.perf_counter()
    print(f"\n== {name}", flush=True)
    try:
        run()
        torch.cuda.synchronize()
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        sys.stderr.flush()
    print(f"-- {name}: {time.perf_counter() - began:.1f} s", flush=True)


def gpu_ms(run: Callable[[], object], repeats: int = 30) -> float:
    """Median milliseconds on the GPU, launches included if they are slower."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


# ---- is it right? ------------------------------------------------------------------------------


def environment() -> None:
    import importlib.metadata as metadata

    for name in ("torch", "triton", "flash-linear-attention", "transformers", "numpy"):
        try:
            print(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            print(name, "not installed")
    print(torch.cuda.get_device_name(), torch.version.cuda)


def correct() -> None:
    """The bundled model in float32: replies of three backends, greedy and drawn."""
    loaded = {
        "cpu": load(BUNDLED, dtype="float32", device=torch.device("cpu")),
        "gpu": load(BUNDLED, dtype="float32", device=torch.device("cuda")),
    }
    for params in (GREEDY, DRAWN, SamplingParams(temperature=1.0, frequency_penalty=0.5)):
        said = {}
        for name, device, kernels in (
            ("cpu, plain", "cpu", False),
            ("gpu, plain", "gpu", False),
            ("gpu, kernels", "gpu", True),
        ):
            try:
                backend = TorchBackend(loaded[device], num_slots=8, kernels=kernels)
                for num_rows in (3, 1):
                    play = Play(backend, num_rows, 150, params)
                    play.decode(24)
                    play.end()
                    said[name, num_rows] = play.tokens
                backend._pools.arena.check_integrity()
            except Exception:  # noqa: BLE001
                traceback.print_exc()
        for name, num_rows in said:
            same = said[name, num_rows] == said["cpu, plain", num_rows]
            print(f"temperature {params.temperature}: {name}, {num_rows} rows: {'same' if same else 'DIFFERS'}")
            if not same:
                print("   ", said[name, num_rows][1][:16], "\n   ", said["cpu, plain", num_rows][1][:16])


def waits() -> None:
    """No launch waits for the device."""
    backend = TorchBackend(random_model(), num_slots=4)
    for params in (GREEDY, DRAWN, SamplingParams(temperature=1.0, frequency_penalty=0.5, logprobs=2)):
        play = Play(backend, 2, 130, params)
        play.decode(3)
        torch.cuda.set_sync_debug_mode("error")
        try:
            play.decode(4)
            play.end()
            again = Play(backend, 2, 130, params)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        again.end()
        print("nobody waited,", params.temperature)


def precise() -> None:
    """bfloat16 kernels against plain operations in the same type, one step and one prompt."""
    loaded = random_model()
    logits = {}
    for kernels in (False, True):
        backend = TorchBackend(loaded, num_slots=4, kernels=kernels)
        params = SamplingParams(temperature=0.0, logprobs=5)
        play = Play(backend, 3, 200, params)
        rows = tuple(DecodeRow(slot, play.context) for slot in play.slots)
        result = play.launch(decode=rows).wait()
        logits[kernels] = {s: result.logprobs[s] for s in play.slots}
        play.end()
    for slot in logits[True]:
        print(slot, "plain  ", logits[False][slot].top_ids, [round(x, 3) for x in logits[False][slot].top_logprobs])
        print(slot, "kernels", logits[True][slot].top_ids, [round(x, 3) for x in logits[True][slot].top_logprobs])


# ---- how fast? ---------------------------------------------------------------------------------


def replay_ms(backend: TorchBackend, play: Play, params: SamplingParams) -> float:
    """One replay after the other, nothing of the host in between."""
    steps = backend._decode_steps
    assert steps is not None
    graphs = {key: g for key, g in steps._graphs.items() if key[0] >= len(play.slots)}
    width, choice = min(key for key in graphs if key[1] == (0 if params is GREEDY else 1))
    graph = steps._graphs[width, choice]
    with torch.cuda.stream(backend._streams._forward):
        return gpu_ms(lambda: [graph.replay() for _ in range(20)], repeats=8) / 20


def decode() -> None:
    from pippin.backends.torch.kernels import decode as module

    table = []
    backend = TorchBackend(random_model(), num_slots=64, pool_bytes=8 << 30)
    kernels = backend._decode_steps._kernels  # type: ignore[union-attr]
    for num_rows, most_rows in ((1, 16), (1, 0), (8, 16), (8, 0), (32, 64), (32, 0)):
        own = "own products" if num_rows <= most_rows else "cuBLAS"
        for params, name in ((GREEDY, "greedy"), (DRAWN, "drawn")):
            try:
                kernels._most_rows = most_rows
                backend._decode_steps._graphs.clear()  # type: ignore[union-attr]
                play = Play(backend, num_rows, CONTEXT, params)
                began = time.perf_counter()
                play.decode(2)
                captured = time.perf_counter() - began
                wall = statistics.median(play.decode(60)[20:]) * 1e3
                device = replay_ms(backend, play, params)
                play.end()
                table.append((num_rows, own, name, device, wall, captured))
                print(f"{num_rows:3} rows, {own}, {name}: replay {device:.3f} ms, served {wall:.3f} ms a step, first {captured:.1f} s", flush=True)
            except Exception:  # noqa: BLE001
                traceback.print_exc()
                backend = TorchBackend(random_model(), num_slots=64, pool_bytes=8 << 30)
                kernels = backend._decode_steps._kernels  # type: ignore[union-attr]
    kernels._most_rows = module.MOST_ROWS
    print("\n| rows | products | tokens | replay, ms | served, ms a step |\n|---|---|---|---|---|")
    for num_rows, own, name, device, wall, _ in table:
        print(f"| {num_rows} | {own} | {name} | {device:.3f} | {wall:.3f} |")


def prefill() -> None:
    for kernels in (True, False):
        backend = TorchBackend(random_model(), num_slots=4, pool_bytes=16 << 30, kernels=kernels)
        prompt = np.random.default_rng(0).integers(10, 200_000, 8192).astype(np.int32)
        for chunk, every in ((8192, 0), (8192, 1024), (8192, 64), (2048, 0), (512, 0)):
            if not kernels and (chunk, every) != (8192, 0):
                continue
            times = []
            for turn in range(4):
                steps = [StepPlan(turn * 100, admit=(Admit(1, GREEDY, (), prompt, 1),))]
                for start in range(0, len(prompt), chunk):
                    marks = tuple(range(start + every, start + chunk + 1, every)) if every else ()
                    row = PrefillRow(1, start, prompt[start : start + chunk], samples=start + chunk >= len(prompt), captures=bool(every), checkpoints=marks)
                    steps.append(StepPlan(turn * 100 + len(steps), prefill=(row,)))
                began = time.perf_counter()
                pending = [backend.launch(plan) for plan in steps]
                launched = time.perf_counter() - began
                results = [step.wait() for step in pending]
                torch.cuda.synchronize()
                times.append((time.perf_counter() - began, launched))
                for result in results:
                    for capture in result.captures:
                        capture.release()
                backend.launch(StepPlan(turn * 100 + 99, retire=(Retire(1),))).wait()
            best, launching = min(times[1:])
            print(f"kernels {kernels}, 8,192 tokens in chunks of {chunk}, states every {every}: {best * 1e3:.1f} ms ({launching * 1e3:.1f} of launching), first {times[0][0]:.1f} s", flush=True)


def compare_fla() -> None:
    """Our blocks against flash-linear-attention's, one layer of 8,192 tokens."""
    from pippin.backends.torch.kernels.delta_blocks import BlockTable, _scan, _solve, delta_blocks

    layer = random_model().decoder.layers[0].mixer
    device, num_tokens = torch.device("cuda"), 8192
    mixed = torch.randn(num_tokens, 6144, device=device).bfloat16()
    gates = torch.randn(num_tokens, 32, device=device).bfloat16()
    state = torch.zeros(2, 16, 128, 128, device=device)
    index = torch.arange(num_tokens // 64, device=device)
    table = BlockTable(index * 64, torch.full_like(index, 64), (index == 127).long(), index[:1] * 0, torch.full_like(index[:1], 128))
    zero = index[:1] * 0
    print(f"ours: {gpu_ms(lambda: delta_blocks(mixed, gates, layer, state, zero, table)):.3f} ms a layer")
    ours = delta_blocks(mixed, gates, layer, state, zero, table)
    q, k, v = (x.unflatten(-1, (16, 128))[None].contiguous() for x in mixed.split([2048, 2048, 2048], dim=-1))
    b, a = gates.split([16, 16], dim=-1)
    beta = torch.sigmoid(b.float())[None]
    g = (layer.decay * torch.nn.functional.softplus(a.float() + layer.dt_bias))[None]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def run() -> Any:
        return chunk_gated_delta_rule(q, k, v, g=g, beta=beta.bfloat16(), output_final_state=True, use_qk_l2norm_in_kernel=True)

    print(f"flash-linear-attention: {gpu_ms(run):.3f} ms a layer")
    theirs, final = run()
    error = (ours.float() - theirs[0].float()).abs().max() / theirs.float().abs().max()
    print(f"outputs differ by {error:.2e} of the largest, states by {(state[1] - final[0]).abs().max() / final.abs().max():.2e}")


def products() -> None:
    """Tiles of the product kernel, for the shapes of a step; cuBLAS beside them."""
    import torch.nn.functional as F  # noqa: N812

    from pippin.backends.torch.kernels.products import Tile, product

    device = torch.device("cuda")
    shapes = {"in_proj": (8224, 1024, False), "out_proj": (1024, 2048, False), "gate_up": (7168, 1024, True), "down": (1024, 3584, False), "head": (248_320, 1024, False)}
    for num_rows in (1, 8):
        for name, (num_out, size, gated) in shapes.items():
            copies = max(1, (200 << 20) // (num_out * size * 2))  # more than the L2 holds
            weights = [torch.randn(num_out, size, device=device).bfloat16() * 0.02 for _ in range(copies)]
            x = torch.randn(num_rows, size, device=device).bfloat16()
            found = {}

            def timed(run: Callable[[torch.Tensor], object]) -> float:
                graph = torch.cuda.CUDAGraph()
                for w in weights:
                    run(w)
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    for w in weights:
                        run(w)
                return gpu_ms(graph.replay, repeats=5) / copies * 1e3

            found["cuBLAS"] = timed(lambda w: F.linear(x, w))
            ns = (4, 8, 16, 32) if num_rows == 1 else (16, 32, 64)
            ks = (256, 512, 1024) if num_rows == 1 else (128, 256)
            for n in ns:
                for k in ks:
                    for warps, stages in ((4, 3), (4, 5), (8, 3)) if name != "head" else ((4, 3),):
                        if n * k > 16384 or k > size:
                            continue
                        tile = Tile(n, k, warps, stages)
                        try:
                            found[f"n{n} k{k} w{warps} s{stages}"] = timed(lambda w, t=tile: product(x, w, swiglu=gated, tile=t))
                        except Exception as error:  # noqa: BLE001
                            found[f"n{n} k{k} w{warps} s{stages}: {type(error).__name__}"] = 1e9
            best = sorted(found.items(), key=lambda item: item[1])[:4]
            floor = num_out * size * 2 / 4.3e12 * 1e6
            print(f"{num_rows} rows, {name}: read {floor:.1f} us; cuBLAS {found['cuBLAS']:.1f}; " + "; ".join(f"{key} {us:.1f}" for key, us in best), flush=True)
            if time.perf_counter() - STARTED > LIMIT_SECONDS:
                return


def profile() -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    backend = TorchBackend(random_model(), num_slots=64, pool_bytes=8 << 30)
    for num_rows in (1, 32):
        play = Play(backend, num_rows, CONTEXT)
        play.decode(5)
        with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            play.decode(10)
            torch.cuda.synchronize()
        play.end()
        print(f"{num_rows} rows, 10 steps")
        print(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=14, max_name_column_width=40))
    with profiler(activities=[ProfilerActivity.CUDA]) as found:
        Play(backend, 1, 8192).end()
        torch.cuda.synchronize()
    print("a prompt of 8,192 tokens")
    print(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=14, max_name_column_width=40))


STARTED = time.perf_counter()
SECTIONS = {
    "environment": environment,
    "correct": correct,
    "precise": precise,
    "decode": decode,
    "prefill": prefill,
    "fla": compare_fla,
    "waits": waits,
    "profile": profile,
    "products": products,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this needs an NVIDIA GPU")
    for name in args.only.split(","):
        if time.perf_counter() - STARTED > LIMIT_SECONDS:
            print(f"no time left for {name}")
            continue
        with torch.inference_mode():
            section(name, SECTIONS[name])
    print(f"\n{time.perf_counter() - STARTED:.0f} s in all")


if __name__ == "__main__":
    main()
