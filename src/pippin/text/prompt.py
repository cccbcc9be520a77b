"""A text, token ids or a conversation as what a model continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pippin.errors import ContextOverflow, RequestError
from pippin.text.bundle import TextBundle
from pippin.text.chat_template import Message, Tools
from pippin.text.detokenizer import Detokenizer

NUM_ENDING_CHARS = 64


@dataclass(frozen=True)
class Echo:
    """The prompt as the reply repeats it: its text, and where each token's text begins."""

    text: str
    offsets: list[int]


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    boundaries: list[int] = field(default_factory=list)  # token positions where messages end
    echo: Echo | None = None
    ending: str = ""  # of a rendered chat: whether it opens the reply's reasoning is seen there

    def behind(self, tokens: Sequence[int]) -> Prompt:
        """The prompt with others before it, which end where it begins."""
        if not tokens:
            return self
        boundaries = [len(tokens), *(len(tokens) + end for end in self.boundaries)]
        return replace(self, tokens=[*tokens, *self.tokens], boundaries=boundaries)

    def last(self, num_tokens: int) -> Prompt:
        """The end of it."""
        num_left_out = len(self.tokens) - num_tokens
        if num_left_out <= 0:
            return self
        ends = [end - num_left_out for end in self.boundaries if end > num_left_out]
        return replace(self, tokens=self.tokens[num_left_out:], boundaries=ends)


def chat_prompt(
    messages: Sequence[Message],
    text: TextBundle,
    *,
    tools: Tools | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
    max_bytes: int | None = None,
    param: str = "messages",
) -> Prompt:
    """A conversation, rendered by the model's own template to at most `max_bytes`."""
    if text.chat is None:
        raise RequestError(
            "this model has no chat template; complete a text instead "
            "(/v1/completions, or LLM.generate)",
            param="messages",
        )
    if continue_final_message and (final := messages[-1])["role"] != "assistant":
        raise _not_continued(f"is of the role {final['role']}", param)
    if continue_final_message and messages[-1].get("tool_calls"):
        raise _not_continued("has tool calls", param)
    if max_bytes is not None:
        check_nbytes(sum(map(_num_shown, messages)), max_bytes, param=param)
    if "developer" not in text.chat.source:  # the newer name for the same thing
        messages = [_as_system(message) for message in messages]
    rendered = text.chat.encode(
        text.tokenizer,
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=variables,
        check=lambda rendered: check_nbytes(nbytes_of(rendered), max_bytes, param=param),
    )
    ending = rendered.text[-NUM_ENDING_CHARS:]
    if continue_final_message:
        ending = text.formats.ending_after(messages[-1]["content"]) or ending
    return Prompt(rendered.tokens, rendered.boundaries, ending=ending)


def _not_continued(why: str, param: str) -> RequestError:
    message = f"the final message {why}; only a text of the assistant can be continued"
    return RequestError(message, param=param)


def completion_prompt(
    given: str | list[int],
    text: TextBundle,
    *,
    echo: bool = False,
    add_special_tokens: bool = True,
    max_bytes: int | None = None,
    param: str = "prompt",
) -> Prompt:
    """A text or its tokens; nothing at all is the model's start token, if it has one."""
    check_nbytes(nbytes_of(given) if isinstance(given, str) else 0, max_bytes, param=param)
    tokens = (
        given
        if not isinstance(given, str)
        else text.tokenizer.encode(given, add_special_tokens=add_special_tokens)
    )
    if not tokens and text.tokenizer.bos_id is not None:
        tokens = [text.tokenizer.bos_id]
    if not tokens:
        raise RequestError("prompt is empty: there is nothing to continue", param=param)
    return Prompt(tokens, echo=_echo(given, tokens, text) if echo else None)


def nbytes_of(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def check_nbytes(nbytes: int, max_bytes: int | None, *, param: str) -> None:
    """Before a text is tokenized, which takes a second for a million bytes."""
    if max_bytes is not None and nbytes > max_bytes:
        raise ContextOverflow(
            "This model's maximum context length allows prompts of at most "
            f"{max_bytes:,} bytes of text. However, you sent {nbytes:,}. Please reduce the length "
            "of the prompt.",
            param=param,
        )


def _num_shown(message: Message) -> int:
    """Bytes that every template shows. Of an assistant's text some leave out the reasoning."""
    calls = sum(nbytes_of(call["function"]["arguments"]) for call in message.get("tool_calls", ()))
    return calls + (0 if message["role"] == "assistant" else nbytes_of(message["content"]))


def _as_system(message: Message) -> Message:
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _echo(given: str | list[int], tokens: list[int], text: TextBundle) -> Echo:
    detokenizer = Detokenizer(text.tokenizer, show_special=True)
    parts = (detokenizer.feed(tokens), detokenizer.close())
    decoded = "".join(part.text for part in parts)
    shown = given if isinstance(given, str) else decoded
    # Tokens may spell a little more than was given: a start mark, or a space before the first word.
    surplus = len(decoded) - len(shown)
    return Echo(shown, [max(0, span.start - surplus) for part in parts for span in part.spans])
