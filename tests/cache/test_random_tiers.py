"""Random operations on two and three tiers, compared with sets of prefixes.

A payload's bytes name the prefixes that it covers, so what is read back is what was written, of the
right tokens, or the test fails.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from naive_cache import SALTS, SPACE, A, CheckedCache, H, Piece, Prefix, S, W, salted, with_salt

from integrity import check_tier
from memory_store import MemoryStore
from pippin.cache.entries import ArraySpec, Bytes, Key
from pippin.cache.host_store import HostStore
from pippin.cache.tiers.cache_tier import DISK, HOST, CacheTier, TierKind
from pippin.cache.tiers.tier_io import Piece as DiskPiece
from pippin.cache.tiers.tier_io import PieceSource, TierIO, plain_memory
from pippin.cache.tree.canary import Canary
from pippin.types import Component, LayerSpec, ModelSpec
from simulator import Workers

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


def assert_marked(arrays: Sequence[Bytes], tokens: list[int], piece: DiskPiece) -> None:
    """They are of just these tokens."""
    divides = piece.component in (A, W)
    ends = range(piece.start + 1, piece.end + 1) if divides else [piece.end]
    prefixes = [tuple(tokens[:end]) for end in ends]
    for array, wanted in zip(arrays, marks(prefixes, piece.component), strict=True):
        assert array.tobytes() == wanted.tobytes()


Store = MemoryStore | HostStore


@dataclass
class LowerTier:
    """One tier below memory, and what it must have."""

    checked: CheckedCache
    store: Store
    rng: random.Random
    kind: TierKind
    level: int

    def __post_init__(self) -> None:
        self.components, self.window = self.checked.components, self.checked.window
        layers = tuple(
            LayerSpec(i, c, 1, self.window if c is W else None)
            for i, c in enumerate(self.components)
            if c is not H
        )
        self.tiers = CacheTier(
            self.checked.cache,
            self.store,
            ModelSpec("m", 9, 999, layers, hidden_bytes=H in self.components),
            format,
            canary=Canary("raise"),
            batch_bytes=self.rng.choice((2_000, 100_000)),
            kind=self.kind,
            level=self.level,
        )
        self.workers = Workers()
        self.tier_io = TierIO(self.store, writer=self.workers, reader=self.workers)
        self.tell_store()

    # --- what it must have, by brute force ---

    def held(self) -> dict[Component, set[Prefix]]:
        """Of what the tree names, not of what the store has: that may be more for a moment."""
        found: dict[Component, set[Prefix]] = {c: set() for c in self.components}
        numbers = {self.tiers.root(salt): number for number, salt in enumerate(SALTS)}
        for node in self.tiers.cache.radix.nodes():
            nodes = list(node.ancestors())[::-1]
            root = nodes[0].key[0] if isinstance(nodes[0].key, tuple) else b""
            plain = (token for above in nodes for token in above.token_ids.tolist())
            path = tuple(with_salt(plain, numbers[root]))
            for component, payload in zip((A, W, S, H), node.payloads, strict=True):
                if payload is None or payload.owner.key in self.tiers._lost:
                    continue
                first = node.start if component in (A, W) else node.end - 1
                found[component] |= {path[: i + 1] for i in range(first, node.end)}
        return found

    def expected(self, tokens: list[int]) -> int:
        """The longest prefix that every component can restore from here."""
        held = self.held()
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

    def copy(self, tokens: list[int], above: LowerTier) -> None:
        """What the tier above has, with its bytes."""
        ids, salt = salted(tokens)
        runs = self.tiers.missing(ids, salt, above.tiers)
        entries = self.tiers.entries(ids, runs, salt)
        pieces = above.tiers.pieces(runs)
        assert pieces or not runs or above.tiers._lost
        sources = [
            PieceSource(above.tier_io, piece, format(piece.component, piece.num_tokens))
            for piece in pieces
        ]
        for source, piece in zip(sources, pieces, strict=True):
            assert_marked(source.arrays(), tokens, piece)
            source.release()
        if pieces:
            writing = self.tier_io.write(entries, sources)
            self.workers.advance()
            self.tiers.wrote(ids, entries, writing.result(), salt)
        self.tell_store()

    def spill(self, tokens: list[int]) -> None:
        ids, salt = salted(tokens)
        runs = self.tiers.missing(ids, salt)
        windows = [at for run in runs if run.component is W for at in range(run.start, run.end)]
        assert len(windows) == len(set(windows)), "a window is written twice"
        entries = self.tiers.entries(ids, runs, salt)
        fails = self.rng.random() < 0.1
        kept: list[bool] = []
        for run, entry in zip(runs, entries, strict=True):
            prefixes: list[Prefix] = []
            for payload in run.payloads:
                assert isinstance(payload, Piece)
                prefixes += payload.prefixes
            wanted = all(kept) and not fails
            kept.append(wanted and self.store.write(entry, marks(prefixes, run.component)))
        self.tiers.wrote(ids, entries, kept, salt)
        self.tell_store()

    def load(self, tokens: list[int]) -> None:
        found = self.tiers.find(*salted(tokens))
        before = self.checked.cache.probe_prompt(*salted(tokens))
        expected = self.expected(tokens)
        waits = bool(self.tiers._lost)  # to be removed: then less may be offered
        if found is None:
            assert waits or expected < before + KEPT
            return
        assert found.match.length == expected or (waits and found.match.length < expected)
        assert found.memory_length == before
        for piece in found.pieces:
            self.read(tokens, piece)
        assert self.checked.cache.probe_prompt(*salted(tokens)) == found.match.length

    def read(self, tokens: list[int], piece: DiskPiece) -> None:
        specs = format(piece.component, piece.num_tokens)
        buffer = self.tier_io.claim_buffer(piece, specs)
        reading = self.tier_io.read(piece, specs, buffer)
        self.workers.advance()
        arrays = reading.result().arrays
        assert_marked(arrays, tokens, piece)
        self.tier_io.release(buffer, reading)
        path, ledger, cache = tokens[: piece.end], self.checked.ledger, self.checked.cache
        ids, salt = salted(path)
        if piece.component is S:
            states = {piece.end: ledger.state(path, piece.end)}
            cache.insert(ids, piece.end, {}, states, salt=salt)
        elif piece.component is H:
            cache.insert(ids, piece.end, {}, {}, ledger.hidden(path), salt=salt)
        else:
            kv = {piece.component: ledger.kv(piece.component, path, piece.start)}
            cache.insert(ids, piece.start, kv, {}, salt=salt)

    def lose(self) -> None:
        """The store gives an entry up, or it is found to be damaged."""
        keys = [entry.key for entry in self.store.entries()]
        if keys:
            lost = [self.rng.choice(keys)]
            self.store.forget(lost)
            self.tiers.lose(lost, unreadable=self.rng.random() < 0.5)
            self.tell_store()

    def tell_store(self) -> None:
        self.store.forget(self.tiers.remove_lost())

    def check(self) -> None:
        check_tier(self.tiers)
        kept: set[Key] = {entry.key for entry in self.store.entries()}
        named = set(self.tiers._owned) - set(self.tiers._lost)
        assert named <= kept, "the tree names what the store does not have"


@dataclass
class Tiered:
    """A cache in memory, and tiers below it: `host_bytes` of the host's, and a disk."""

    components: tuple[Component, ...]
    rng: random.Random
    host_bytes: int = 0
    disk: MemoryStore = field(default_factory=lambda: MemoryStore(b"m", 1 << 30))

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """What is on disk is found again; what was in memory, here or there, is not."""
        window = WINDOW if W in self.components else 0
        self.checked = CheckedCache(self.components, window=window)
        stores: list[tuple[Store, TierKind]] = [(self.disk, DISK)]
        if self.host_bytes:
            stores.insert(0, (HostStore(self.host_bytes, plain_memory, 8_000), HOST))
        self.tiers = [
            LowerTier(self.checked, store, self.rng, kind, level)
            for level, (store, kind) in enumerate(stores)
        ]

    def insert(self, tokens: list[int]) -> None:
        start = min(self.checked.cache.num_cached(*salted(tokens)), len(tokens))
        start = self.rng.randrange(start + 1)
        states = {len(tokens), self.rng.randrange(1, len(tokens) + 1)}
        self.checked.insert(tokens, start, states, hidden=self.rng.random() < 0.5)

    def spill(self, tokens: list[int]) -> None:
        """As an engine does: what the host has is copied from there, the rest from the device."""
        for tier, above in zip(self.tiers, [None, *self.tiers], strict=False):
            if above is not None:
                tier.copy(tokens, above)
            tier.spill(tokens)

    def load(self, tokens: list[int]) -> None:
        """As requests do: what the fastest has, then what the next has beyond that."""
        for tier in self.tiers:
            tier.load(tokens)

    def check(self) -> None:
        self.checked.check()
        for tier in self.tiers:
            tier.check()


