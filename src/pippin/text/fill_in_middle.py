"""How a model of code is asked for the text between two others. Knows no engine and no HTTP.

A checkpoint is recognised by its tokens. All of these write the middle last, and files that are no
part of the one to complete first, as llama.cpp writes them:

    repo  project  (file  name  text)*  file  name  begin  prefix  hole  suffix  end  -> middle
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
    before_prefix: int  # tokens
    before_suffix: int
    before_middle: int
    stop_ids: tuple[int, ...]
    before_repo: int | None = None
    before_file: int | None = None

    @classmethod
    def detect(cls, tokenizer: Tokenizer) -> FillInMiddle | None:
        for marks in _MARKS:
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


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _found(tokenizer: Tokenizer, *marks: str) -> tuple[int, ...]:
    return tuple(id for mark in marks if (id := tokenizer.added_id(mark)) is not None)
