"""The process whose children compile grammars: loads a checkpoint's vocabulary.

    python -m pippin.engine.grammar_zygote      reads its setup from the first line of stdin

Started by an engine while its model loads. It imports neither a model library nor numpy, whose
threads could not be forked.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pippin.decode.compile import Vocabulary, prove_grammar
from pippin.decode.prover import Zygote
from pippin.errors import PippinError, UnsupportedField
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


STDIN, STDOUT, STDERR = 0, 1, 2


def main() -> int:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # no threads
    outbox = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)  # what a library prints is no verdict
    line = _first_line()
    if not line:
        return 0
    setup = json.loads(line)
    try:
        vocabulary = load_vocabulary(Path(setup["model_dir"]), setup["vocab_size"])
    except PippinError:
        return 0  # the engine builds the same, and says why there can be no grammars
    try:
        os.write(outbox, b"ready\n")
    except BrokenPipeError:  # the engine ended while the vocabulary was loaded
        return 0
    Zygote(lambda spec: prove_grammar(spec, vocabulary), STDIN, outbox).run()
    return 0


def _first_line() -> bytes:
    """And not a byte more: what follows is read elsewhere."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(STDIN, 1)
        if not byte:
            return b""
        line += byte
    return line


if __name__ == "__main__":
    sys.exit(main())
