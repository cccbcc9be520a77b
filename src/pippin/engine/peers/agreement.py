"""What a prefill engine and a decode engine must have in common. Knows no sockets.

Facts are compared by name before anything else is sent. With a secret, each end proves that it
knows it: an HMAC over both ends' nonces and its own facts.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path

from pippin.backends.base import Backend
from pippin.cache.disk.fingerprint import model_fingerprint
from pippin.config import Config
from pippin.types import Component
from pippin.version import __version__

Facts = Mapping[str, str]
HASHES, HASH_CHARS = ("weights", "layout"), 12
REMEDY = "start both with the same options"
REMEDIES = {
    "version": "install the same version of Pippin for both",
    "weights": "serve the same checkpoint with both",
    "dtype": "give both the same --dtype",
    "layout": "serve the same checkpoint with both, in the same --dtype",
    "deterministic": "give --deterministic to both on one kind of device, or to none",
}


def peer_facts(config: Config, backend: Backend) -> dict[str, str]:
    """In the order in which they are compared.

    Backends may differ: payloads have one layout on all of them. Where results have to be
    identical in every bit, they may not.
    """
    kept = [component for component in Component if component in backend.spec.components]
    arrays = [array for component in kept for array in backend.payload_arrays(component, 1)]
    is_fake = config.model.backend == "fake"
    facts = {
        "version": __version__,
        "weights": "none" if is_fake else model_fingerprint(Path(config.model.model), {}).hex(),
        "dtype": " ".join(sorted({array.dtype for array in arrays})),
        "layout": hashlib.blake2b(repr((kept, arrays)).encode(), digest_size=16).hexdigest(),
        "deterministic": "no",
    }
    if config.engine.deterministic:
        facts["deterministic"] = f"{backend.arithmetic} on {backend.device.kind}"
    return facts


def facts_fingerprint(facts: Facts) -> bytes:
    """By which both ends name entries."""
    return hashlib.blake2b(_encoded(facts), digest_size=32, person=b"pippin peers").digest()


def difference(prefill: Facts, decode: Facts) -> str | None:
    """The first fact that differs, in words that both ends may read; None if all agree."""
    for name in dict.fromkeys((*prefill, *decode)):
        sent, wanted = prefill.get(name, "unknown"), decode.get(name, "unknown")
        if sent != wanted:
            length = HASH_CHARS if name in HASHES else 80
            return (
                f"{name} differs: {sent[:length]} in the prefill engine, {wanted[:length]} in the "
                f"decode engine; {REMEDIES.get(name, REMEDY)}"
            )
    return None


def prove(secret: bytes, role: str, nonces: tuple[bytes, bytes], facts: Facts) -> bytes:
    """That the end in this role knows the secret. `nonces`: the decode engine's first."""
    text = b"\n".join((role.encode(), *nonces, _encoded(facts)))
    return hmac.new(secret, text, hashlib.sha256).digest()


def is_proof(
    proof: bytes, secret: bytes, role: str, nonces: tuple[bytes, bytes], facts: Facts
) -> bool:
    return hmac.compare_digest(proof, prove(secret, role, nonces, facts))


def _encoded(facts: Facts) -> bytes:
    return repr(sorted(facts.items())).encode()
