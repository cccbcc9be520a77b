"""A checkpoint's tokenizer as grammars see it. Knows no engine and no requests."""

from __future__ import annotations

from pathlib import Path

from pippin.decode.vocabulary import Vocabulary
from pippin.errors import UnsupportedField
from pippin.text.tokenizer import Tokenizer


def load_vocabulary(model_dir: Path, vocab_size: int) -> Vocabulary:
    """Of a model that scores `vocab_size` tokens: more, or fewer, than its tokenizer has."""
    return vocabulary_of(Tokenizer.load(model_dir), vocab_size)


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
    if not tokenizer.spells_bytes:
        raise UnsupportedField(
            "replies of this model cannot be constrained: its tokens are not runs of bytes"
        )
    eos_ids = [id for id in tokenizer.eos_ids if id < vocab_size]
    if not eos_ids:
        raise UnsupportedField("replies of this model cannot be constrained: it has no end token")
    tokens = [tokenizer.token_bytes(id) for id in range(vocab_size)]
    added = {id for id in tokenizer.added_ids if id < vocab_size and not tokens[id].isspace()}
    return Vocabulary(
        tokens,
        eos_ids=eos_ids,
        marks=added | {id for id in tokenizer.special_ids if id < vocab_size},
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
