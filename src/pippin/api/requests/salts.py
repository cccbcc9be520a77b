"""Salts: requests of different salts share no cached prefix. Knows no cache and no keys.

    of a request     SHA-256 of its `cache_salt`
    of an owner      HMAC of the digest of the owner's API key
    of both          HMAC of the request's, under the owner's

Digests alone leave this process: neither a salt nor a key can be read out of one.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import msgspec

from pippin.api.requests.body import Body, shown
from pippin.errors import RequestError
from pippin.messages import Submit

MAX_SALT_CHARS = 1_024


def read_salt(body: Body) -> bytes:
    """The digest of a request's `cache_salt`; empty: it has none."""
    return check_salt(body.get("cache_salt"), body.name("cache_salt"))


def check_salt(given: Any, param: str = "cache_salt") -> bytes:
    """The same of a Python caller's. An error does not echo it: it is a secret."""
    if given is None:
        return b""
    if not isinstance(given, str):
        raise RequestError(f"{param} is {shown(given)}; it must be a string", param=param)
    if not 0 < len(given) <= MAX_SALT_CHARS:
        raise RequestError(
            f"{param} has {len(given):,} characters; it must have 1 to {MAX_SALT_CHARS:,}",
            param=param,
        )
    text = given.encode("utf-8", errors="surrogatepass")
    return hashlib.sha256(b"pippin cache_salt\0" + text).digest()


def salt_of_owner(owner: bytes) -> bytes:
    """Of all prefixes of the owner of an API key, by the key's digest."""
    return hmac.digest(owner, b"pippin salt of an API key", "sha256")


def under_owner(submit: Submit, owner_salt: bytes) -> Submit:
    """The request, with prefixes that requests of other owners do not share."""
    if not owner_salt:
        return submit
    salt = hmac.digest(owner_salt, submit.salt, "sha256") if submit.salt else owner_salt
    return msgspec.structs.replace(submit, salt=salt)
