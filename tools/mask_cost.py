"""What a grammar costs for a large vocabulary: building it, compiling, and a step's mask.

    python tools/mask_cost.py TOKENIZER.json[.xz] [--vocab 248320] [--end '<|im_end|>']

Replies are random tokens among those allowed, so strings are as wild as they get.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import time
from pathlib import Path

import numpy as np
import tokenizers

from pippin.backends.masks import allowed_ids, num_words
from pippin.decode.compile import compile_grammar
from pippin.engine.model_vocabulary import vocabulary_of
from pippin.text.tokenizer import Tokenizer
from pippin.types import GrammarSpec

NAME = {"type": "string", "maxLength": 40}
SCHEMAS = {
    "any object": {"type": "object"},
    "a person": {
        "type": "object",
        "properties": {
            "name": NAME,
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": NAME, "maxItems": 5},
            "kind": {"enum": ["admin", "user", "guest"]},
        },
        "required": ["name", "age", "tags", "kind"],
        "additionalProperties": False,
    },
    "a pattern": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,20}@[a-z]{2,20}\\.(com|org)$"},
}
STEPS = 300


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--vocab", type=int, default=248_320)
    parser.add_argument("--end", default="<|im_end|>")
    options = parser.parse_args()
    opened = lzma.open if options.tokenizer.suffix == ".xz" else open
    with opened(options.tokenizer, "rt", encoding="utf-8") as file:
        backend = tokenizers.Tokenizer.from_str(file.read())
    tokenizer = Tokenizer(backend, eos_ids=(backend.token_to_id(options.end),))
    began = time.perf_counter()
    vocabulary = vocabulary_of(tokenizer, options.vocab)
    print(f"vocabulary of {options.vocab:,}: {time.perf_counter() - began:.2f} s")
    for name, schema in SCHEMAS.items():
        measure(name, GrammarSpec("json_schema", json.dumps(schema)), vocabulary)


def measure(name: str, spec: GrammarSpec, vocabulary) -> None:
    began = time.perf_counter()
    compiled = compile_grammar(spec, vocabulary)
    compile_ms = (time.perf_counter() - began) * 1e3
    rng = random.Random(0)
    ends = set(vocabulary.special_token_ids)
    mask = np.zeros(num_words(len(vocabulary.tokens)), dtype=np.int32)
    masks, others = [], []
    grammar = compiled.copy()
    while len(masks) < STEPS:
        began = time.perf_counter()
        forced = grammar.forced()
        asked = time.perf_counter()
        grammar.fill_mask(mask)
        made = time.perf_counter()
        allowed = [t for t in allowed_ids(mask, len(vocabulary.tokens)).tolist() if t not in ends]
        chosen = forced or [rng.choice(allowed)] if allowed else []
        chose = time.perf_counter()
        if chosen:
            grammar.advance(chosen)
        masks.append(made - asked)
        others.append(asked - began + time.perf_counter() - chose)
        if not chosen or grammar.finished:
            grammar = compiled.copy()
    us = np.sort(np.array(masks)) * 1e6
    print(
        f"{name:12} compile {compile_ms:6.1f} ms   mask: median {np.median(us):5.0f} us, "
        f"99 of 100 below {np.percentile(us, 99):6.0f}, worst {us[-1]:6.0f}   "
        f"forced and advance: median {np.median(others) * 1e6:4.0f} us"
    )


if __name__ == "__main__":
    main()
