"""The heap of nodes, compared with a dictionary that is sorted each time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pippin.cache.tree.eviction import LAST, Rank, Unit, UnitHeap
from pippin.cache.tree.radix import Node

RANKS = st.tuples(st.sampled_from([-1.0, 0.5, 2.0]), st.integers(0, 5))
OPERATIONS = st.lists(st.tuples(st.integers(0, 7), st.none() | RANKS))


@given(operations=OPERATIONS)
def test_the_first_is_always_one_of_least_rank(operations: list[tuple[int, Rank | None]]) -> None:
    nodes = [Node(b"", 0, None, id) for id in range(8)]
    heap, expected = UnitHeap(Unit.LEAF, lambda node: None), dict[Node, Rank]()
    for number, rank in operations:
        node = nodes[number]
        heap.put(node, rank)
        if rank is None:
            expected.pop(node, None)
        else:
            expected[node] = rank
        assert len(heap) == len(expected)
        assert heap.least == min(expected.values(), default=LAST)
        if expected:
            assert expected[heap.first] == heap.least
        assert [heap.rank_of(node) for node in nodes] == [expected.get(node) for node in nodes]
    while expected:
        assert expected.pop(heap.first) == heap.least
        heap.update(heap.first)
    assert len(heap) == 0
