"""Random operations on two tiers, compared with sets of prefixes.

A payload's bytes name the prefixes that it covers, so what is read back is what was written, of the
right tokens, or the test fails.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from naive_cache import A, CheckedCache, H, Piece, Prefix, S, W

from pippin.cache.canary import Canary
from pippin.cache.disk.entries import ArraySpec, Bytes, Key
from pippin.cache.disk.memory import MemoryStore
from pippin.cache.tiers.courier import plain_memory
from pippin.cache.tiers.pieces import Piece as DiskPiece
from pippin.cache.tiers.pieces import num_bytes, read
from pippin.cache.tiers.tiers import Tiers
from pippin.types import Component, LayerSpec, ModelSpec

LAYOUTS = [(A,), (A, S), (A, W), (A, W, S), (S,), (W, S), (A, S, H), (A, H), (A, W, S, H)]
WINDOW = 5
KEPT = 64  # tokens: `find` offers no less


def format(component: Component, num_tokens: int) -> tuple[ArraySpec, ...]:
    if component in (A, W):
        return (
            ArraySpec("a", "int64", (num_tokens,), token_axis=0),
            ArraySpec("b", "int32", (num_tokens, 2), token_axis=0),
        )
    return (ArraySpec("a", "int64", (1,)),)


def marks(prefixes: list[Prefix], component: Component) -> list[Bytes]:
    names = np.array([hash((component.value, prefix)) for prefix in prefixes], dtype="<i8")
    if component in (A, W):
        return [names.view(np.uint8), names.view(np.uint8).copy()]
    return [names.view(np.uint8)]


@dataclass
class TwoTiers:
    components: tuple[Component, ...]
    rng: random.Random
    store: MemoryStore = field(default_factory=lambda: MemoryStore(b"m", 1 << 30))

    def __post_init__(self) -> None:
        self.window = WINDOW if W in self.components else 0
        self.restart()

    def restart(self) -> None:
        self.checked = CheckedCache(self.components, window=self.window)
        layers = tuple(
            LayerSpec(i, c, 1, self.window if c is W else None)
            for i, c in enumerate(self.components)
            if c is not H
        )
        spec = ModelSpec("m", 9, 999, layers, hidden_bytes=H in self.components)
        self.tiers = Tiers(
            self.checked.cache,
            self.store,
            spec,
            format,
            canary=Canary("raise"),
            batch_bytes=self.rng.choice((2_000, 100_000)),
        )
        self.tell_store()

    # --- what the disk must have, by brute force ---

    def on_disk(self) -> dict[Component, set[Prefix]]:
        """Of what the tree names, not of what the store has: that may be more for a moment."""
        found: dict[Component, set[Prefix]] = {c: set() for c in self.components}
        for node in self.tiers.disk.cache.nodes():
            path = tuple(t for n in reversed(list(node.ancestors())) for t in n.token_ids.tolist())
            for component, payload in zip((A, W, S, H), node.payloads, strict=True):
                if payload is None:
                    continue
                first = node.start if component in (A, W) else node.end - 1
                found[component] |= {path[: i + 1] for i in range(first, node.end)}
        return found

    def expected(self, tokens: list[int]) -> int:
        """The longest prefix that every component can restore from disk."""
        held = self.on_disk()
        whole = H not in self.components or tuple(tokens) in held[H]
        for length in range(len(tokens) - (not whole or H not in self.components), 0, -1):
            prefixes = [tuple(tokens[: i + 1]) for i in range(length)]
            if A in held and not set(prefixes) <= held[A]:
                continue
            if W in held and not set(prefixes[max(0, length - self.window) :]) <= held[W]:
                continue
            if S not in held or prefixes[-1] in held[S]:
                return length
        return 0

    # --- operations ---

    def insert(self, tokens: list[int]) -> None:
        start = min(self.checked.cache.num_held(np.array(tokens)), len(tokens))
        start = self.rng.randrange(start + 1)
        states = {len(tokens), self.rng.randrange(1, len(tokens) + 1)}
        self.checked.insert(tokens, start, states, hidden=self.rng.random() < 0.5)

    def spill(self, tokens: list[int]) -> None:
        runs = self.tiers.missing(np.array(tokens))
        entries = self.tiers.entries(np.array(tokens), runs)
        self.store.fails = self.rng.random() < 0.1
        kept: list[bool] = []
        for run, entry in zip(runs, entries, strict=True):
            prefixes: list[Prefix] = []
            for payload in run.payloads:
                assert isinstance(payload, Piece)
                prefixes += payload.prefixes
            kept.append(all(kept) and self.store.write(entry, marks(prefixes, run.component)))
        self.tiers.wrote(np.array(tokens), entries, kept)
        self.store.fails = False

    def load(self, tokens: list[int]) -> None:
        found = self.tiers.find(np.array(tokens))
        before = self.checked.cache.probe_prompt(np.array(tokens))
        expected = self.expected(tokens)
        if found is None:
            assert expected < before + KEPT
            return
        assert found.match.length == expected
        assert found.memory_length == before
        for piece in found.pieces:
            self.read(tokens, piece)
        assert self.checked.cache.probe_prompt(np.array(tokens)) == expected

    def read(self, tokens: list[int], piece: DiskPiece) -> None:
        specs = format(piece.component, piece.num_tokens)
        arrays = read(self.store, piece, specs, plain_memory(num_bytes(specs)))
        assert isinstance(arrays, tuple)
        divides = piece.component in (A, W)
        ends = range(piece.start + 1, piece.end + 1) if divides else [piece.end]
        prefixes = [tuple(tokens[:end]) for end in ends]
        for array, wanted in zip(arrays, marks(prefixes, piece.component), strict=True):
            assert array.tobytes() == wanted.tobytes()
        path, ledger, cache = tokens[: piece.end], self.checked.ledger, self.checked.cache
        if piece.component is S:
            cache.insert(np.array(path), piece.end, {}, {piece.end: ledger.state(path, piece.end)})
        elif piece.component is H:
            cache.insert(np.array(path), piece.end, {}, {}, ledger.hidden(path))
        else:
            kv = {piece.component: ledger.kv(piece.component, path, piece.start)}
            cache.insert(np.array(path), piece.start, kv, {})

    def lose(self) -> None:
        """The store gives an entry up, or it is found to be damaged."""
        keys = [entry.key for entry in self.store.entries()]
        if keys:
            lost = [self.rng.choice(keys)]
            self.store.forget(lost)
            self.tiers.disk.lose(lost, unreadable=self.rng.random() < 0.5)
            self.tell_store()

    def tell_store(self) -> None:
        self.store.forget(self.tiers.disk.settle())

    def check(self) -> None:
        self.checked.check()
        self.tiers.check_integrity()
        kept: set[Key] = {entry.key for entry in self.store.entries()}
        assert set(self.tiers.disk._owned) <= kept, "the tree names what the store does not have"


@pytest.mark.parametrize(
    "components",
    [*(pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS[:-1]), LAYOUTS[-1]],
    ids=lambda c: "-".join(x.value for x in c),
)
def test_two_tiers_agree_with_sets_of_prefixes(components: tuple[Component, ...]) -> None:
    for seed in range(2):
        rng = random.Random(seed)
        two = TwoTiers(components, rng)
        known: list[list[int]] = []
        for _ in range(30):
            base = (
                rng.choice(known)[: rng.randrange(1, 260)] if known and rng.random() < 0.7 else []
            )
            tokens = base + [rng.randrange(4) for _ in range(rng.randrange(1, 140))]
            known.append(tokens)
            match rng.randrange(8):
                case 0 | 1 | 2:
                    two.insert(tokens)
                    two.spill(tokens)
                case 3:
                    two.spill(rng.choice(known))
                case 4:
                    two.load(rng.choice(known))
                case 5:
                    two.checked.evict(rng.randrange(2_000))
                case 6:
                    two.lose()
                case 7 if rng.random() < 0.3:
                    two.restart()
            two.check()
            two.load(rng.choice(known))
            two.check()


def test_parts_of_an_entry_are_read_into_one_buffer() -> None:
    """A sequence that leaves another one inside of its entry."""
    two = TwoTiers((A,), random.Random(0))
    long = list(range(100))
    fork = [*range(60), *range(200, 240)]
    for tokens in (long, fork):
        two.checked.insert(tokens, two.checked.cache.num_held(np.array(tokens)))
        two.spill(tokens)
    two.checked.flush()
    two.checked.insert(long[:30], 0)
    two.load([*fork, 1])
    assert two.checked.cache.probe(np.array(fork)) == 100


def test_what_is_lost_while_somebody_reads_it_is_offered_to_nobody_else() -> None:
    two = TwoTiers((A,), random.Random(0))
    tokens = list(range(100))
    two.checked.insert(tokens, 0)
    two.spill(tokens)
    two.checked.flush()
    found = two.tiers.find(np.array(tokens))
    assert found is not None
    lock = two.tiers.disk.cache.lock(found.match)
    two.tiers.disk.lose([entry.key for entry in two.store.entries()])
    two.tell_store()
    assert two.tiers.disk.num_entries == 1
    assert two.tiers.find(np.array(tokens)) is None
    two.tiers.disk.cache.unlock(lock)
    two.tell_store()
    assert not two.store.entries()
    two.check()
