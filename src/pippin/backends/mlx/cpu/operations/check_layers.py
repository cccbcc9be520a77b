"""Trials of operations that are whole layers, against mlx-lm's own. See check.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from pippin.backends.mlx.cpu.operations.bindings import Operations
from pippin.backends.mlx.cpu.operations.drop_ins import frequencies

Pairs = Iterable[tuple[mx.array, mx.array]]


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def _delta_net() -> Any:
    from mlx_lm.models.qwen3_5 import GatedDeltaNet, TextModelArgs

    mx.random.seed(0)
    layer = GatedDeltaNet(
        TextModelArgs(
            hidden_size=48,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=24,
            linear_conv_kernel_dim=4,
        )
    )
    layer.norm.weight, layer.dt_bias = normal(24), normal(4, seed=1)
    layer.eval()
    return layer


def _products(layer: Any, x: mx.array) -> list[mx.array]:
    return [
        part(x) for part in (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a)
    ]


def _delta_weights(layer: Any) -> tuple[mx.array, ...]:
    taps = mx.contiguous(layer.conv1d.weight[:, :, 0].T)
    return (taps, layer.A_log, layer.dt_bias, layer.norm.weight)


def delta_layer(ours: Operations) -> Pairs:
    from mlx_lm.models.cache import ArraysCache

    layer, x = _delta_net(), normal(2, 70, 48, seed=2)
    held = normal(2, 3, layer.conv_dim, seed=3), normal(2, 4, 24, 16, seed=4)

    def run(products: Sequence[mx.array], *others: mx.array, num_made: int = 3) -> list[mx.array]:
        inputs = (*products, *held, *_delta_weights(layer), *others)
        found = ours.delta_layer(inputs, k_heads=(2, 16), eps=layer.norm.eps, num_made=num_made)
        return [layer.out_proj(found[0]), *found[1:]]

    for given in (x, x[:, :1]):
        cache = ArraysCache(size=2)
        cache[0], cache[1] = held
        expected = layer(given, None, cache)
        yield from zip(run(_products(layer, given)), (expected, cache[0], cache[1]), strict=True)
    # Of three drafts one row accepted two, the other none; then both run a token and a draft.
    accepted, products = [2, 0], _products(layer, x[:, 4:6])
    qkv, _, b, a = _products(layer, x[:, 1:4])
    out, conv_state, state, kept, *_ = run(products, qkv, b, a, mx.array(accepted), num_made=6)
    for row, num_accepted in enumerate(accepted):
        one, cache = slice(row, row + 1), ArraysCache(size=2)
        cache[0], cache[1] = (entry[one] for entry in held)
        if num_accepted:
            layer(x[one, 1 : 1 + num_accepted], None, cache)
        first = layer(x[one, 4:5], None, cache)
        yield conv_state[one], cache[0]
        yield state[one], cache[1]
        yield out[one], mx.concatenate([first, layer(x[one, 5:6], None, cache)], axis=1)
    yield kept[:, :1], products[0][:, 1:]


def draft_head(ours: Operations) -> Pairs:
    """Two drafts of two rows: one is fed three tokens behind two that it knew, the other one."""
    from mlx.nn.layers.normalization import RMSNorm
    from mlx_lm.models.cache import KVCache
    from mlx_lm.models.qwen3_5 import DecoderLayer, TextModelArgs

    size, num_ids, cells, num_drafts = 48, 60, 9, 2
    mx.random.seed(1)
    args = TextModelArgs(
        hidden_size=size,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        partial_rotary_factor=0.5,
        rope_parameters=None,
        full_attention_interval=1,
        num_experts=0,
    )
    layer: Any = DecoderLayer(args, 0)
    eps = args.rms_norm_eps
    attention, mlp = layer.self_attn, layer.mlp
    lines, join = normal(num_ids, size, seed=2), normal(size, 2 * size, seed=3) * 0.1
    norms = [RMSNorm(size, eps) for _ in range(3)]
    for seed, norm in enumerate([*norms, attention.q_norm, attention.k_norm], 4):
        norm.weight = 1.0 + 0.1 * normal(*norm.weight.shape, seed=seed)
    rope = attention.rope
    weights: tuple[mx.array, ...] = (lines, norms[0].weight, norms[1].weight, ours.pack(join))
    weights += (layer.input_layernorm.weight,)
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    weights += tuple(ours.pack(part.weight) for part in parts)
    weights += (attention.q_norm.weight, attention.k_norm.weight)
    weights += (ours.pack(attention.o_proj.weight), layer.post_attention_layernorm.weight)
    weights += tuple(ours.pack(p.weight) for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    weights += (norms[2].weight, ours.pack(lines), frequencies(rope.dims, rope.base))

    def read(hidden: mx.array, tokens: mx.array, cache: KVCache) -> mx.array:
        parts = [norms[0](lines[tokens]), norms[1](hidden)]
        entered = mx.concatenate(parts, axis=-1) @ join.T
        mask = "causal" if tokens.shape[1] > 1 else None
        out: mx.array = norms[2](layer(entered, mask, cache))
        return out[:, -1:]

    hidden, tokens = normal(2, 3, size, seed=9), mx.array([[7, 21, 40], [12, 0, 0]])
    counts, known = mx.array([2, 0]), (2, 0)  # places in front of the first token
    keys, values = (mx.zeros((2, 2, cells, 16)) for _ in range(2))
    caches: list[Any] = [KVCache(), KVCache()]
    read(normal(1, 2, size, seed=10), mx.array([[3, 50]]), caches[0])
    keys[:1, :, :2], values[:1, :, :2] = caches[0].keys[:, :, :2], caches[0].values[:, :, :2]
    choices = mx.array([[0.0, 0, float("inf"), 0]] * 2)
    noise = mx.zeros((2, num_drafts, 2), mx.uint32)
    step = (hidden, tokens, counts, mx.array(known), keys, values, choices, noise)
    drafts, *rings = ours.draft_head((*step, *weights), 2, num_ids, eps, rope.scale)
    for row, cache in enumerate(caches):
        one, end = slice(row, row + 1), int(counts[row]) + 1
        last, token = hidden[one, :end], tokens[one, :end]
        for number in range(num_drafts):
            last = read(last, token, cache)
            logits = (last @ lines.T)[0, 0]
            token = drafts[one, number : number + 1]
            yield logits[token[0, 0]], logits.max()
        for ring, wanted in zip(rings, (cache.keys, cache.values), strict=True):
            yield ring[one, :, : cache.offset], wanted[:, :, : cache.offset]
