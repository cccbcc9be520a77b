"""The fields of OpenAI's endpoints. Knows no value's use."""

from __future__ import annotations

from pippin.api.fields import extensions, shared
from pippin.api.fields import value_kinds as kinds
from pippin.api.fields.table import FieldTable, Members, ignored_field, members, refused_field
from pippin.api.fields.value_kinds import ValueKind
from pippin.api.requests.bounds import MAX_MESSAGES

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_LISTED = 100
_TEXT_ONLY = "only text is generated"
NO_SERVICE = "this server runs nothing beside the model"
_ANYTHING = ValueKind("any value")
_SUMMARY = kinds.one_of("auto", "concise", "detailed")
_INCLUDE: shared.Fields = {
    "include": kinds.list_of(
        "reasoning.encrypted_content",
        # Of tools that are left out:
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    )
}
_CALLING: shared.Fields = {
    **shared.TOOLS,
    "tool_choice": ValueKind(
        "auto, none, required, or an object: the tool to call, or `allowed_tools`",
        {"type": ["string", "object"]},
    ),
    "parallel_tool_calls": kinds.BOOLEAN,
}
_IGNORED: shared.Fields = {  # by chat completions and by responses
    "moderation": ignored_field("there is no moderation"),
    "prompt_cache_options": ignored_field("caching is automatic", {"mode": "implicit"}),
    "prompt_cache_retention": ignored_field("the cache is in memory", "in_memory"),
    "service_tier": ignored_field("there is one tier", "auto", "default"),
}
_PREDICTION = Members(
    "an object with a `type` of content and `content`, a string or a list of text parts: the reply "
    "that is expected",
    table=FieldTable(
        {
            "type": kinds.one_of("content"),
            "content": ValueKind("a string or a list of parts", {"type": ["string", "array"]}),
        },
        required=("type", "content"),
    ),
)
_CHOSEN_APART = ("n_cmpl", "n_predict")  # responses are one each, of max_output_tokens
_VERBOSITY = ignored_field("ask for it in the prompt", "medium")

CHAT = FieldTable(
    {
        **shared.GENERATION,
        "messages": shared.conversation(ROLES, {}, "role"),
        "max_completion_tokens": kinds.integer_from(1),
        "logprobs": kinds.BOOLEAN,
        "top_logprobs": kinds.integer_from(0, shared.MAX_LOGPROBS),
        **_CALLING,
        "reasoning_effort": shared.EFFORT,
        **shared.LABELS,
        "metadata": kinds.OBJECT,  # not stored, so of any size and kind
        "prediction": _PREDICTION,
        **shared.TEMPLATE,
        **extensions.PROMPT,
        **extensions.GENERATION,
        **extensions.REASONING,
        **extensions.CHANGING_CHAT,
        "audio": refused_field(_TEXT_ONLY),
        "modalities": refused_field(_TEXT_ONLY, ["text"]),
        "function_call": refused_field("it is the old name of tool_choice", "none"),
        "functions": refused_field("it is the old name of tools", []),
        "store": ignored_field("replies are not stored; use /v1/responses", False),
        "verbosity": _VERBOSITY,
        "web_search_options": ignored_field("there is no web search"),
        **_IGNORED,
    },
    required=("messages",),
)
COMPLETION = FieldTable(
    {
        **shared.GENERATION,
        "prompt": kinds.TextsOrIds(),
        "max_tokens": kinds.integer_from(0),
        "logprobs": kinds.integer_from(0, shared.MAX_LOGPROBS),
        "echo": kinds.BOOLEAN,
        "best_of": kinds.integer_from(1, shared.MAX_CHOICES),
        "suffix": kinds.STRING,
        **extensions.PROMPT,
        **extensions.GENERATION,
    },
    required=("prompt",),
)
RESPONSES = FieldTable(
    {
        **shared.MODEL,
        "input": ValueKind(
            f"a string, or a list of 1 to {MAX_MESSAGES:,} items",
            {"anyOf": [{"type": "string"}, kinds.some({"type": "object"}, MAX_MESSAGES)]},
        ),
        "instructions": kinds.STRING,
        "previous_response_id": kinds.LABEL,
        "store": kinds.BOOLEAN,
        "max_output_tokens": kinds.integer_from(1),
        **_CALLING,
        "reasoning": members(
            effort=shared.EFFORT, summary=_SUMMARY, generate_summary=_SUMMARY, context=_ANYTHING
        ),
        "text": members(format=kinds.OBJECT, verbosity=_VERBOSITY),
        **_INCLUDE,
        **shared.STREAM,
        **shared.STREAM_OPTIONS,
        **{name: kind for name, kind in shared.SAMPLING.items() if name != "n"},
        **shared.pick(shared.TEMPLATE, "chat_template_kwargs"),
        "reasoning_effort": shared.EFFORT,
        **shared.USER,
        **shared.LABELS,
        "client_metadata": kinds.Labels(),
        **shared.SERVING,
        **{name: kind for name, kind in extensions.GENERATION.items() if name not in _CHOSEN_APART},
        **{name: kind for name, kind in extensions.REASONING.items() if name != "reasoning"},
        "access_programs": ignored_field(NO_SERVICE),
        "background": refused_field("a reply is computed while its client waits", False),
        "context_management": ignored_field("contexts are not edited", []),
        "conversation": refused_field("use previous_response_id"),
        "image": refused_field(_TEXT_ONLY),
        "max_tool_calls": ignored_field(NO_SERVICE),
        "prompt": refused_field("prompts are not stored"),
        "top_logprobs": refused_field("use chat completions for log probabilities", 0),
        "truncation": ignored_field("a conversation is never shortened", "disabled"),
        **_IGNORED,
    },
    required=("input",),
)
INPUT_TOKENS = FieldTable(
    {
        **RESPONSES.fields,
        "personality": refused_field("ask for it in the prompt"),
    },
    required=("input",),
)
STORED_RESPONSE = FieldTable(  # of a query
    {**_INCLUDE, "stream": refused_field("a stored response is sent as one object", "false")}
)
STORED_ITEMS = FieldTable(
    {
        **_INCLUDE,
        "limit": kinds.integer_from(1, MAX_LISTED),
        "order": kinds.one_of("asc", "desc"),
        "after": kinds.STRING,
    }
)
EMBEDDINGS = FieldTable(
    {
        **shared.MODEL,
        "input": kinds.TextsOrIds(),
        "encoding_format": kinds.one_of("float", "base64"),
        "dimensions": kinds.integer_from(1),
        **shared.USER,
        **shared.SERVING,
    },
    required=("input",),
)
