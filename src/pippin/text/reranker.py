"""Qwen3-Reranker's prompt, and the two words it answers with. Knows no engine and no HTTP.

Such a checkpoint is a plain causal model: whether a document answers a query is how likely it is to
continue the prompt with yes rather than no.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pippin.text.tokenizer import Tokenizer, read_json

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_NAME = re.compile(r"\bqwen3-reranker\b", re.IGNORECASE)


@dataclass(frozen=True)
class Reranker:
    yes_id: int
    no_id: int

    @classmethod
    def detect(cls, model_dir: Path, tokenizer: Tokenizer) -> Reranker | None:
        """By what Sentence Transformers or vLLM note in a checkpoint's files, or by its name."""
        config = read_json(model_dir / "config.json")
        if any("SequenceClassification" in name for name in config.get("architectures") or ()):
            return None  # it has another head
        for noted in sorted(model_dir.glob("*_LogitScore/config.json")):
            ids = read_json(noted)
            return _of(ids.get("true_token_id"), ids.get("false_token_id"))
        words = config.get("classifier_from_token")
        if words is None and any(map(_NAME.search, _names(model_dir))):
            words = ["no", "yes"]
        if not isinstance(words, list) or len(words) != 2:
            return None
        no_id, yes_id = (_single(word, tokenizer) for word in words)
        return _of(yes_id, no_id)

    def head(self, query: str, instruction: str, tokenizer: Tokenizer) -> list[int]:
        """The prompt up to the document: the same tokens for all documents of a query."""
        asked = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>:"
        return _encode(_BEFORE, tokenizer) + _encode(asked, tokenizer)

    def tail(self, document: str, tokenizer: Tokenizer) -> list[int]:
        return _encode(f" {document}", tokenizer) + _encode(_AFTER, tokenizer)


def _names(model_dir: Path) -> tuple[str, ...]:
    """A directory's own, and that of the repository whose snapshot it is in the hub's cache."""
    parts = model_dir.parts
    return (model_dir.name, *(part.replace("--", "/") for part in parts[-3:-2]))


def _of(yes_id: Any, no_id: Any) -> Reranker | None:
    if not isinstance(yes_id, int) or not isinstance(no_id, int):
        return None
    return Reranker(yes_id, no_id)


def _single(word: Any, tokenizer: Tokenizer) -> int | None:
    tokens = _encode(str(word), tokenizer)
    return tokens[0] if len(tokens) == 1 else None


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)
