"""The process whose children compile grammars: loads a checkpoint's vocabulary.

    python -m pippin.engine.grammar_zygote FD...    channels to the engine; its setup is on stdin

Started by an engine while its model loads. It imports neither a model library nor numpy, whose
threads could not be forked.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pippin.decode.compile import Vocabulary, prove_grammar
from pippin.decode.prover import run_zygote
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


def main() -> int:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # no threads
    setup = json.loads(sys.stdin.readline() or "{}")
    if not setup:
        return 0  # the engine is gone
    try:
        vocabulary = load_vocabulary(Path(setup["model_dir"]), setup["vocab_size"])
    except PippinError:
        return 0  # the engine builds the same, and says why there can be no grammars
    run_zygote(lambda spec: prove_grammar(spec, vocabulary), [int(fd) for fd in sys.argv[1:]])
    return 0


if __name__ == "__main__":
    sys.exit(main())
