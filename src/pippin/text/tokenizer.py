"""A checkpoint's tokenizer: text to tokens and back, the bytes of each, special ones."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from pippin.errors import LoadError

# ---- which bytes each token stands for ---------------------------------------------------------
# Byte-level BPE spells every token as bytes; SentencePiece spells text with a visible space and
# `<0xNN>` for single bytes. Knowing the bytes makes decoding incremental and exact.

Spelling = Callable[[str], bytes]

SPACE = "\u2581"  # how SentencePiece writes a space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable bytes stand for themselves, others are shifted."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(shifted)
    }


_BYTE_OF_CHAR = _byte_of_char()


def spell_byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:  # an added token with characters outside the alphabet is plain text
        return token.encode()


def _spell_sentencepiece(token: str) -> bytes:
    return token.replace(SPACE, " ").encode()


def _spell_with_byte_tokens(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else _spell_sentencepiece(token)


def find_spelling(backend: tokenizers.Tokenizer) -> Spelling | None:
    """The spelling of a tokenizer, read from its decoder; None if it has no byte-wise one."""
    if backend.decoder is None:
        return None
    steps = _flatten(json.loads(backend.decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return spell_byte_level
    if kinds == ["Metaspace"] and steps[0]["replacement"] == SPACE:
        return _spell_sentencepiece
    if any(_shows_spaces(step) for step in steps) and all(_is_bytewise(step) for step in steps):
        return _spell_with_byte_tokens if "ByteFallback" in kinds else _spell_sentencepiece
    return None


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _flatten(part)]


def _shows_spaces(step: dict[str, Any]) -> bool:
    return step == {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}


def _is_bytewise(step: dict[str, Any]) -> bool:
    """Strip drops the space before a text's first word; a reply continues a prompt and keeps it."""
    strips_first_space = step["type"] == "Strip" and step["content"] == " " and step["stop"] == 0
    return _shows_spaces(step) or step["type"] in {"ByteFallback", "Fuse"} or strips_first_space


# Batches are of one text: it is encoded by the thread that asks, and no others are started.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")

_BEFORE_TEXT = "\n\u263a\n"  # no token joins the end of it with other text


