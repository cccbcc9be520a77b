"""Qwen3.5's own tokenizer and template: calls there and back, token by token."""

from __future__ import annotations

import json
from typing import Any

import pytest

from call_texts import TOOLS, Maker, examples, write_calls
from pippin.messages import TokenDelta
from pippin.sequences import GeneratedSequence, open_sequences
from pippin.text.detokenizer import Decoded, Detokenizer
from pippin.text.parsers.base import ReplyParser
from pippin.text.parsers.formats import TOOL_FORMATS
from pippin.text.pieces import CallArguments, Content, FoldedText, TextPiece, joined
from pippin.text.prompt import Prompt, chat_prompt
from pippin.text.tokenizer import Tokenizer
from pippin.types import SamplingParams, TokenLogprobs
from qwen35 import load_qwen35

TEXT = load_qwen35()
USER = {"role": "user", "content": "What is the weather?"}
WEATHER = write_calls("qwen3_coder", [("get_weather", {"text": "Tokyo"})])
REPLY = f"Tokyo, he says.\n</think>\n\nI look.\n\n{WEATHER}"


def tokens_of(text: str) -> list[int]:
    return TEXT.tokenizer.encode(text, add_special_tokens=False)


def stream(parser: ReplyParser, ids: list[int], *stop: str, **options: Any) -> list[Decoded]:
    """Token by token."""
    detokenizer = Detokenizer(TEXT.tokenizer, stop, parser=parser, **options)
    decoded = [detokenizer.feed([token]) for token in ids]
    return [*decoded, detokenizer.close()]


def pieces_of(decoded: list[Decoded]) -> list[TextPiece]:
    return joined(piece for each in decoded for piece in each.pieces)


@pytest.mark.parametrize("format", ["qwen3_coder", "hermes"])
def test_tokens_and_text_give_the_same_pieces(format: str) -> None:
    new_parser = TOOL_FORMATS[format].parser
    for example in examples(format):
        whole = new_parser(TOOLS, lambda: "id")
        expected = joined([*whole.feed(example.text), *whole.close()])
        streamed = stream(new_parser(TOOLS, lambda: "id"), tokens_of(example.text))
        assert pieces_of(streamed) == expected, example.text


