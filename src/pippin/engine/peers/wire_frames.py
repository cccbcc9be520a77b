"""The messages between a prefill engine and a decode engine, their limits, and the keys.

    decode engine    Hello ▶             Proof ▶                     Ask ▶  Cancel ▶
    prefill engine           ◀ Hello             ◀ Proof | Refusal          ◀ Entry ... ◀ End

    on one machine   ◀ Memory    Mapped ▶    ◀ Entry, its payload in that memory    Taken ▶

A frame is its length (4 bytes) and a message (msgpack); an `EntryFrame` is followed by its payload
unless that is in shared memory. The length is checked before anything is read, and every field has
a limit.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from pippin.config import PeersConfig
from pippin.errors import ConfigError

PROTOCOL = 1
LENGTH_BYTES = 4
NONCE_BYTES = 32
MAX_HANDSHAKE_BYTES = 8 << 10
MAX_ENTRY_FRAME_BYTES = 4 << 10  # and of an End
ASK_FRAME_BYTES = 64 << 10  # of an Ask, beside its tokens

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Text = Annotated[str, msgspec.Meta(max_length=500)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
Digest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
HashKey = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Hello(msgspec.Struct, tag="hello", frozen=True):
    protocol: Count
    nonce: HashKey


class Proof(msgspec.Struct, tag="proof", frozen=True):
    proof: HashKey
    facts: Annotated[dict[Name, Text], msgspec.Meta(max_length=16)]
    max_entry_bytes: Count  # that this end accepts


class Refusal(msgspec.Struct, tag="refusal", frozen=True):
    reason: Text


class Ask(msgspec.Struct, tag="ask", frozen=True):
    """Compute this prompt, and send all of it but the KV of the first `held` tokens."""

    id: Name
    tokens: bytes  # int32, little-endian
    salt: Annotated[bytes, msgspec.Meta(max_length=64)]
    held: Count
    boundaries: Annotated[list[Count], msgspec.Meta(max_length=4096)]
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    id: Name


class Memory(msgspec.Struct, tag="memory", frozen=True):
    """Payloads can pass through it; see `shared_memory.py`."""

    name: Name
    nbytes: Count
    token: HashKey


class Mapped(msgspec.Struct, tag="mapped", frozen=True):
    """The answer to a Memory."""

    is_mapped: bool


class Taken(msgspec.Struct, tag="taken", frozen=True):
    """All before this position in the memory."""

    end: Count


class EntryFrame(msgspec.Struct, tag="entry", frozen=True):
    """A payload of `nbytes` follows, or is in the memory."""

    id: Name
    component: Name
    start: Count
    end: Count
    chain: HashKey
    nbytes: Count
    digest: Digest
    at: Count | None = None  # position in the memory


class End(msgspec.Struct, tag="end", frozen=True):
    id: Name
    reason: Text


Opening = Hello | Proof | Refusal
ToPrefill = Ask | Cancel | Mapped | Taken
ToDecode = EntryFrame | End | Memory
Frame = Opening | ToPrefill | ToDecode
OPENINGS: msgspec.msgpack.Decoder[Opening] = msgspec.msgpack.Decoder(Opening)
TO_PREFILL: msgspec.msgpack.Decoder[ToPrefill] = msgspec.msgpack.Decoder(ToPrefill)
TO_DECODE: msgspec.msgpack.Decoder[ToDecode] = msgspec.msgpack.Decoder(ToDecode)


def limited(text: str) -> str:
    """A text as a frame may hold it."""
    return text[:500]


LEAST_SECRET_BYTES = 16


@dataclass(frozen=True)
class PeerKeys:
    """What both ends need to trust each other."""

    secret: bytes  # b"": none
    server: ssl.SSLContext | None  # None: there is no certificate
    client: ssl.SSLContext


def read_keys(config: PeersConfig) -> PeerKeys:
    """Raises ConfigError for files that cannot be used."""
    secret = b"" if config.peer_secret_file is None else _read_secret(config.peer_secret_file)
    server = None
    if config.peer_cert is not None:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            server.load_cert_chain(config.peer_cert, config.peer_key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"peer_cert {config.peer_cert} cannot be used with peer_key {config.peer_key}: "
                f"{error}"
            ) from error
    try:
        client = ssl.create_default_context(cafile=config.peer_ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"peer_ca {config.peer_ca} cannot be used: {error}") from error
    client.minimum_version = ssl.TLSVersion.TLSv1_3
    return PeerKeys(secret, server, client)


def _read_secret(name: str) -> bytes:
    try:
        secret = Path(name).expanduser().read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"peer_secret_file {name} cannot be read: {error}") from error
    if len(secret) < LEAST_SECRET_BYTES:
        raise ConfigError(
            f"the secret in peer_secret_file {name} has {len(secret)} bytes: use at least "
            f"{LEAST_SECRET_BYTES}, such as the output of `openssl rand -hex 32`"
        )
    return secret