class Tokenizer:
    """Text to token ids and back, as the checkpoint's own files define it."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: tuple[int, ...] = (),
        special_ids: frozenset[int] = frozenset(),
        named_tokens: dict[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self._spelling = find_spelling(backend)
        self._bytes: dict[int, bytes] = {}
        self.eos_ids = eos_ids
        self.special_ids = special_ids  # never shown in decoded text
        self.named_tokens = named_tokens or {}  # bos_token and its kin, for chat templates

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        config = read_json(model_dir / "tokenizer_config.json")
        backend = _load_backend(model_dir)
        backend.no_truncation()  # left in some files from training; a prompt must arrive whole
        backend.no_padding()
        named = _named_tokens(config)
        return cls(
            backend,
            eos_ids=_eos_ids(model_dir, backend, named),
            special_ids=_special_ids(backend, config, named),
            named_tokens=named,
        )

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size()

    @property
    def vocabulary(self) -> dict[int, str]:
        """Every token as the tokenizer's file has it, by id."""
        return {id: token for token, id in self._backend.get_vocab().items()}

    @property
    def bos_id(self) -> int | None:
        bos = self.named_tokens.get("bos_token")
        return None if bos is None else self._backend.token_to_id(bos)

    @property
    def added_ids(self) -> frozenset[int]:
        """Tokens that stand for themselves whatever is around them: marks, hidden or not."""
        return frozenset(self._backend.get_added_tokens_decoder())

    def added_id(self, text: str) -> int | None:
        """The id of an added token; None, if there is none of this text."""
        id = self._backend.token_to_id(text)
        return id if id in self.added_ids else None

    @property
    def spells_bytes(self) -> bool:
        """Whether every token is a fixed run of bytes, so that text decodes token by token."""
        return self._spelling is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Other threads run meanwhile: `encode` of one text would hold Python's lock."""
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def special_prefix(self) -> list[int]:
        """Tokens that it puts before every text, such as a start mark."""
        with_them, bare = self.encode("a"), self.encode("a", add_special_tokens=False)
        ends = range(len(with_them) - len(bare) + 1)
        return next((with_them[:i] for i in ends if with_them[i : i + len(bare)] == bare), [])

    def encode_inside(self, text: str) -> list[int]:
        """Tokens of a text that begins within a word or a line: some tokenizers put a space before
        the first one."""
        before = self.encode(_BEFORE_TEXT, add_special_tokens=False)
        both = self.encode(_BEFORE_TEXT + text, add_special_tokens=False)
        if both[: len(before)] == before:
            return both[len(before) :]
        return self.encode(text, add_special_tokens=False)

    def encode_rendered(self, text: str) -> tuple[list[int], list[int]]:
        """Tokens of a rendered chat, which already holds its special tokens, and where in the text,
        in characters, each of them ends."""
        [encoding] = self._backend.encode_batch([text], add_special_tokens=False)
        return encoding.ids, [end for _, end in encoding.offsets]

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens, all at once."""
        visible = [token for token in ids if token not in self.special_ids]
        return self._backend.decode(visible, skip_special_tokens=False)

    def decode_with_special(self, ids: Sequence[int]) -> str:
        """Text with special tokens in it, all at once."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def token_text(self, token: int) -> str:
        """One token on its own, special or not; a broken character shows as U+FFFD."""
        return self.token_bytes(token).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spell(token)
        return known

    def _spell(self, token: int) -> bytes:
        piece = self._backend.id_to_token(token)
        if piece is None:  # embeddings are often padded past the vocabulary
            return b""
        if self._spelling is None:
            return self._backend.decode([token], skip_special_tokens=False).encode()
        return self._spelling(piece)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LoadError(f"{path} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise LoadError(f"{path} is nested too deeply to be read") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


def _load_backend(model_dir: Path) -> tokenizers.Tokenizer:
    path = model_dir / "tokenizer.json"
    if path.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # it raises bare ones
            raise LoadError(f"{path} cannot be read: {error}") from error
    from transformers import AutoTokenizer  # slow to import; only old checkpoints need it

    try:
        backend = AutoTokenizer.from_pretrained(
            str(model_dir), local_files_only=True, trust_remote_code=False
        )._tokenizer
    except (OSError, ValueError, AttributeError, ImportError) as error:
        raise LoadError(f"no tokenizer could be loaded from {model_dir}: {error}") from error
    assert isinstance(backend, tokenizers.Tokenizer)
    if backend.get_vocab_size() == len(backend.get_added_tokens_decoder()):
        raise LoadError(
            f"{model_dir} has no tokenizer.json, and no other vocabulary was found in it"
        )
    return backend


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = {}
    for name in NAMED_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if text is not None:
            named[name] = str(text)
    return named


def _special_ids(
    backend: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, str]
) -> frozenset[int]:
    """tokenizer_config.json overrides tokenizer.json, where `<think>` may be special."""
    special = {id: token.special for id, token in backend.get_added_tokens_decoder().items()}
    for id, token in config.get("added_tokens_decoder", {}).items():
        special[int(id)] = bool(token.get("special"))
    for text in named.values():
        if (named_id := backend.token_to_id(text)) is not None:
            special[named_id] = True
    return frozenset(id for id, is_special in special.items() if is_special)


def _eos_ids(
    model_dir: Path, backend: tokenizers.Tokenizer, named: dict[str, str]
) -> tuple[int, ...]:
    """Those of the first config file that declares some, and the tokenizer's own."""
    config = read_json(model_dir / "config.json")
    sources = (
        read_json(model_dir / "generation_config.json"),
        config,
        config.get("text_config") or {},
    )
    declared = (source.get("eos_token_id") for source in sources)
    first: int | list[int] = next((value for value in declared if value is not None), [])
    ids = [first] if isinstance(first, int) else list(first)
    if "eos_token" in named and (own := backend.token_to_id(named["eos_token"])) is not None:
        ids.append(own)
    return tuple(dict.fromkeys(ids))
