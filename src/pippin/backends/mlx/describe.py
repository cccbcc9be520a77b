"""What loading a model chose on this machine, in words. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pippin.backends.mlx.attention.paths import AttentionPaths
from pippin.backends.mlx.attention.table_kv import table_operations
from pippin.backends.mlx.gpu.attention_times import SUBJECT as ATTENTION
from pippin.backends.mlx.layout import Layout, Reads
from pippin.backends.mlx.load import LoadedModel
from pippin.backends.mlx.recurrent.choices import SUBJECT as RECURRENCES
from pippin.backends.mlx.recurrent.choices import Choice
from pippin.backends.mlx.timing import times_file


def describe(loaded: LoadedModel) -> Iterator[tuple[str, str]]:
    """The name of each thing chosen, and a line about it."""
    with loaded.operating():
        by_table = table_operations(loaded.layout) is not None
    gathers = loaded.attention.kernel is None and not by_table
    timed = bool(loaded.attention.times)
    yield "attention", attention(loaded.layout, timed=timed, gathers=gathers)
    yield from attention_paths(loaded.attention)
    yield from recurrences(loaded.recurrences)


def attention(layout: Layout, *, timed: bool = False, gathers: bool = False) -> str:
    caches = [cache for cache in layout.caches if not cache.is_state]
    own = sum(not cache.splits for cache in caches)
    if not caches:
        return "none: every layer is recurrent"
    if own == 0:
        latent = any(cache.reads is Reads.LATENT for cache in caches)
        layers = f"{_count(len(caches), 'layer')}{' over latents' if latent else ''}"
        how = "the faster way by times" if timed else "KV is not copied"
        how = "plain operations copy KV in each step, slower" if gathers else how
        return f"{layers} through mlx-lm's function: {how}"
    attend = "layer attends in its" if len(caches) == 1 else "layers attend in their"
    return f"{own} of {len(caches)} {attend} own way: concatenated KV each step, slower"


def attention_paths(paths: AttentionPaths) -> Iterator[tuple[str, str]]:
    """What each way took, the fastest first."""
    for kind, times in paths.times.items():
        for size, ways in sorted(times.items()):
            name = f"attention, {_count(size.num_rows, 'row')} of {size.num_columns:,}"
            fastest_first = sorted(ways, key=lambda way: ways[way])
            took = ", ".join(f"{way} {ways[way]:.3f} ms" for way in fastest_first)
            yield name, f"{took} ({kind})"
    if any(paths.times.values()):
        yield "attention times", remembered_in(ATTENTION)


def recurrences(choices: Sequence[Choice]) -> Iterator[tuple[str, str]]:
    for choice in choices:
        yield f"{choice.kind.phase} recurrence", f"{choice} ({choice.kind.shapes})"
    if any(choice.times is not None for choice in choices):
        yield "recurrence times", remembered_in(RECURRENCES)


def remembered_in(subject: str) -> str:
    return f"in {times_file(subject)}; delete it to time again"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
