"""All that a checkpoint's files say about text, loaded once."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pippin.errors import LoadError
from pippin.text.chat_template import ChatTemplate
from pippin.text.parsers.formats import AUTO, ReplyFormats
from pippin.text.tokenizer import Tokenizer, read_json


@dataclass(frozen=True)
class SamplingDefaults:
    """The checkpoint's advice (generation_config.json) for what a request leaves out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def load(cls, model_dir: Path) -> SamplingDefaults:
        config = read_json(model_dir / "generation_config.json")
        found: dict[str, Any] = {}
        for each in fields(cls):
            value = config.get(each.name)
            if isinstance(value, bool) or not isinstance(value, int | float | None):
                raise LoadError(f"generation_config.json: {each.name} is {value!r}, not a number")
            if value is not None:
                found[each.name] = type(getattr(cls, each.name))(value)
        if config.get("do_sample") is False:
            found["temperature"] = 0.0
        return cls(**found)


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
    """Qwen3-Reranker's prompt, and the two words it answers with: a plain causal model, for which a
    document answers a query as likely as it continues the prompt with yes rather than no."""

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


# The marks before the prefix, the suffix and the middle.
_FILL_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4.5
)
_REPO_MARKS = ("<|repo_name|>", "<|fim_repo|>", "<reponame>")
_FILE_MARK = "<|file_sep|>"
# Where a tokenizer has no marks of files, and names that a client does not send.
_SNIPPET = "\n\n--- snippet ---\n\n"
_PROJECT, _FILE = "myproject\n", "filename\n"
# Marks that are no part of a middle, besides those above and the end tokens.
_ENDS = (
    *("<|fim_pad|>", "<fim_pad>", "<|file_sep|>", "<|file_separator|>", "<file_sep>"),
    *("<|repo_name|>", "<reponame>", "<|endoftext|>", "▁<EOT>"),
)


@dataclass(frozen=True)
class FillInMiddle:
    """How a model of code is asked for the text between two others; its tokens say that it can be.

    All of these write the middle last, and files that are no part of the one to complete first, as
    llama.cpp writes them:

        repo  project  (file  name  text)*  file  name  begin  prefix  hole  suffix  end  -> middle
    """

    before_prefix: int  # tokens
    before_suffix: int
    before_middle: int
    stop_ids: tuple[int, ...]
    before_repo: int | None = None
    before_file: int | None = None

    @classmethod
    def detect(cls, tokenizer: Tokenizer) -> FillInMiddle | None:
        for marks in _FILL_MARKS:
            prefix, suffix, middle = map(tokenizer.added_id, marks)
            if prefix is not None and suffix is not None and middle is not None:
                stop_ids = _found(tokenizer, *marks, *_ENDS)
                repo_ids = _found(tokenizer, *_REPO_MARKS)
                before_repo = repo_ids[0] if repo_ids else None
                before_file = tokenizer.added_id(_FILE_MARK)
                return cls(prefix, suffix, middle, stop_ids, before_repo, before_file)
        return None

    def before_files(self, tokenizer: Tokenizer) -> list[int]:
        if self.before_repo is None:
            return []
        return [self.before_repo, *_encode(_PROJECT, tokenizer)]

    def other_file(self, name: str, text: str, tokenizer: Tokenizer) -> list[int]:
        if self.before_file is None:
            return _encode(_SNIPPET + text, tokenizer)
        return [self.before_file, *_encode(f"{name}\n{text}", tokenizer)]

    def before_gap(self, tokenizer: Tokenizer) -> list[int]:
        """The name of the file to complete."""
        if self.before_file is None:
            return []
        return [self.before_file, *_encode(_FILE, tokenizer)]

    def gap(self, prefix: str | list[int], suffix: str, tokenizer: Tokenizer) -> list[int]:
        if isinstance(prefix, str):
            prefix = _encode(prefix, tokenizer)
        return [
            self.before_prefix,
            *prefix,
            self.before_suffix,
            *tokenizer.encode_inside(suffix),
            self.before_middle,
        ]


def _found(tokenizer: Tokenizer, *marks: str) -> tuple[int, ...]:
    return tuple(id for mark in marks if (id := tokenizer.added_id(mark)) is not None)


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@dataclass(frozen=True)
class TextBundle:
    """Tokenizer, chat template (None: the model is no chat model), sampling defaults, formats, and
    how it reranks (None: the model is no reranker) and fills gaps (None: it was not trained to)."""

    tokenizer: Tokenizer
    chat: ChatTemplate | None
    defaults: SamplingDefaults
    formats: ReplyFormats = field(default_factory=ReplyFormats)
    reranker: Reranker | None = None
    fill_in_middle: FillInMiddle | None = None

    @classmethod
    def load(
        cls, model_dir: Path, *, tool_parser: str = AUTO, reasoning_parser: str = AUTO
    ) -> TextBundle:
        tokenizer = Tokenizer.load(model_dir)
        chat = ChatTemplate.load(model_dir, tokenizer.named_tokens)
        return cls(
            tokenizer=tokenizer,
            chat=chat,
            defaults=SamplingDefaults.load(model_dir),
            formats=ReplyFormats.choose(
                "" if chat is None else chat.tool_source,
                tools=tool_parser,
                reasoning=reasoning_parser,
                tokens={tokenizer.token_text(id) for id in tokenizer.added_ids},
            ),
            reranker=Reranker.detect(model_dir, tokenizer),
            fill_in_middle=FillInMiddle.detect(tokenizer),
        )
