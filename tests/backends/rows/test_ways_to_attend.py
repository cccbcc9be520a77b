"""Layers that attend in ways of their own beside layers that do not, and latent attention.

The reference is plain mlx-lm: whatever way a layer attends, it computes the same.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import qwen3

from families import build
from pippin.backends.mlx.attention.views import RowKV
from pippin.backends.mlx.layout import LatentProbeKV, ProbeKV, Reads
from pippin.backends.mlx.load import LoadedModel, prepare
from reference import assert_right
from serving import make_client, make_prompt

LENGTHS = (5, 70, 64, 131)


class OwnAttention(qwen3.Attention):
    """Writes out its softmax, as some of mlx-lm's models do."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        batch, num_tokens, _ = x.shape
        q, k, v = (
            part(x).reshape(batch, num_tokens, heads, -1)
            for part, heads in (
                (self.q_proj, self.n_heads),
                (self.k_proj, self.n_kv_heads),
                (self.v_proj, self.n_kv_heads),
            )
        )
        q, k = self.q_norm(q).swapaxes(1, 2), self.k_norm(k).swapaxes(1, 2)
        q, k = self.rope(q, offset=cache.offset), self.rope(k, offset=cache.offset)
        keys, values = cache.update_and_fetch(k, v.swapaxes(1, 2))
        repeats = self.n_heads // self.n_kv_heads
        keys, values = mx.repeat(keys, repeats, axis=1), mx.repeat(values, repeats, axis=1)
        scores = (q * self.scale) @ keys.swapaxes(-1, -2)
        if isinstance(mask, str):
            seen = mx.arange(keys.shape[2] - num_tokens, keys.shape[2])[:, None]
            mask = mx.arange(keys.shape[2]) <= seen
        if mask is not None:
            scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
        out = mx.softmax(scores, axis=-1) @ values
        return self.o_proj(out.swapaxes(1, 2).reshape(batch, num_tokens, -1))  # type: ignore[no-any-return]


def with_own_attention(*layers: int) -> LoadedModel:
    model, config = build("qwen3")
    for number in layers:
        attention: nn.Module = model.layers[number].self_attn
        attention.__class__ = OwnAttention
    return prepare(model, config)


def check(family: str, model: LoadedModel | None = None) -> None:
    client = make_client(family, model=model, num_slots=4)
    prompts = [make_prompt(family, n, seed=0) for n in LENGTHS]
    replies = [client.submit(p, max_tokens=70, ignore_eos=True) for p in prompts]
    client.run()
    for reply in replies:
        assert reply.error is None
        assert_right(family, reply.prompt, reply.tokens)


@pytest.mark.parametrize("own", [(0,), (1,), (0, 1)])
def test_a_layer_that_attends_in_its_own_way_joins_its_own_kv_alone(own: tuple[int, ...]) -> None:
    """The first layer makes the mask of them all."""
    model = with_own_attention(*own)
    reads = [cache.reads for cache in model.layout.caches]
    assert reads == [Reads.JOINED if number in own else Reads.PIECES for number in (0, 1)]
    check("qwen3", model)


@pytest.mark.slow
@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("family", ["qwen3", "gemma3n", "gemma4"])
def test_what_an_operation_reads_by_a_table_is_never_joined(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV that other layers borrow neither."""

    def join(*_: Any) -> None:
        raise AssertionError("main and tail were joined")

    monkeypatch.setattr(RowKV, "_joined", join)
    check(family)


QUERIES = mx.array([[0.5, 1.0, 2.0], [1.0, 0.0, 3.0]])


def probes(added: mx.array) -> tuple[LatentProbeKV, ProbeKV]:
    """A layer's two probes, when it adds `added` [heads, 1] to the score of its only key."""
    keys, positions = mx.ones((1, 1, 1, 4)), mx.array([[[[1.0, 2.0, -1.0]]]])
    plain, latent = ProbeKV(), LatentProbeKV()
    for probe, mask in ((plain, added), (latent, QUERIES)):
        handed, _ = probe.update_and_fetch(keys, positions)
        probe.seen_by_attention(handed, handed, mask[None, :, None])
    return latent, plain


def test_latent_attention_is_known_by_what_it_adds() -> None:
    latent, plain = probes(QUERIES @ mx.array([[1.0], [2.0], [-1.0]]))
    assert plain.reads is Reads.LATENT
    assert latent.agrees_with(plain)


def test_a_layer_that_adds_something_else_is_not_taken_for_latent() -> None:
    latent, plain = probes(mx.tanh(QUERIES @ mx.array([[1.0], [2.0], [-1.0]])))
    assert plain.reads is Reads.LATENT
    assert not latent.agrees_with(plain)
