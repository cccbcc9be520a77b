"""Which chunks of a plan share a forward: those that are padded little, tokens and prefixes."""

from __future__ import annotations

import numpy as np
import pytest

from pippin.backends.base import Admit, PrefillRow
from pippin.backends.chunking import group_chunks
from pippin.backends.mlx.prefill.prompts import PREFIX_COPIES
from pippin.types import SamplingParams
from serving import make_backend

Shape = tuple[int, int]  # where a chunk starts, and its tokens


def chunk(shape: Shape, slot: int = 1) -> PrefillRow:
    return PrefillRow(slot, shape[0], np.zeros(shape[1], np.int32))


def groups(shapes: list[Shape], *, cpu: bool, pads: bool = True, most: int = 1 << 40) -> set[str]:
    found = group_chunks(
        [chunk(shape) for shape in shapes],
        lambda _: False,
        fits=lambda rows, prefix: rows * prefix <= most,
        pads=pads,
        cpu=cpu,
    )
    assert sorted((c.start, len(c.tokens)) for own in found for c in own) == sorted(shapes)
    return {" ".join(f"{c.start}+{len(c.tokens)}" for c in own) for own in found}


@pytest.mark.parametrize(
    ("shapes", "cpu", "expected"),
    [
        # A long prefix beside fresh rows would be padded to by each of them.
        ([(33_000, 512), (0, 512), (0, 512), (0, 512)], False, {"33000+512", "0+512 0+512 0+512"}),
        # A conversation's turns share a forward, as far as their prefixes go.
        ([(33_000, 64), (32_000, 64)], False, {"33000+64 32000+64"}),
        ([(4_000, 64), (1_000, 64)], False, {"4000+64 1000+64"}),
        ([(4_000, 64), (1_000, 64)], True, {"4000+64", "1000+64"}),
        ([(128, 30), (0, 30), (64, 28)], True, {"128+30 0+30 64+28"}),
        # Tokens cost more than columns.
        ([(0, 512), (0, 8)], True, {"0+512", "0+8"}),
        ([(0, 512), (0, 300)], False, {"0+512 0+300"}),
    ],
)
def test_chunks_share_a_forward_where_padding_is_cheaper(
    shapes: list[Shape], cpu: bool, expected: set[str]
) -> None:
    assert groups(shapes, cpu=cpu) == expected


def test_a_model_that_takes_padding_for_tokens_gets_equal_chunks_of_any_prefix() -> None:
    found = groups([(2_000, 5), (0, 3), (1_900, 3), (0, 5)], cpu=False, pads=False)
    assert found == {"2000+5 0+5", "1900+3 0+3"}


def test_prefixes_of_a_group_are_no_longer_than_memory_allows() -> None:
    shapes = [(30_000, 64)] * 5
    assert groups(shapes, cpu=False) == {" ".join(["30000+64"] * 5)}
    found = groups(shapes, cpu=False, most=65_536)
    assert found == {"30000+64 30000+64", "30000+64"}


def test_groups_take_no_more_than_half_of_what_activations_may() -> None:
    backend = make_backend("qwen3", num_slots=3)
    prompts, layout = backend._prompts, backend.loaded.layout
    chunks = [chunk((1_000, 8), slot) for slot in (1, 2, 3)]
    params = SamplingParams()
    backend._admitted |= {c.slot: Admit(c.slot, params, (), c.tokens, 0) for c in chunks}
    assert len(prompts.groups(chunks)) == 1
    of_a_column = max(cache.nbytes for cache in layout.kv_caches)
    prompts.fit(2 * PREFIX_COPIES * 2_500 * of_a_column)
    assert [len(group) for group in prompts.groups(chunks)] == [2, 1]
