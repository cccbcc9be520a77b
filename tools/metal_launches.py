"""Counts the kernels that Metal launches for a step, with drafts or without, and for a chunk.

    python tools/metal_launches.py                  # without Metal: a table of model families
    python tools/metal_launches.py --show qwen3_5   # and what one family's layers launch

mlx builds the graph of a step as on Metal: fused by `mx.compile`, with its fast operations,
mlx-lm's kernels and ours as one node each. Nothing of it is computed. Counted are the nodes that
launch, not the copies that mlx makes of arrays which are not contiguous: a graph does not tell.
Models are small and random; launches depend on neither. Layers: by the difference of two depths.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

METAL = {
    "architecture": "applegpu_g15s",
    "device_name": "Apple M3 Max",
    "max_buffer_length": 38 << 30,
    "max_recommended_working_set_size": 48 << 30,
    "memory_size": 64 << 30,
    "resource_limit": 499_000,
}


class Kernel:
    """Stands for a kernel in a graph: one node that no model has, and its outputs as views."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        **_: Any,
    ) -> list[mx.array]:
        read = [each for each in inputs if isinstance(each, mx.array)]
        node = mx.hadamard_transform(mx.depends([_constant(mx.float32)], read)[0])
        return [
            mx.as_strided(mx.depends([_constant(dtype)], [node])[0], shape, [0] * len(shape))
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]


@cache
def _constant(dtype: mx.Dtype) -> mx.array:
    constant = mx.zeros((2,), dtype)
    mx.eval(constant)
    return constant


# Before mlx-lm is imported, which makes its kernels then.
mx.fast.metal_kernel = Kernel  # type: ignore[assignment, misc]
mx.metal.is_available = lambda: True
mx.default_device = lambda: mx.Device(mx.gpu)
mx.device_info = lambda _: METAL  # type: ignore[assignment]

from mlx.utils import tree_flatten  # noqa: E402

from families import CONFIGS, Config, build_from  # noqa: E402
from pippin.backends.base import DecodeRow  # noqa: E402
from pippin.backends.mlx import load  # noqa: E402
from pippin.backends.mlx.attention.packed_rows import AttentionPaths  # noqa: E402
from pippin.backends.mlx.drafts.draft_rows import DraftRows, find_draft_layers  # noqa: E402
from pippin.backends.mlx.cpu import operations as drop_ins  # noqa: E402
from pippin.backends.mlx.attention.head_ropes import head_norms  # noqa: E402
from pippin.backends.mlx.attention.packed_rows import attend_joined  # noqa: E402
from pippin.backends.mlx.layout import Layout  # noqa: E402
from pippin.backends.mlx.trial_run import adds_later, deferred_norms, kernel_of  # noqa: E402
from pippin.backends.mlx.gpu import added_norms, delta_layer, experts  # noqa: E402
from pippin.backends.mlx.load import LoadedModel  # noqa: E402
from pippin.backends.mlx.prefill.batch import ChunkBatch, PromptState  # noqa: E402
from pippin.backends.mlx.recurrent.taps import states_after  # noqa: E402
from pippin.backends.mlx.recurrent.taps import tap_states  # noqa: E402
from pippin.backends.mlx.rows.decode_forward import DecodeForward, Forward  # noqa: E402
from pippin.backends.mlx.rows.decode_rows import DecodeRows  # noqa: E402
from pippin.backends.mlx.step.sampler import ARRAYS  # noqa: E402
from pippin.backends.step.slots import FutureMap  # noqa: E402

# Another view of the same memory.
NO_LAUNCH = {
    *("Reshape", "Transpose", "Slice", "Broadcast", "BroadcastAxes", "ExpandDims", "Squeeze"),
    *("Flatten", "Unflatten", "Split", "AsStrided", "View", "Depends", "StopGradient"),
}
COPIES_FIRST = {"SliceUpdate", "DynamicSliceUpdate", "Scatter", "ScatterAxis"}
DIMS = {"head_dim": 64, "global_head_dim": 64, "linear_key_head_dim": 64}
DIMS |= {"linear_value_head_dim": 64, "query_pre_attn_scalar": 64}
TOKENS, PREFIX, ROWS, DEPTH = 256, 192, 4, 3


@dataclass(frozen=True)
class Family:
    name: str
    period: int = 1  # layers, after which it repeats
    like: str | None = None  # whose configuration it has
    changes: tuple[tuple[str, Any], ...] = ()

    def config(self, num_periods: int) -> Config:
        num_layers = self.period * num_periods
        config = CONFIGS[self.like or self.name]
        text = dict(config.get("text_config", config))
        text |= {key: value for key, value in DIMS.items() if key in text or key == "head_dim"}
        text |= dict(self.changes) | {"num_hidden_layers": num_layers}
        types = text.get("layer_types")
        if types:
            text["layer_types"] = (types[: self.period] * num_periods)[:num_layers]
        return {**config, "text_config": text} if "text_config" in config else text