@pytest.mark.parametrize(
    "components",
    [*(pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS[:-1]), LAYOUTS[-1]],
    ids=lambda c: "-".join(x.value for x in c),
)
@pytest.mark.parametrize("host_bytes", [0, 40_000], ids=["two", "three"])
def test_tiers_agree_with_sets_of_prefixes(
    components: tuple[Component, ...], host_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the first seed what a store evicted leaves the tree at once, with the other slowly."""
    for seed in range(2):
        monkeypatch.setattr("pippin.cache.tiers.cache_tier.MAX_REMOVALS", (1 << 20, 1)[seed])
        rng = random.Random(seed)
        tiered = Tiered(components, rng, host_bytes)
        known: list[list[int]] = []
        for _ in range(30):
            base = (
                rng.choice(known)[: rng.randrange(1, 260)] if known and rng.random() < 0.7 else []
            )
            tokens = base + [rng.randrange(4) for _ in range(rng.randrange(1, 140))]
            number = rng.choice((0, 0, 1, 2))  # the same under another salt, now and then
            tokens = with_salt((token % SPACE for token in tokens), number)
            known.append(tokens)
            match rng.randrange(8):
                case 0 | 1 | 2:
                    tiered.insert(tokens)
                    tiered.spill(tokens)
                case 3:
                    rng.choice(tiered.tiers).spill(rng.choice(known))
                    if host_bytes:
                        tiered.tiers[1].copy(rng.choice(known), tiered.tiers[0])
                case 4:
                    tiered.load(rng.choice(known))
                case 5:
                    tiered.checked.evict(rng.randrange(2_000))
                case 6:
                    rng.choice(tiered.tiers).lose()
                case 7 if rng.random() < 0.3:
                    tiered.restart()
            tiered.check()
            tiered.load(rng.choice(known))
            tiered.check()
        for tier in tiered.tiers:
            while tier.tiers._lost:
                tier.tell_store()
        tiered.check()


def test_parts_of_an_entry_are_read_into_one_buffer() -> None:
    """A sequence that leaves another one inside of its entry."""
    two = Tiered((A,), random.Random(0))
    long = list(range(100))
    fork = [*range(60), *range(200, 240)]
    for tokens in (long, fork):
        two.checked.insert(tokens, two.checked.cache.num_cached(np.array(tokens)))
        two.spill(tokens)
    two.checked.flush()
    two.checked.insert(long[:30], 0)
    two.load([*fork, 1])
    assert two.checked.cache.probe(np.array(fork)) == 100


def test_another_salt_finds_nothing_on_disk_also_after_a_restart() -> None:
    two = Tiered((A, S), random.Random(0))
    tokens = list(range(100))
    two.checked.insert(with_salt(tokens, 1), 0, [100])
    two.spill(with_salt(tokens, 1))
    for _ in range(2):
        (disk,) = two.tiers
        two.checked.flush()
        assert disk.tiers.find(*salted(with_salt([*tokens, 1], 2))) is None
        assert disk.tiers.find(*salted([*tokens, 1])) is None
        found = disk.tiers.find(*salted(with_salt([*tokens, 1], 1)))
        assert found is not None
        assert found.match.length == 100
        two.restart()
    assert not any(salt in entry.parent for entry in two.disk.entries() for salt in SALTS[1:])


def test_what_is_lost_while_somebody_reads_it_is_offered_to_nobody_else() -> None:
    two = Tiered((A,), random.Random(0))
    tokens = list(range(100))
    two.checked.insert(tokens, 0)
    two.spill(tokens)
    two.checked.flush()
    (disk,) = two.tiers
    found = disk.tiers.find(np.array(tokens))
    assert found is not None
    lock = disk.tiers.cache.lock(found.match)
    disk.tiers.lose([entry.key for entry in disk.store.entries()])
    disk.tell_store()
    assert len(disk.tiers._owned) == 1
    assert disk.tiers.find(np.array(tokens)) is None
    disk.tiers.cache.unlock(lock)
    disk.tell_store()
    assert not disk.store.entries()
    two.check()


@pytest.mark.parametrize("loads", [True, False])
def test_what_is_written_again_after_it_was_lost_stays(loads: bool) -> None:
    """While a load has it locked, or before the store's report reached the tree."""
    two = Tiered((A,), random.Random(0))
    tokens = list(range(100))
    two.checked.insert(tokens, 0)
    two.spill(tokens)
    two.spill([*tokens[:50], 7])  # splits the node
    (disk,) = two.tiers
    ids = np.array(tokens)
    below, (entry,) = disk.tiers, disk.store.entries()
    arrays = entry.new_buffers()
    assert disk.store.read([entry.key], [arrays]) == [True]
    lock = below.cache.lock_tokens(ids[:60])
    disk.store._drop(disk.store._places[entry.key])
    disk.store._lost.append(entry.key)
    if loads:
        disk.tell_store()  # tokens [60, 100) are removed, the others locked
        assert below.is_lost(entry.key)
    disk.store.write(entry, arrays)
    disk.tiers.wrote(ids, [entry], [True])
    below.cache.unlock(lock)
    disk.tell_store()
    assert disk.store.entries()
    assert below.cache.num_cached(ids) == 100
    two.check()


def test_what_was_flushed_and_arrives_again_is_found() -> None:
    """Also when what the tree had of it before is freed."""
    two = Tiered((A,), random.Random(0))
    tokens = list(range(100))
    two.checked.insert(tokens, 0)
    two.spill(tokens)
    two.spill([*tokens[:50], 7])  # splits the node
    (disk,) = two.tiers
    below, (entry,), ids = disk.tiers, disk.store.entries(), np.array(tokens)
    below.cache.flush()
    check_tier(below)
    assert below.cache.num_cached(ids) == 0
    disk.tiers.arrived(ids, entry)
    for _ in range(2):
        check_tier(below)
        assert below.cache.num_cached(ids) == 100
        disk.tell_store()
        assert entry.key in disk.store
        below.cache.free_flushed(1 << 40)
    below.cache.flush()
    below.cache.free_flushed(1 << 40)
    disk.tell_store()
    assert entry.key not in disk.store
    two.check()


def test_what_was_evicted_before_the_tree_knew_of_it_is_not_named() -> None:
    """A batch that evicts its own first entries; the store's report comes before its end."""
    two = Tiered((A, S), random.Random(0), disk=MemoryStore(b"m", 1_605))
    tokens = list(range(100))
    two.checked.insert(tokens, 0, {100})
    (disk,) = two.tiers
    runs = disk.tiers.missing(np.array(tokens))
    entries = disk.tiers.entries(np.array(tokens), runs)
    kept = [
        disk.store.write(entry, [np.zeros(s.nbytes, "u1") for s in entry.arrays])
        for entry in entries
    ]
    assert all(kept)
    assert [entry.key in disk.store for entry in entries] == [False, True]
    disk.tell_store()
    disk.tiers.wrote(np.array(tokens), entries, kept)
    disk.tell_store()
    disk.check()
    assert len(disk.tiers._owned) == 0, "a state that nothing connects to"


def test_a_prefix_whose_end_was_evicted_is_offered_as_far_as_the_store_has_it() -> None:
    """Before the tree knows of it, and however much there is to remove."""
    for component, expected in ((A, 130), (S, 130), (W, 130), (H, 299)):
        two = Tiered((A, W, S, H), random.Random(0))
        tokens = [t % 7 for t in range(300)]
        for end, start in ((130, 0), (299, 130), (300, 299)):
            two.checked.insert(tokens[:end], start, {end}, hidden=end == 300)
            two.spill(tokens[:end])
        two.checked.flush()
        (disk,) = two.tiers
        assert disk.tiers.find(np.array(tokens)).match.length == 300
        last = 300 if component is H else 299
        lost = [
            e.key for e in disk.store.entries() if e.key.component is component and e.end >= last
        ]
        assert lost
        disk.store.forget(lost)
        found = disk.tiers.find(np.array(tokens))
        assert found is not None
        assert found.match.length == expected
        assert not set(lost) & {key for piece in found.pieces for key in piece.keys}
        disk.tell_store()
        assert not set(lost) & set(disk.tiers._owned)
        disk.check()
