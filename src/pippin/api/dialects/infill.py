"""llama.cpp's `/infill`, as editors' plugins use it.

The reply's fields are those of llama.cpp's `/completion`, less the prompt and most settings.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pippin.api.dialects.dialect import Dialect, data_event
from pippin.api.job import FoldedChoice, Job
from pippin.api.model_info import RequestRules
from pippin.api.requests import fields as table
from pippin.api.requests import shared_fields as shared
from pippin.api.requests.body import MAX_LABEL_CHARS, MAX_LABELS, MAX_MESSAGES
from pippin.api.requests.fields import FieldTable, ValueKind, ignored_field, refused_field
from pippin.api.requests.neutral_request import CompletionRequest, Gap
from pippin.api.requests.sampling_fields import check_choices, read_options
from pippin.api.served_models import ModelLease
from pippin.sequences import SequencePiece

MAX_INDENT = 1_024
_NO_DEADLINE = "timeout ends a reply, in seconds"


class File(msgspec.Struct):
    text: str
    filename: str = "tmp"


INFILL = FieldTable(
    {
        **table.MODEL,
        "input_prefix": table.STRING,
        "input_suffix": table.STRING,
        "input_extra": ValueKind(
            f"a list of at most {MAX_MESSAGES:,} objects with a text, and perhaps a filename",
            Annotated[list[File], Meta(max_length=MAX_MESSAGES)],
        ),
        "prompt": table.STRING,
        "n_predict": table.integer_from(-1, ours="max_tokens", unset=-1),
        "n_indent": table.integer_from(0, MAX_INDENT),
        "n_cmpl": shared.SAME["n_cmpl"],
        "return_tokens": table.BOOLEAN,
        "response_fields": ValueKind(
            f"a list of at most {MAX_LABELS} strings of at most {MAX_LABEL_CHARS:,} characters",
            Annotated[
                list[Annotated[str, Meta(max_length=MAX_LABEL_CHARS)]], Meta(max_length=MAX_LABELS)
            ],
        ),
        **table.SAMPLING,
        **table.pick(shared.SAME, "repeat_penalty", "grammar"),
        **table.pick(table.STRUCTURE, "json_schema"),
        "seed": replace(table.SAMPLING["seed"], unset=-1),
        **table.STREAM,
        **table.SERVING,
        **shared.HINTS,
        **shared.SAMPLERS,
        "t_max_predict_ms": ignored_field(_NO_DEADLINE),
        "sse_ping_interval": ignored_field("the server sets it"),
        "n_probs": refused_field("use /v1/completions for log probabilities", 0),
        "post_sampling_probs": refused_field("use /v1/completions for log probabilities", False),
        "lora": refused_field("this server loads no adapters", []),
    },
    required=("input_prefix", "input_suffix"),
)


_LINE_START = re.compile(r"\n([ \t]*)(?=[^ \t\r\n])")
_UNKNOWN_INDENT = re.compile(r"\n[ \t]*\Z")


@dataclass(frozen=True)
class InfillRequest(CompletionRequest):
    """And what the reply is made of."""

    least_indent: int = 0
    returns_tokens: bool = False
    response_fields: tuple[str, ...] = ()  # none: all


def parse_infill(fields: Any, rules: RequestRules) -> InfillRequest:
    body = INFILL.read(fields, rules)
    options = read_options(body, rules)
    check_choices(1, options, rules.limits)
    files = tuple((file.filename, file.text) for file in body.get("input_extra", ()))
    gap = Gap(body.get("input_suffix"), files, "input_prefix", "input_suffix", "input_extra")
    return InfillRequest(
        options,
        [body.get("input_prefix") + body.get("prompt", "")],
        leniency=body.leniency,
        gap=gap,
        least_indent=body.get("n_indent", 0),
        returns_tokens=body.get("return_tokens", False),
        response_fields=tuple(body.get("response_fields", ())),
    )


class InfillDialect(Dialect):
    def __init__(self, job: Job, lease: ModelLease) -> None:
        super().__init__(job, lease)
        asked = job.request
        assert isinstance(asked, InfillRequest)
        self._asked = asked
        self._max_len = lease.served.model.max_len
        self._indents = [IndentLimit(asked.least_indent) for _ in job.sequences]

    def events(self, piece: SequencePiece) -> bytes:
        indent = self._indents[piece.index]
        content = indent.feed(piece.text) + (indent.close() if piece.finish else "")
        if piece.finish is not None:
            # The last event of a choice has what is left of its text, as in llama.cpp.
            return data_event(self._end(piece.index, content, piece.finish, piece.tokens))
        if not content:
            return b""
        return data_event(
            {
                "index": piece.index,
                "content": content,
                "tokens": piece.tokens,
                "stop": False,
                "id_slot": -1,
                "tokens_predicted": self._job.sequences[piece.index].num_tokens,
                "tokens_evaluated": self._job.num_prompt_tokens,
            }
        )

    def whole(self, choices: Sequence[FoldedChoice]) -> Any:
        """One object, or a list of those of several choices."""
        ends = []
        for choice in choices:
            indent = self._indents[choice.index]
            content = indent.feed(choice.text.content) + indent.close()
            tokens = choice.tokens if self._asked.returns_tokens else []
            ends.append(self._end(choice.index, content, choice.finish, tokens))
        return ends[0] if len(ends) == 1 else ends

    def _end(
        self, index: int, content: str, finish: str | None, tokens: list[int]
    ) -> dict[str, Any]:
        sequence = self._job.sequences[index]
        word = sequence.stop_string
        reply = {
            "index": index,
            "content": content,
            "tokens": tokens,
            "id_slot": -1,
            "stop": True,
            "model": self._job.model,
            "tokens_predicted": sequence.num_tokens,
            "tokens_evaluated": self._job.num_prompt_tokens,
            "generation_settings": {"n_ctx": self._max_len},
            "has_new_line": "\n" in content,
            "truncated": False,
            "stop_type": "limit" if finish == "length" else "eos" if word is None else "word",
            "stopping_word": word or "",
            "tokens_cached": sequence.cached_tokens,
            "timings": self._timings(),
        }
        names = self._asked.response_fields
        return _selected(reply, names) if names else reply

    def _timings(self) -> dict[str, Any]:
        job, times = self._job, self._job.timing
        prompt_s = predicted_s = 0.0
        if times.submitted is not None and times.first is not None and times.last is not None:
            prompt_s, predicted_s = times.first - times.submitted, times.last - times.first
        num_drafts = job.num_drafts("accepted") + job.num_drafts("rejected")
        drafts = {"draft_n": num_drafts, "draft_n_accepted": job.num_drafts("accepted")}
        return {
            "cache_n": job.num_cached(),
            **_pace("prompt", job.num_prompt_tokens - job.num_cached(), prompt_s),
            **_pace("predicted", job.num_tokens, predicted_s),
            **(drafts if num_drafts else {}),
        }


def _pace(name: str, num_tokens: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": num_tokens,
        f"{name}_ms": seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / num_tokens if num_tokens else 0.0,
        f"{name}_per_second": num_tokens / seconds if seconds else 0.0,
    }


def _selected(reply: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """`timings/prompt_n` is a member of a member, under its whole name. Others are left out."""
    found = {}
    for name in names:
        outer, _, inner = name.partition("/")
        holder = reply.get(outer) if inner else reply
        if isinstance(holder, dict) and (inner or outer) in holder:
            found[name] = holder[inner or outer]
    return found


class IndentLimit:
    """Text in, as it arrives; out, up to the first line that is indented less than `least`.

    The first line continues the one at the cursor, and empty lines are indented by nothing.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._held = ""  # the start of a line whose indentation has not arrived whole
        self._is_cut = False

    def feed(self, text: str) -> str:
        if not self._least:
            return text
        if self._is_cut:
            return ""
        text, self._held = self._held + text, ""
        for line in _LINE_START.finditer(text):
            if len(line[1]) < self._least:
                self._is_cut = True
                return text[: line.start()]
        if unknown := _UNKNOWN_INDENT.search(text):
            text, self._held = text[: unknown.start()], unknown[0]
        return text

    def close(self) -> str:
        held, self._held = self._held, ""
        return held
