"""Puts the two ends of a hand-over together: the tier of a decode engine, the pushes of a prefill
engine. Knows no files but those of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from pippin.amounts import parse_bytes
from pippin.backends.base import Backend
from pippin.cache.peers.peer_store import PeerStore
from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tiers.cache_tier import CacheTier
from pippin.cache.tiers.kinds import PEER
from pippin.cache.tiers.tier_io import TierIO, plain_memory
from pippin.cache.tree.canary import Canary
from pippin.config import Config
from pippin.engine.peers.agreement import facts_fingerprint, peer_facts
from pippin.engine.peers.peer_address import read_keys
from pippin.engine.peers.peer_links import PeerLinks
from pippin.engine.peers.peer_listener import Deliver, PeerListener
from pippin.errors import ConfigError
from pippin.scheduler.loop import Loop
from pippin.scheduler.traffic.pushes import Pushes


@dataclass(frozen=True)
class PeerBuilder:
    config: Config
    backend: Backend
    cache: PrefixCache
    batch_bytes: int

    def tier(self, level: int) -> tuple[CacheTier, TierIO]:
        """Of a decode engine, which connects from now on. Raises ConfigError."""
        peers, backend = self.config.peers, self.backend
        keys = read_keys(peers)
        facts = peer_facts(self.config, backend)
        links = PeerLinks(
            peers.addresses,
            keys.client,
            keys.secret,
            facts,
            backend.payload_arrays,
            self.batch_bytes,
        )
        try:
            store = PeerStore(
                parse_bytes("peer_memory", peers.peer_memory),
                plain_memory,
                self.batch_bytes,
                facts_fingerprint(facts),
                links,
            )
        except ValueError as error:
            links.close()
            raise ConfigError(f"peer_memory: {error}") from error
        engine = self.config.engine
        tier = CacheTier(
            self.cache,
            store,
            backend.spec,
            backend.payload_arrays,
            canary=Canary("log" if engine.canary == "off" else engine.canary),
            batch_bytes=self.batch_bytes,
            kind=PEER,
            level=level,
            on_grid=engine.deterministic,
        )
        links.start(store)
        return tier, TierIO(store, allocate=backend.host_memory)

    def pushes(self) -> Pushes:
        """Of a prefill engine."""
        fingerprint = facts_fingerprint(peer_facts(self.config, self.backend))
        return Pushes(
            self.cache,
            self.backend,
            self.backend.payload_arrays,
            fingerprint=fingerprint,
            batch_bytes=self.batch_bytes,
        )


def listen(config: Config, loop: Loop, deliver: Deliver) -> PeerListener | None:
    """Accept decode engines from now on; None if this engine has no pushes."""
    pushes = loop.scheduler.pushes
    if pushes is None:
        return None
    (address,) = config.peers.listen_addresses
    keys = read_keys(config.peers)
    facts = peer_facts(config, loop.backend)
    tls = keys.server if address.is_tls else None
    spec = loop.backend.spec
    return PeerListener(address, tls, keys.secret, facts, spec, pushes, deliver)
