"""Prompts for the text between two others, with other files before them. Knows no JSON."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pippin.api.model_info import ModelInfo
from pippin.api.requests.bounds import MAX_BYTES_PER_TOKEN
from pippin.api.requests.neutral_request import Gap
from pippin.errors import UnsupportedField
from pippin.sequences import room_for_reply
from pippin.text.bundle import TextBundle
from pippin.text.fill_in_middle import FillInMiddle
from pippin.text.prompt import Prompt, check_nbytes, nbytes_of
from pippin.text.tokenizer import Tokenizer
from pippin.types import SamplingParams


@dataclass(frozen=True)
class GapPrompt:
    prompt: Prompt
    num_left_out: int = 0  # files


def fill_of(text: TextBundle, gap: Gap) -> FillInMiddle:
    if text.fill_in_middle is None:
        raise UnsupportedField(
            f"{gap.suffix_field} is not supported: this model's tokenizer has no tokens for "
            "filling in the middle",
            param=gap.suffix_field,
        )
    return text.fill_in_middle


def gap_prompt(
    given: str | list[int],
    gap: Gap,
    fill: FillInMiddle,
    text: TextBundle,
    model: ModelInfo,
    *,
    reply_len: int | None,
) -> GapPrompt:
    """The texts whole, and of the other files the last ones that leave room for the reply."""
    if isinstance(given, str):
        check_nbytes(nbytes_of(given), model.max_prompt_bytes, param=gap.prefix_field)
    check_nbytes(nbytes_of(gap.suffix), model.max_prompt_bytes, param=gap.suffix_field)
    start = text.tokenizer.encode("")  # a start token, where the model has one
    tokens = fill.gap(given, gap.suffix, text.tokenizer)
    room = room_for_reply(Prompt([*start, *tokens]), model.max_len, param=gap.prefix_field)
    if gap.files is None:
        return GapPrompt(Prompt([*start, *tokens]))
    before, after = fill.before_files(text.tokenizer), fill.before_gap(text.tokenizer)
    room -= len(before) + len(after) + (room // 2 if reply_len is None else max(1, reply_len))
    files = _last_files(gap.files, fill, text.tokenizer, room)
    context, boundaries = [*start, *before], []
    for file in files:
        context += file
        boundaries.append(len(context))
    prompt = Prompt([*context, *after, *tokens], boundaries)
    room_for_reply(prompt, model.max_len, param=gap.prefix_field)
    return GapPrompt(prompt, len(gap.files) - len(files))


def within_gap(params: SamplingParams, fill: FillInMiddle) -> SamplingParams:
    """Marks between texts end the reply too."""
    if params.ignore_eos:
        return params
    return replace(params, stop_token_ids=(*params.stop_token_ids, *fill.stop_ids))


def _last_files(
    files: tuple[tuple[str, str], ...], fill: FillInMiddle, tokenizer: Tokenizer, room: int
) -> list[list[int]]:
    """Those that fit in `room` tokens. None is encoded that has more bytes than could fit."""
    found: list[list[int]] = []
    for name, text in reversed(files):
        if nbytes_of(name) + nbytes_of(text) > room * MAX_BYTES_PER_TOKEN:
            break
        tokens = fill.other_file(name, text, tokenizer)
        room -= len(tokens)
        if room < 0:
            break
        found.append(tokens)
    return found[::-1]