GLM: tuple[tuple[str, Any], ...] = (
    *(("model_type", "glm4_moe"), ("num_key_value_heads", 2), ("rope_scaling", None)),
    *(("use_qk_norm", True), ("attention_bias", False), ("partial_rotary_factor", 0.5)),
    *(("n_group", 1), ("topk_group", 1), ("routed_scaling_factor", 1.0)),
    *(("norm_topk_prob", True), ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")),
)
FAMILIES = (
    Family("llama"),
    Family("qwen3"),
    Family("qwen3_moe", 1, "qwen3_next", (("model_type", "qwen3_moe"), ("mlp_only_layers", ()))),
    Family("gemma3", 2),
    Family("gpt_oss", 2),
    Family("qwen3_5", 2),
    Family("qwen3_5_moe", 2),
    Family("glm4_moe", 1, "deepseek_v3", GLM),
    Family("deepseek_v3", changes=(("kv_lora_rank", 64), ("qk_rope_head_dim", 32))),
)


def build(family: Family, num_periods: int) -> LoadedModel:
    config = family.config(num_periods)
    load._choose_attention = _choose_attention
    for module in (delta_layer, experts):  # nothing is computed here
        module.agrees = lambda *_: True
    return load.prepare(build_from(config), config)


def _choose_attention(model: Any, layout: Layout, forward: Forward) -> AttentionPaths:
    """As at load, but for numbers: plain operations stand for the kernel while it is tried."""
    kernel = kernel_of(layout)
    if kernel is None:
        return AttentionPaths()
    norms = deferred_norms(layout, forward, attend_joined, head_norms(model))
    added_norms.use_pending_sums(model)
    in_one, added_norms.add_and_norm = added_norms.add_and_norm, _add_then_norm
    adds = adds_later(layout, forward, AttentionPaths(attend_joined, norms=norms))
    added_norms.add_and_norm = in_one
    return AttentionPaths(kernel, norms=norms, adds_later=adds)


def _add_then_norm(
    x: mx.array, y: mx.array, weight: mx.array, eps: float
) -> tuple[mx.array, mx.array]:
    return x + y, mx.fast.rms_norm(x + y, weight, eps)


@contextmanager
def fast_operations_as_nodes() -> Iterator[None]:
    """mlx takes them apart for a CPU."""

    def node(shape: Callable[..., Sequence[int]]) -> Callable[..., mx.array]:
        def call(*args: Any, **_: Any) -> mx.array:
            inputs = [each for each in args if isinstance(each, mx.array)]
            shapes, dtypes = [shape(*inputs)], [inputs[0].dtype]
            (out,) = Kernel()(inputs=inputs, output_shapes=shapes, output_dtypes=dtypes)
            return out

        return call

    names = {
        "rms_norm": lambda x, *_: x.shape,
        "layer_norm": lambda x, *_: x.shape,
        "rope": lambda x, *_: x.shape,
        "scaled_dot_product_attention": lambda q, k, v, *_: (*q.shape[:-1], v.shape[-1]),
    }
    # Two of them are substituted, and asked for behind the substitutes.
    homes = {"rms_norm": (drop_ins, "_mlx_rms_norm"), "rope": (drop_ins, "_mlx_rope")}
    kept = []
    for name, shape in names.items():
        home, own = homes.get(name, (mx.fast, name))
        kept.append((home, own, getattr(home, own)))
        setattr(home, own, node(shape))
    try:
        yield
    finally:
        for home, own, function in kept:
            setattr(home, own, function)


def launches(outputs: Sequence[mx.array]) -> Counter[str]:
    """By primitive."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "graph.dot")
        mx.export_to_dot(str(path), *outputs)
        lines = path.read_text().splitlines()
    nodes: list[tuple[str, int]] = []  # with how many inputs; a primitive may be several nodes
    for line in lines:
        if "[label" in line:
            nodes.append((line.split('"')[1].replace("Hadamard", "a kernel"), 0))
        elif line.startswith('"') and "->" in line:
            nodes[-1] = nodes[-1][0], nodes[-1][1] + 1
    counts: Counter[str] = Counter()
    for name, num_inputs in nodes:
        if name == "Concatenate":
            counts[name] += num_inputs
        elif name not in NO_LAUNCH:
            counts[name] += 2 if name in COPIES_FIRST else 1
    return counts


def prompt(loaded: LoadedModel, num_tokens: int) -> PromptState:
    state = PromptState(num_tokens)
    for index, own in enumerate(loaded.layout.caches):
        entries = list(zip(own.shapes, own.dtypes, strict=True))
        if own.is_state:
            state.states[index] = [mx.zeros((1, *shape), dtype) for shape, dtype in entries]
        else:
            held = min(num_tokens, own.window or num_tokens)
            keys, values = (
                mx.zeros((1, heads, held, dim), dtype) for (heads, dim), dtype in entries
            )
            state.kv[index] = keys, values
    mx.eval(state.arrays())
    return state


def decode_step(loaded: LoadedModel) -> Counter[str]:
    rows = DecodeRows(loaded.layout, loaded.attention)
    slots = range(1, ROWS + 1)
    rows.join([(slot, prompt(loaded, PREFIX)) for slot in slots])
    rows.flush()
    mx.eval(rows.arrays())
    forward = DecodeForward(loaded.layout, loaded.forward, compiled=True)
    results: list[Any] = []

    def run(shape: Any, tree: Any) -> Any:
        mx.eval(tree)
        results.append(forward(shape, tree))
        return results[-1]

    with fast_operations_as_nodes():
        rows.advance(slots, lambda at: mx.zeros(len(at), mx.int32), run)
    return launches([array for _, array in tree_flatten(results)])


def verify_step(loaded: LoadedModel) -> Counter[str]:
    """Rows that verify `DEPTH` drafts each, behind a step that did."""
    layers = find_draft_layers(loaded.model, loaded.layout, deterministic=False)
    if isinstance(layers, str):
        return Counter()
    future = FutureMap(ARRAYS, ROWS, max_depth=DEPTH)
    rows = DraftRows(loaded.layout, layers, future, DEPTH, loaded.attention)
    slots = range(1, ROWS + 1)
    rows.join([(slot, prompt(loaded, PREFIX)) for slot in slots])
    forward = DecodeForward(loaded.layout, loaded.forward, compiled=True)
    results: list[Any] = []

    def run(shape: Any, tree: Any) -> Any:
        mx.eval(tree)
        results.append(forward(shape, tree))
        return results[-1]

    with fast_operations_as_nodes():
        rows.verify([DecodeRow(slot, PREFIX, depth=DEPTH) for slot in slots], run)
    return launches([array for _, array in tree_flatten(results)])


def chunk(loaded: LoadedModel, *, taps: bool) -> Counter[str]:
    batch = ChunkBatch(
        loaded.layout, [np.zeros(TOKENS, dtype=np.int32)], [state := prompt(loaded, PREFIX)]
    )
    with fast_operations_as_nodes(), tap_states([TOKENS // 2]) as tapped:
        loaded.head.positions = mx.array(batch.last_positions[:, None])
        logits = loaded.forward(batch.tokens, batch.caches)
        loaded.head.positions = None
        batch.advance()
    found = states_after(tapped, loaded.layout, TOKENS // 2)[0] if taps else {}
    more = [array for entries in found.values() for array in entries]
    return launches([logits, *state.arrays(), *more])


def count(family: Family) -> dict[str, dict[str, Any]]:
    """Of a step and of a chunk: launches of a layer, and of all that is no layer."""
    few, many = build(family, 2), build(family, 3)
    found = {}
    for name, work in (
        ("decode", decode_step),
        ("verify", verify_step),
        ("chunk", lambda loaded: chunk(loaded, taps=loaded.state_taps)),
    ):
        one, other = work(few), work(many)
        layers = other - one
        found[name] = {
            "layer": layers.total() / family.period,
            "rest": one.total() - 2 * layers.total(),
            "by_primitive": dict(layers.most_common()),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--show", metavar="FAMILY", help="what its layers launch, by primitive")
    args = parser.parse_args()
    mx.enable_compile()
    chosen = [family for family in FAMILIES if args.show in (None, family.name)]
    counted = {family.name: count(family) for family in chosen}
    if args.json:
        print(json.dumps(counted))
        return
    works = ("decode", "verify", "chunk")
    heads = [head for work in works for head in (f"{work}: a layer", "the rest")]
    print(f"{'family':<14}", *(f"{head:>16}" for head in heads), sep="")
    for name, found in counted.items():
        numbers = [found[work][part] for work in works for part in ("layer", "rest")]
        print(f"{name:<14}", *(f"{number:>16g}" for number in numbers), sep="")
        if args.show:
            for work, own in found.items():
                print(work, *(f"  {n} {each}" for each, n in own["by_primitive"].items()), sep="\n")


if __name__ == "__main__":
    main()
