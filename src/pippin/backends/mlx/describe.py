"""What loading a model chose on this machine, in words. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator

from pippin.backends.mlx.attention.views import reads_table
from pippin.backends.mlx.device import on_metal
from pippin.backends.mlx.layout import Layout, Reads
from pippin.backends.mlx.load import LoadedModel


def describe(loaded: LoadedModel) -> Iterator[tuple[str, str]]:
    """The name of each thing chosen, and a line about it."""
    with loaded.operating():
        by_table = reads_table(loaded.layout)
    gathers = loaded.attention.kernel is None and not by_table
    yield "attention", attention(loaded.layout, gathers=gathers)
    if loaded.layout.state_indices:
        yield "recurrence", recurrence(safe=loaded.safe)


def attention(layout: Layout, *, gathers: bool = False) -> str:
    caches = [cache for cache in layout.caches if not cache.is_state]
    own = sum(not cache.splits for cache in caches)
    if not caches:
        return "none: every layer is recurrent"
    if own == 0:
        latent = any(cache.reads is Reads.LATENT for cache in caches)
        layers = f"{_count(len(caches), 'layer')}{' over latents' if latent else ''}"
        how = "plain operations copy KV in each step, slower" if gathers else "KV is not copied"
        return f"{layers} through mlx-lm's function: {how}"
    attend = "layer attends in its" if len(caches) == 1 else "layers attend in their"
    return f"{own} of {len(caches)} {attend} own way: concatenated KV each step, slower"


def recurrence(*, safe: bool) -> str:
    if safe:
        return "ours, in plain operations: --safe"
    if on_metal():
        return "mlx-lm's kernels for the shapes that they take, else ours"
    return "ours: mlx-lm has no kernels here"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
