"""What a model is, as a few bytes: entries of another model are never found.

All bytes of all weights count, and of the file beside them that says how they are used: a model
that was trained on, or whose rope was changed, is another one. Weights are hashed once (XXH3, as
fast as the disk reads) and remembered in the user's cache directory; a file that is loaded is read
anyway.

What is remembered holds while path, size, inode, times of change and a sample of the bytes are the
same. The time of modification alone can be kept (`cp -p`, `rsync -t`); ctime can
not, and a `chmod` or a new hard link only costs another hash. The sample is for file systems that
keep no ctime, or clocks that were set back: a fine-tune changes nearly every tensor.

Tokenizers and chat templates do not count: entries are named by tokens.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import xxhash
from platformdirs import user_cache_path

logger = logging.getLogger(__name__)

READ_BYTES = 4 << 20
COUNTED = ("config.json", "*.safetensors")  # what any backend loads
NUM_SAMPLES = 32  # of a file, from its header to its end: milliseconds, however large it is
SAMPLE_BYTES = 4096


def model_fingerprint(folder: Path, facts: Mapping[str, str]) -> bytes:
    """Of the weights in a folder, and of what else decides what is computed from them.

    `facts`: dtype, quantization, layout; in short, all that makes arrays other arrays.
    """
    path = user_cache_path("pippin") / "weights.json"
    known = _load(path)
    before = dict(known)
    digest = hashlib.blake2b(digest_size=32, person=b"pippin weights")
    for file in sorted(file for pattern in COUNTED for file in folder.glob(pattern)):
        _frame(digest, file.name.encode(), _file_digest(file.resolve(), known))
    for name, fact in sorted(facts.items()):
        _frame(digest, name.encode(), fact.encode())
    if known != before:
        _save(path, known)
    return digest.digest()


def _file_digest(path: Path, known: dict[str, str]) -> bytes:
    """As it is known if the file has not changed since."""
    state = _state(path)
    if state in known:
        return bytes.fromhex(known[state])
    hashed = hash_file(path)
    if _state(path) == state:  # or else it was written meanwhile
        known[state] = hashed.hex()
    return hashed


def hash_file(path: Path) -> bytes:
    digest = xxhash.xxh3_128()
    block = bytearray(READ_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(memoryview(block)[:count])
    return digest.digest()


def sample_file(path: Path) -> bytes:
    """A digest of blocks at equal distances, the first and the last included."""
    digest = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        last = max(0, os.fstat(file.fileno()).st_size - SAMPLE_BYTES)
        for number in range(NUM_SAMPLES):
            offset = last * number // (NUM_SAMPLES - 1)
            digest.update(os.pread(file.fileno(), SAMPLE_BYTES, offset))
    return digest.digest()


def file_times(facts: os.stat_result) -> tuple[int, ...]:
    return facts.st_mtime_ns, facts.st_ctime_ns


def _state(path: Path) -> str:
    facts = path.stat()
    numbers = (facts.st_size, facts.st_ino, facts.st_dev, *file_times(facts))
    return "|".join([str(path), *map(str, numbers), sample_file(path).hex()])


def _load(path: Path) -> dict[str, str]:
    try:
        known = json.loads(path.read_text())
        for hashed in known.values():
            bytes.fromhex(hashed)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        logger.warning("%s is not what was written there: %s", path, error)
        return {}
    return dict(known)


def _save(path: Path, known: Mapping[str, str]) -> None:
    """Of files that are there."""
    there = {name: digest for name, digest in known.items() if os.path.exists(name.split("|")[0])}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_text(json.dumps(there, indent=1))
        new.replace(path)
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error)


def _frame(digest: hashlib.blake2b, *parts: bytes) -> None:
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
