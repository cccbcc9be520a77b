"""All that a checkpoint's files say about text, loaded once. Knows no weights and no HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pippin.errors import LoadError
from pippin.text.chat_template import ChatTemplate
from pippin.text.fill_in_middle import FillInMiddle
from pippin.text.parsers.formats import AUTO, ReplyFormats
from pippin.text.reranker import Reranker
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