def test_the_next_prompt_begins_with_the_last_one_and_its_reply() -> None:
    """Sent back as it was parsed, a reply is found in the prefix cache to its last letter."""
    assert TEXT.chat is not None
    prompt = TEXT.chat.render([USER], tools=TOOLS)
    for seed in range(50):
        name, arguments = Maker("qwen3_coder", seed).call()
        # Of these the template writes what Python prints, and not what the model said.
        arguments = {k: v for k, v in arguments.items() if k not in ("ratio", "flag", "maybe")}
        calls = write_calls("qwen3_coder", [(name, arguments), (name, {})])
        reply = f"Hm.\n\nSo.\n</think>\n\nLet me see.\n\n{calls}"
        parser = TEXT.formats.parser(prompt, TOOLS)
        folded = FoldedText.of([*parser.feed(reply), *parser.close()])
        message = {
            "role": "assistant",
            "content": folded.content,
            "reasoning_content": folded.reasoning,
            "tool_calls": [
                {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in folded.calls.values()
            ],
        }
        results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
        later = TEXT.chat.render([USER, message, *results], tools=TOOLS)
        assert later.startswith(prompt + reply)


def test_the_checkpoint_says_how_its_replies_are_written() -> None:
    assert (TEXT.formats.tools, TEXT.formats.reasoning) == ("qwen3_coder", "think")
    thinking = chat_prompt([USER], TEXT, tools=TOOLS)
    direct = chat_prompt([USER], TEXT, tools=TOOLS, variables={"enable_thinking": False})
    for prompt, reasoning, content in [(thinking, "Hm", ""), (direct, "", "Hm")]:
        parser = TEXT.formats.parser(prompt.ending)
        folded = FoldedText.of([*parser.feed("Hm"), *parser.close()])
        assert (folded.reasoning, folded.content) == (reasoning, content)


# ---- stop strings --------------------------------------------------------------------------


def new_parser() -> ReplyParser:
    return TEXT.formats.parser("<think>\n", TOOLS)


def test_a_stop_string_does_not_act_in_reasoning_or_in_a_call() -> None:
    folded = FoldedText.of(pieces_of(stream(new_parser(), tokens_of(REPLY), "Tokyo", "tool_call")))
    assert folded.reasoning == "Tokyo, he says."
    assert folded.content == "I look."
    assert [json.loads(call.arguments) for call in folded.calls.values()] == [{"text": "Tokyo"}]


def test_a_stop_string_acts_on_content_and_what_follows_is_dropped() -> None:
    folded = FoldedText.of(pieces_of(stream(new_parser(), tokens_of(REPLY), "look")))
    assert (folded.content, folded.calls) == ("I ", {})


def test_a_stop_string_does_not_reach_across_a_call() -> None:
    text = f"</think>\n\nI lo{WEATHER}ok."
    folded = FoldedText.of(pieces_of(stream(new_parser(), tokens_of(text), "look")))
    assert (folded.content, len(folded.calls)) == ("I look.", 1)


@pytest.mark.parametrize("stop", [(), (" look",), ("absent",)])
def test_every_token_that_was_shown_is_reported_once(stop: tuple[str, ...]) -> None:
    ids = tokens_of(REPLY)
    spans = [span for each in stream(new_parser(), ids, *stop) for span in each.spans]
    assert [span.index for span in spans] == list(range(len(spans)))
    shown = REPLY[: REPLY.index(" look")] if stop == (" look",) else REPLY
    assert "".join(map(TEXT.tokenizer.token_text, (span.id for span in spans))) == shown


# ---- special tokens are marks ----------------------------------------------------------------


def special_tokenizer(*marks: str) -> Tokenizer:
    ids = [TEXT.tokenizer.encode(mark)[0] for mark in marks]
    return Tokenizer(TEXT.tokenizer._backend, special_ids=frozenset(ids))


def test_special_tokens_reach_the_parser_that_looks_for_them_and_nobody_else() -> None:
    tokenizer = special_tokenizer("<tool_call>", "</tool_call>", "<|im_end|>")
    ids = tokens_of(f"So. <|im_end|>{WEATHER}<|im_end|>")
    detokenizer = Detokenizer(tokenizer, parser=TOOL_FORMATS["qwen3_coder"].parser(TOOLS))
    folded = FoldedText.of([*detokenizer.feed(ids).pieces, *detokenizer.close().pieces])
    assert (folded.content, len(folded.calls)) == ("So.", 1)
    plain = Detokenizer(tokenizer)
    assert (plain.feed(ids).text + plain.close().text).startswith("So. \n<function=get_weather>")


def test_a_special_token_ends_a_character_that_was_left_unfinished() -> None:
    tokenizer = special_tokenizer("<tool_call>", "</tool_call>")
    broken = TEXT.tokenizer.encode("🜨")[:1]
    detokenizer = Detokenizer(tokenizer, parser=TOOL_FORMATS["qwen3_coder"].parser(TOOLS))
    decoded = [detokenizer.feed([*broken, *tokens_of(WEATHER)]), detokenizer.close()]
    folded = FoldedText.of(pieces_of(decoded))
    assert (folded.content, len(folded.calls)) == ("\ufffd", 1)


# ---- sequences -------------------------------------------------------------------------------


def open_one(**params: Any) -> GeneratedSequence:
    prompt = Prompt([5, 6, 7])
    params = {"max_tokens": 1000, **params}
    (sequence,) = open_sequences(
        "r", prompt, SamplingParams(**params), TEXT.tokenizer, new_parser=new_parser
    )
    return sequence


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_sequence_gives_its_parsers_pieces(size: int) -> None:
    sequence, ids = open_one(logprobs=1), tokens_of(REPLY)
    starts = range(0, len(ids), size)
    taken = []
    for start in starts:
        part = ids[start : start + size]
        finish: Any = "length" if start == starts[-1] else None
        logprobs = [TokenLogprobs(-1.0, [], []) for _ in part]
        taken.append(sequence.take(TokenDelta("r-0", part, logprobs, finish=finish)))
    folded = FoldedText.of(piece for each in taken for piece in each.pieces)
    assert "".join(each.text for each in taken) == folded.content == "I look."
    assert folded.reasoning == "Tokyo, he says."
    assert folded.calls[0].arguments == '{"text": "Tokyo"}'
    assert [token.id for each in taken for token in each.shown] == ids


def test_a_reply_that_is_cut_in_a_call_has_told_what_it_had() -> None:
    sequence = open_one()
    ids = tokens_of(REPLY[: REPLY.index("kyo\n</parameter>")])
    pieces = sequence.take(TokenDelta("r-0", ids, finish="length")).pieces
    arguments = [piece.text for piece in pieces if isinstance(piece, CallArguments)]
    assert arguments == ['{"text": "To']
    assert isinstance(pieces[1], Content)
    assert FoldedText.of(pieces).content == f"I look.\n\n{WEATHER[: WEATHER.index('kyo')]}"
