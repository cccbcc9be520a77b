"""One tier below memory, beside the tree in memory: what to write to it, and what to read from it.

Knows no threads and no steps. One thread calls, the one that owns the tree in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy.typing as npt

from pippin.cache.entries import Entry, EntryStore, Key
from pippin.cache.prefix_cache import Match, PrefixCache
from pippin.cache.tiers.diff import Diff, Run, is_worth_writing
from pippin.cache.tiers.tier_tree import (
    DISK,
    EntryPart,
    Format,
    Piece,
    TierKind,
    TierTree,
    num_bytes,
    piece_of,
    pieces,
)
from pippin.cache.tree.canary import Canary
from pippin.cache.tree.radix import Node, TokenArray, as_tokens
from pippin.types import GRID, Component, ModelSpec

MIN_LOADED_TOKENS = GRID  # fewer are not worth a wait
MAX_LOOKS = 8  # at shorter and shorter matches, while the store has evicted parts of each


@dataclass
class TierStats:
    """Counters since start."""

    spilled_entries: int = 0
    spilled_bytes: int = 0
    device_bytes: int = 0  # copied from the device to be spilled; the rest, from the tier above
    failed_spills: int = 0  # entries that the store did not keep
    loads: int = 0  # started
    loaded: int = 0  # finished, with every piece
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    late_loads: int = 0  # cancelled because computing would have been faster
    failed_loads: int = 0  # because of the store, a failed step or too few free bytes
    declined_loads: int = 0  # that would have taken longer than computing


@dataclass(frozen=True)
class TierMatch:
    """What the tier can add to what memory holds of a prompt."""

    match: Match = field(repr=False)  # in its tree
    memory_length: int  # of a match in memory now
    pieces: list[Piece] = field(repr=False)

    @property
    def num_tokens(self) -> int:
        """Tokens that a load saves from being computed."""
        return self.match.length - self.memory_length

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


class CacheTier:
    def __init__(
        self,
        memory: PrefixCache,
        store: EntryStore[Any],
        spec: ModelSpec,
        format: Format,
        *,
        canary: Canary,
        batch_bytes: int,
        kind: TierKind = DISK,
        level: int = 0,
        on_grid: bool = False,
        wants_state: Callable[[Node], bool] = is_worth_writing,
    ) -> None:
        """`batch_bytes`: of a write, and about of a piece that is read. `level`: how many faster
        tiers lie between it and memory. `on_grid`: prompts are restored up to whole blocks alone
        (deterministic). `wants_state`: whether that of a node is to be written."""
        self.kind = kind
        self.level = level
        self.memory = memory
        self._store = store
        self.below = TierTree(store.fingerprint, spec.components, spec.window, format, canary)
        self.format = format
        self.batch_bytes = batch_bytes
        self.stats = TierStats()
        self.rates = kind.rates()
        self._on_grid = on_grid
        self._wants_state = wants_state
        self.below.fill(store)

    # ---- down ------------------------------------------------------------------------------

    def missing(
        self, tokens: npt.ArrayLike, salt: bytes = b"", above: CacheTier | None = None
    ) -> list[Run]:
        """What is to be written next of a sequence, of what memory has, or the tier above; its
        payloads are borrowed until a change."""
        source, root, wants_state = self.memory, salt, self._wants_state
        if above is not None:
            source, root, wants_state = above.below.cache, above.below.root(salt), _any_state
        sizes = (self._num_bytes, self.batch_bytes)
        diff = Diff(self.memory.tree.rules, source, self.below.cache, *sizes, wants_state)
        return diff.find(as_tokens(tokens), root, self.below.root(salt))

    def pieces(self, runs: Sequence[Run]) -> list[Piece]:
        """Of runs that the tier below lacks; none if the store has not all of them any more."""
        found = [piece_of(run.component, run.start, run.end, run.payloads) for run in runs]
        return [] if self._lost(found) else found

    def entries(self, tokens: npt.ArrayLike, runs: Sequence[Run], salt: bytes = b"") -> list[Entry]:
        places = [(run.component, run.start, run.end) for run in runs]
        return self.below.entries(as_tokens(tokens), places, salt)

    def wrote(
        self,
        tokens: npt.ArrayLike,
        entries: Sequence[Entry],
        kept: Sequence[bool],
        salt: bytes = b"",
    ) -> None:
        """These can be found from now on, if they were kept.

        The store may have evicted some since, for what was written after them, and reported that
        before the tree had them. It does not report it again.
        """
        ids, root = as_tokens(tokens), self.below.root(salt)
        there = [
            entry
            for entry, was_kept in zip(entries, kept, strict=True)
            if was_kept and entry.key in self._store
        ]
        self.below.add_all(ids, there, root)
        self._note_copies(ids, [(e.key.component, e.start, e.end) for e in there], salt)
        for entry, was_kept in zip(entries, kept, strict=True):
            if was_kept:
                self.stats.spilled_entries += 1
                self.stats.spilled_bytes += entry.nbytes
            else:
                self.stats.failed_spills += 1

    def note_copy(
        self, ids: TokenArray, component: Component, start: int, salt: bytes = b""
    ) -> None:
        """Memory and this tier have a component of this path: memory evicts first what the next
        tier has."""
        self._note_copies(ids, [(component, start, len(ids))], salt)

    def _note_copies(
        self, ids: TokenArray, copies: Sequence[tuple[Component, int, int]], salt: bytes
    ) -> None:
        if not self.level and self.kind.max_bytes_written and copies:
            self.memory.mark_copied(ids, copies, salt)

    # ---- across ----------------------------------------------------------------------------

    def expect(self, tokens: npt.ArrayLike, num_held: int, salt: bytes = b"") -> list[Key]:
        """Attention KV of the first tokens is known to be elsewhere: what follows connects to it.

        The tree names an entry for it that no store has; nothing of it can be loaded.
        """
        if not num_held or not self.memory.tree.rules.has_attention:
            return []
        ids = as_tokens(tokens)[:num_held]
        entry = self.below.entry(ids, Component.ATTENTION, 0, salt)
        self.below.add(ids, entry, self.below.root(salt))
        return [entry.key]

    def arrived(self, tokens: npt.ArrayLike, entry: Entry, salt: bytes = b"") -> None:
        """Another engine has sent an entry of this sequence: it can be found from now on, if the
        store has not evicted it since."""
        if entry.key not in self._store:
            return
        self.below.add(as_tokens(tokens)[: entry.end], entry, self.below.root(salt))

    def keys_along(self, tokens: npt.ArrayLike, salt: bytes = b"") -> list[Key]:
        """Of the entries along a path, the deepest first: those above them are evicted later."""
        path, _ = self.below.cache.radix.walk(as_tokens(tokens), self.below.root(salt))
        found: dict[Key, None] = {}
        for node in reversed(path):
            for payload in reversed(node.payloads):
                if isinstance(payload, EntryPart):
                    found[payload.owner.key] = None
        return list(found)

    # ---- and up ----------------------------------------------------------------------------

    def find(self, tokens: npt.ArrayLike, salt: bytes = b"") -> TierMatch | None:
        """What can be loaded for a prompt, if enough; the caller decides whether it pays."""
        ids, root, below = as_tokens(tokens), self.below.root(salt), self.below.cache
        length = self.memory.probe_prompt(ids, salt)
        if below.probe_prompt(ids, root) < length + MIN_LOADED_TOKENS:
            return None
        match = below.match_prompt(ids, root)
        for _ in range(MAX_LOOKS):
            if self._on_grid and match.length % GRID:
                match = below.match(ids, root, limit=match.length - match.length % GRID)
            if match.length < length + MIN_LOADED_TOKENS:
                return None
            held = min(self.memory.num_cached(ids[: match.length], salt), match.length)
            found = TierMatch(match, length, pieces(match, held, self.batch_bytes))
            limit = self._sound_limit(found)
            if limit is None:
                return found
            match = below.match(ids, root, limit=limit)
        return None

    def _sound_limit(self, found: TierMatch) -> int | None:
        """How long a match may be that needs only what the store has; None: as it is.

        The tree may name lost entries for some steps: `TierTree.remove_lost` removes a few a step.
        """
        last = found.match.length - 1
        lost = self._lost(found.pieces)
        return min((e.start if e.key.num_tokens else last for e in lost), default=None)

    def remove_lost(self, limit: int | None = None) -> list[Key]:
        """Have the tree forget some of what the store reports as lost; returns keys that the store
        may forget. What was written again since is not lost."""
        reported = self._store.take_lost(limit)
        self.below.lose(key for key in reported if key not in self._store)
        return self.below.remove_lost()

    def _lost(self, needed: Iterable[Piece]) -> list[Entry]:
        """Entries of these pieces that the store does not have any more."""
        entries = [span.entry for piece in needed for span in piece.spans]
        lost = [e for e in entries if e.key not in self._store or self.below.is_lost(e.key)]
        self.below.lose(entry.key for entry in lost)
        return lost

    # ---- both ------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        self.memory.check_integrity()
        self.below.check_integrity()

    def counters(self) -> dict[str, object]:
        cache = self.below.cache
        return {
            "entries": self.below.num_entries,
            "nodes": cache.radix.num_nodes,
            "tokens": cache.radix.num_tokens,
            "nbytes": cache.nbytes,
            "component_bytes": {c.value: n for c, n in cache.tree.component_bytes.items()},
            "unreadable_entries": self.below.num_unreadable,
            "load_bytes_per_second": round(self.rates.bytes_per_second),
            **asdict(self.stats),
        }

    def _num_bytes(self, component: Component, num_tokens: int) -> int:
        return num_bytes(self.format(component, num_tokens))


def _any_state(node: Node) -> bool:
    """The tier above has those alone that were worth writing."""
    return True
