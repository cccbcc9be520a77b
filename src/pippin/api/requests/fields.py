"""Which request fields are honoured and which are refused. Knows no values' meaning.

Every field that OpenAI documents for an endpoint is in one of its two tables (a test compares
them with the official client's types), so nothing is ever ignored silently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pippin.api.requests.body import Body, shown
from pippin.errors import UnsupportedField


@dataclass(frozen=True)
class Refusal:
    why: str
    neutral: tuple[Any, ...] = ()  # values that ask for nothing, and so are let pass

    def lets_pass(self, value: Any) -> bool:
        return any(type(value) is type(n) and value == n for n in self.neutral)  # 0 is not false


_SAMPLING = {
    "temperature",
    "top_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    # Not OpenAI's, but known from other servers:
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
}
_SHARED = _SAMPLING | {
    "model",
    "max_tokens",
    "n",
    "stop",
    "logprobs",
    "stream",
    "stream_options",
    "user",
    "response_format",
    # Not OpenAI's:
    "priority",
    "timeout",
    "cache_salt",
    "json_schema",
    "regex",
    "ebnf",
}

CHAT_HONOURED = frozenset(
    _SHARED
    | {
        "messages",
        "max_completion_tokens",
        "top_logprobs",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "reasoning_effort",
        # Labels for the operator's bookkeeping: they change no reply here or elsewhere.
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        # Not OpenAI's:
        "chat_template_kwargs",
        "add_generation_prompt",
    }
)
COMPLETION_HONOURED = frozenset(_SHARED | {"prompt", "echo", "best_of"})

_TEXT_ONLY = "only text is generated"

CHAT_REFUSED = {
    "audio": Refusal(_TEXT_ONLY),
    "function_call": Refusal("it is the old name of tool_choice", ("none",)),
    "functions": Refusal("it is the old name of tools", ([],)),
    "modalities": Refusal(_TEXT_ONLY, (["text"],)),
    "moderation": Refusal("there is no moderation"),
    "prediction": Refusal("predicted outputs are not used"),
    "prompt_cache_options": Refusal("caching is automatic", ({"mode": "implicit"},)),
    "prompt_cache_retention": Refusal("the cache lives in memory", ("in_memory",)),
    "service_tier": Refusal("there is one tier", ("auto", "default")),
    "store": Refusal("replies are not stored", (False,)),
    "verbosity": Refusal("say it in the prompt", ("medium",)),
    "web_search_options": Refusal("there is no web search"),
}
_NO_SERVICE = "this server runs nothing beside the model"

RESPONSES_HONOURED = frozenset(
    {
        *("model", "input", "instructions", "max_output_tokens", "temperature", "top_p"),
        *("stream", "stream_options", "tools", "tool_choice", "parallel_tool_calls"),
        *("reasoning", "text", "include", "store", "previous_response_id"),
        # Labels; the last one is Codex's:
        *("metadata", "user", "safety_identifier", "prompt_cache_key", "client_metadata"),
        # Not OpenAI's:
        *("seed", "top_k", "min_p", "stop", "priority", "timeout", "cache_salt"),
    }
)
RESPONSES_REFUSED = {
    "access_programs": Refusal(_NO_SERVICE),
    "background": Refusal("a reply is computed while its client waits", (False,)),
    "context_management": Refusal("contexts are not edited", ([],)),
    "conversation": Refusal("use previous_response_id"),
    "image": Refusal(_TEXT_ONLY),
    "max_tool_calls": Refusal(_NO_SERVICE),
    "moderation": Refusal("there is no moderation"),
    "prompt": Refusal("prompts are not stored"),
    "prompt_cache_options": Refusal("caching is automatic", ({"mode": "implicit"},)),
    "prompt_cache_retention": Refusal("the cache lives in memory", ("in_memory",)),
    "service_tier": Refusal("there is one tier", ("auto", "default")),
    "top_logprobs": Refusal("use chat completions for log probabilities", (0,)),
    "truncation": Refusal("a conversation is never cut", ("disabled",)),
}

MESSAGES_HONOURED = frozenset(
    {
        *("model", "messages", "system", "max_tokens", "stop_sequences", "stream"),
        *("tools", "tool_choice", "thinking", "output_config"),
        # They change nothing: every prefix is cached, and labels are the operator's.
        *("cache_control", "metadata", "user_profile_id"),
        "context_management",  # Claude Code sends it, and asks for no edit by it
        # Anthropic's own once, and still sent to other servers:
        *("temperature", "top_p", "top_k"),
        # Not Anthropic's:
        *("priority", "timeout", "cache_salt"),
    }
)
MESSAGES_REFUSED = {
    "container": Refusal(_NO_SERVICE),
    "diagnostics": Refusal("the log and /status tell what was cached"),
    "inference_geo": Refusal("it runs where it runs"),
    "service_tier": Refusal("there is one tier", ("auto", "standard_only")),
    "speed": Refusal("there is one speed", ("standard",)),
}

COMPLETION_REFUSED = {"suffix": Refusal("text is not inserted", ("",))}


def check_fields(body: Body, honoured: frozenset[str], refused: dict[str, Refusal]) -> None:
    body.check_known(honoured | refused.keys())
    for field, refusal in refused.items():
        if not body.has(field) or refusal.lets_pass(body.get(field)):
            continue
        allowed = " or ".join(shown(neutral) for neutral in refusal.neutral)
        hint = f" (only {allowed} is accepted)" if allowed else ""
        raise UnsupportedField(
            f"{field} is not supported: {refusal.why}{hint}", param=body.name(field)
        )
