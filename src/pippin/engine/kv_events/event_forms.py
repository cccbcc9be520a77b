"""Batches of KV events as bytes, in the two forms that routers read. Knows no tree and no sockets.

vllm     maps by the field names of vLLM's kv_events.py, with groups
sglang   arrays in the order of SGLang's kv_events.py, which have no groups: the group KV alone
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from pippin.cache.tree.components import Rules
from pippin.engine.kv_events.block_hashes import BLOCK_TOKENS
from pippin.engine.kv_events.block_index import ENDS, KV, Removed, Stored

FormName = Literal["vllm", "sglang"]
Tier = Literal["memory", "host", "disk"]

MEDIA: dict[FormName, dict[Tier, str]] = {
    "vllm": {"memory": "GPU", "host": "CPU", "disk": "STORAGE"},
    "sglang": {"memory": "GPU", "host": "CPU_PINNED", "disk": "DISK"},
}


@dataclass(frozen=True)
class EventForm:
    name: FormName
    rules: Rules
    rank: int = 0  # of data parallelism: the number of this replica

    def batch(self, seconds: float, events: list[Any]) -> bytes:
        return msgspec.msgpack.encode([seconds, events, self.rank])

    @property
    def cleared(self) -> Any:
        return {"type": "AllBlocksCleared"} if self.name == "vllm" else ["AllBlocksCleared"]

    def events(self, tier: Tier, changes: Iterable[Stored | Removed]) -> list[Any]:
        medium = MEDIA[self.name][tier]
        if self.name == "sglang":
            return [_as_array(change, medium) for change in changes if change.group == KV]
        return [self._as_map(change, medium) for change in changes]

    def _as_map(self, change: Stored | Removed, medium: str) -> dict[str, Any]:
        has_groups = self.rules.has_state or self.rules.has_window
        group = {"group_idx": change.group} if has_groups else {}
        if isinstance(change, Removed):
            return {
                "type": "BlockRemoved",
                "block_hashes": change.hashes,
                "medium": medium,
                **group,
            }
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": change.hashes,
            "parent_block_hash": change.parent,
            "token_ids": _ids(change.tokens),
            "block_size": BLOCK_TOKENS,
            "lora_id": None,
            "medium": medium,
            "lora_name": None,
            **group,
        }
        if change.salt and change.parent is None:  # the blocks behind it are named by its hash
            event["extra_keys"] = [[change.salt.hex()], *[None] * (len(change.hashes) - 1)]
        if has_groups:
            event |= self._kind(change.group)
        return event

    def _kind(self, group: int) -> dict[str, Any]:
        if group != ENDS:
            return {"kv_cache_spec_kind": "full_attention"}
        if self.rules.has_state:
            return {"kv_cache_spec_kind": "mamba"}
        return {
            "kv_cache_spec_kind": "sliding_window",
            "kv_cache_spec_sliding_window": self.rules.window,
        }


def _as_array(change: Stored | Removed, medium: str) -> list[Any]:
    if isinstance(change, Removed):
        return ["BlockRemoved", change.hashes, medium]
    salt = [{"cache_salt": change.salt.hex()}] if change.salt else []
    tokens = _ids(change.tokens)
    stored = [change.hashes, change.parent, tokens, BLOCK_TOKENS, None, medium]
    return ["BlockStored", *stored, *salt]


def _ids(tokens: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(tokens, dtype=np.int32).tolist()
    return ids
