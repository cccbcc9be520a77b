"""Writes a past turn with tool calls by the chat templates of model families. Parses no reply.

    python tools/record_family_replies.py TEMPLATES tests/fixtures/family_replies.jsonl

TEMPLATES is a folder with a file `OWNER--MODEL.jinja` for each model: its `chat_template.jinja`.
Where a model has none, or one that shows no calls, OWNER is the server whose template it is.
Recorded is what the template adds to the prompt for the turn, which is what the model learnt to
write, and which marks of the formats are in its source. The templates themselves are not kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from pippin.errors import RequestError
from pippin.text.parsers.formats import REASONING_FORMATS, TOOL_FORMATS, ReplyFormats
from pippin.text.chat_template import ChatTemplate

PROPERTIES = {
    "text": {"type": "string", "description": "Any text"},
    "count": {"type": "integer", "description": "How many"},
    "flag": {"type": "boolean", "description": "Whether"},
    "list": {"type": "array", "items": {"type": "string"}, "description": "Some"},
    "tree": {"type": "object", "properties": {}, "description": "More"},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks.",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": []},
        },
    }
    for name in ("get_weather", "find_all")
]
HARD_TEXT, PLAIN_TEXT = 'it\'s "wet" <b>\nTokyo é', "New York"
UNQUOTED = ("vllm--tool_chat_template_llama3.2_pythonic",)  # these write strings without any quotes
REASONING = "Hm."
USER = {"role": "user", "content": "Hi"}
# By default, and with reasoning turned on and off by any of the names that templates have for it.
SWITCHES = [
    {},
    {"enable_thinking": True, "thinking": True, "thinking_mode": "enabled"},
    {"enable_thinking": False, "thinking": False, "thinking_mode": "disabled", "reasoning": False},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ENDS_OF_TURN = (
    *("</s>", "<|im_end|>", "<|eot_id|>", "<|eot|>", "<|end_of_text|>", "<|END_OF_TURN_TOKEN|>"),
    *(
        "<｜end▁of▁sentence｜>",
        "<seed:eos>",
        "<end_of_sentence>",
        "[e~[",
        "<SPECIAL_12>",
        "<turn|>",
    ),
    *("<|tool_response>", "<end_of_turn>", "<|end_of_msg|>", "<|eos|>", "<|end|>\n</s>"),
)


def calls_with(text: str) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("get_weather", {"text": text, "count": 3, "flag": True}),
        ("find_all", {"list": ["a", "b"], "tree": {"a": [1, None]}}),
    ]


def turn(calls: list[tuple[str, dict[str, Any]]], reasoning: str) -> dict[str, Any]:
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return {
        "role": "assistant",
        "content": "",
        **({"reasoning_content": reasoning} if reasoning else {}),
        "tool_calls": [
            {"id": f"call0000{number}", "type": "function", "function": function}
            for number, function in enumerate(functions)
        ],
    }


def added(prompt: str, later: str, opening: str) -> tuple[str, str] | None:
    """The end of the prompt that the turn has too, and what the turn adds to it.

    A prompt may open reasoning, with `opening`, that the template leaves out of a past turn.
    """
    if not later.startswith(prompt):
        prompt = prompt[: prompt.rfind(opening)] if opening in prompt else ""
    if not prompt or not later.startswith(prompt):
        return None
    reply = later[len(prompt) :]
    ends = [at for end in ENDS_OF_TURN if (at := reply.find(end)) >= 0]
    return prompt[-40:], reply[: min(ends, default=len(reply))]


def record(model: str, source: str) -> list[dict[str, Any]]:
    template = ChatTemplate(source, TOKENS)
    formats = ReplyFormats.choose(source)
    marks = {mark for each in TOOL_FORMATS.values() for mark in each.template_marks}
    marks |= {mark for each in TOOL_FORMATS.values() for mark in each.other_template_marks}
    for each in REASONING_FORMATS.values():
        marks |= {each.end, *(header for header, _ in each.headers), *each.template_marks}
    reasoning_marks = REASONING_FORMATS.get(formats.reasoning or "")
    opening = reasoning_marks.begin if reasoning_marks else ""
    calls = calls_with(PLAIN_TEXT if model in UNQUOTED else HARD_TEXT)
    replies: dict[tuple[int, bool], dict[str, str]] = {}
    # First those that continue the prompt.
    for cut_before, num_calls, reasoning, switches in itertools.product(
        ("\0", opening or "\0"), (2, 1), (REASONING, ""), SWITCHES
    ):
        shown = calls[:num_calls]
        chat = [USER, turn(shown, reasoning)]
        try:
            prompt = template.render([USER], TOOLS, variables=switches)
            later = template.render(chat, TOOLS, add_generation_prompt=False, variables=switches)
        except RequestError:
            continue  # some allow one call only
        found = added(prompt, later, cut_before)
        if found and all(name in found[1] for name, _ in shown):
            key = num_calls, REASONING in found[1]
            replies.setdefault(key, {"prompt_end": found[0], "reply": found[1]})
    most = max((num_calls for num_calls, _ in replies), default=0)
    return [
        {
            "template": model.replace("--", "/"),
            "tools": formats.tools,
            "reasoning": formats.reasoning,
            "marks": sorted(mark for mark in marks if mark and mark in source),
            "calls": calls[:num_calls],
            "reasons": reasons,
            **reply,
        }
        for (num_calls, reasons), reply in replies.items()
        if num_calls == most
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("templates", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    replies = []
    for path in sorted(arguments.templates.glob("*.jinja")):
        recorded = record(path.stem, path.read_text(encoding="utf-8"))
        print(f"{path.stem}: {len(recorded)} replies")
        replies += recorded
    lines = [json.dumps(each, ensure_ascii=False) for each in ({"tools": TOOLS}, *replies)]
    arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
