"""How a model of code is asked for the text between two others. Knows no engine and no HTTP.

A checkpoint is recognised by its tokens. All of these write the middle last:

    begin  prefix  hole  suffix  end  -> middle
"""

from __future__ import annotations

from dataclasses import dataclass

from pippin.text.tokenizer import Tokenizer

# The marks before the prefix, the suffix and the middle.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
# Marks that are no part of a middle, besides those above and the end tokens.
_ENDS = (
    *("<|fim_pad|>", "<fim_pad>", "<|file_sep|>", "<|file_separator|>", "<file_sep>"),
    *("<|repo_name|>", "<reponame>", "<|endoftext|>", "▁<EOT>"),
)


@dataclass(frozen=True)
class FillInMiddle:
    before_prefix: int  # tokens
    before_suffix: int
    before_middle: int
    stop_ids: tuple[int, ...]

    @classmethod
    def detect(cls, tokenizer: Tokenizer) -> FillInMiddle | None:
        for marks in _MARKS:
            prefix, suffix, middle = map(tokenizer.added_id, marks)
            if prefix is not None and suffix is not None and middle is not None:
                found = map(tokenizer.added_id, (*marks, *_ENDS))
                return cls(prefix, suffix, middle, tuple(id for id in found if id is not None))
        return None

    def tokens(self, prefix: str | list[int], suffix: str, tokenizer: Tokenizer) -> list[int]:
        if isinstance(prefix, str):
            prefix = tokenizer.encode(prefix, add_special_tokens=False)
        return [
            *tokenizer.encode(""),  # a start token, where the model has one
            self.before_prefix,
            *prefix,
            self.before_suffix,
            *tokenizer.encode_inside(suffix),
            self.before_middle,
        ]
