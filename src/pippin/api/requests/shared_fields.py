"""Fields that several endpoints share, most of which clients of other servers send."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from msgspec import Meta

from pippin.api.requests import fields as table
from pippin.api.requests.fields import (
    EFFORT,
    Fields,
    Unused,
    ValueKind,
    ignored_field,
    members,
    refused_field,
)


def _each(of: dict[str, Unused]) -> Fields:
    """By names, of which several have one reason."""
    return {name: kind for names, kind in of.items() for name in names.split()}


def _regex_of(choices: list[str]) -> str:
    """A regular expression of literal choices."""
    return "|".join("".join(map(_literal, choice)) for choice in choices)


def _literal(character: str) -> str:
    if character.isalnum() or not character.isascii():
        return character
    return f"\\x{ord(character):02x}"


def _same_as(ours: str) -> ValueKind:
    return replace(table.GENERATION[ours], ours=ours)


_CHOICES = ValueKind(
    "a list of at least one string",
    Annotated[list[str], Meta(min_length=1)],
    ours="regex",
    convert=_regex_of,
)
SAME: Fields = {  # by other names
    "repeat_penalty": _same_as("repetition_penalty"),
    "guided_json": _same_as("json_schema"),
    "guided_regex": _same_as("regex"),
    "guided_grammar": _same_as("ebnf"),
    "grammar": _same_as("ebnf"),
    "guided_choice": _CHOICES,
    "n_predict": table.integer_from(-1, ours="max_tokens", unset=-1),  # -1: as many as fit
    "n_cmpl": _same_as("n"),
    "structured_outputs": table.lifted(
        json=_same_as("json_schema"),
        regex=table.STRUCTURE["regex"],
        grammar=_same_as("ebnf"),
        choice=_CHOICES,
        json_object=replace(
            table.BOOLEAN, ours="json_schema", unset=False, convert=lambda _: {"type": "object"}
        ),
        disable_any_whitespace=ignored_field("JSON is written on one line"),
        disable_additional_properties=ignored_field("objects are closed"),
        whitespace_pattern=ignored_field("JSON is written on one line"),
        disable_fallback=ignored_field("there is one grammar engine"),
    ),
}
REASONING: Fields = {
    "enable_thinking": table.BOOLEAN,
    "think": table.BOOLEAN,
    "thinking": ValueKind(
        "true, false, or an object with a `type` of enabled, disabled, adaptive or auto",
        bool | dict[str, Any],
    ),
    "reasoning": members(
        effort=EFFORT,
        enabled=table.BOOLEAN,
        exclude=ignored_field("reasoning is always returned", False),
        max_tokens=ignored_field("reasoning has no budget of its own"),
        summary=ignored_field("reasoning is returned whole"),
    ),
    "include_reasoning": ignored_field("reasoning is always returned", True),
    "separate_reasoning": ignored_field("reasoning is always returned apart", True),
    "stream_reasoning": ignored_field("reasoning is always streamed", True),
    "reasoning_format": ignored_field("reasoning is always returned apart"),
    **_each(
        {
            "reasoning_budget thinking_budget thinking_token_budget": ignored_field(
                "reasoning has no budget of its own"
            )
        }
    ),
}
HINTS: Fields = {
    **_each(
        {
            # Ollama's options, which Open WebUI sends to every server as they are set.
            "keep_alive num_ctx num_gpu num_batch num_thread use_mmap use_mlock": ignored_field(
                "the model and its context length are set when the server starts"
            ),
            "num_keep n_keep n_discard": ignored_field("a context is never shifted"),
            "background_tasks chat_id features files filter_ids id model_item params parent_id "
            "tool_ids tool_servers variables": ignored_field("it is Open WebUI's own"),
            "provider models route transforms plugins session_id "
            # What tells vLLM's and SGLang's servers from one another:
            "bootstrap_host bootstrap_port bootstrap_room data_parallel_rank routed_dp_rank "
            "disagg_prefill_dp_rank ec_transfer_params kv_transfer_params session_params "
            "vllm_xargs": ignored_field("requests are not routed to other servers"),
            "images_config max_dynamic_patch media_io_kwargs min_dynamic_patch mm_processor_kwargs "
            "return_mm_kwargs use_audio_in_video": ignored_field("only text is read"),
            # llama.cpp's; `speculate` is ours.
            "ngram_corpus_id speculative.n_max speculative.n_min speculative.p_min "
            "speculative.type speculative.ngram_size_n speculative.ngram_size_m "
            "speculative.ngram_m_hits": ignored_field("drafts do not change a reply"),
            "request_id rid": ignored_field("the request's id is its x-request-id header"),
            "id_slot slot_id": ignored_field("the server assigns slots", -1),
            "custom_labels extra_headers extra_query": ignored_field("it is the client's own"),
        }
    ),
    # Such an object has been replaced by its members.
    "extra_body": ValueKind(
        "an object whose members are fields of this request", None, {"type": "object"}
    ),
    "usage": ignored_field("usage is always returned"),
    "skip_special_tokens": ignored_field("special tokens are not in a reply's text", True),
    "spaces_between_special_tokens": ignored_field("special tokens are not in a reply's text"),
    "guided_decoding_backend": ignored_field("there is one grammar engine"),
    "guided_whitespace_pattern": ignored_field("JSON is written on one line"),
    "repeat_last_n": ignored_field("penalties count the whole text"),
    "cache_prompt": ignored_field("every prefix is cached", True),
    "n_cache_reuse": ignored_field("every prefix is cached"),
    "timings_per_token": ignored_field("the log has a request's times", False),
    "return_progress": ignored_field("the page at / shows progress", False),
    "litellm_metadata": ignored_field("it is LiteLLM's own"),
    "return_cached_tokens_details": ignored_field("usage has them"),
    "stream_interval": ignored_field("tokens are sent as they arrive"),
    "backend_sampling": ignored_field("the server decides where it samples"),
    "t_max_prompt_ms": ignored_field("use timeout"),
}
CHANGING: Fields = {  # what would change a reply, and is not there: accepted where it is off
    **_each(
        {
            "return_token_ids return_tokens return_prompt_token_ids return_token_offsets "
            "return_tokens_as_token_ids": refused_field("use /tokenize for tokens", False),
            "return_hidden_states return_meta_info return_prompt_text return_routed_experts "
            "post_sampling_probs": refused_field("replies do not have it", False),
            "routed_experts_prompt_start routed_experts_start_len": refused_field(
                "replies do not have it", 0
            ),
            "include_stop_str_in_output no_stop_trim": refused_field(
                "a stop string is never in a reply", False
            ),
        }
    ),
    "use_beam_search": refused_field("there is no beam search", False),
    "length_penalty": ignored_field("there is no beam search", 1, 1.0),
    "early_stopping": ignored_field("there is no beam search", False),
    "response_fields": ignored_field("a reply has all its fields", []),
    "n_probs": refused_field("use logprobs", 0),
    "logprob_token_ids": refused_field("use top_logprobs"),
    "prompt_logprobs": refused_field("use echo and logprobs of /v1/completions"),
    "allowed_token_ids": refused_field("use regex, or logit_bias"),
    "bad_words": refused_field("use logit_bias", []),
    "stop_regex": refused_field("use stop", "", []),
    "n_indent": refused_field("use stop", 0),
    "t_max_predict_ms": refused_field("use timeout", 0, -1),
    "repetition_detection": refused_field("use repetition_penalty"),
    "logits_processors": refused_field("requests run no code", []),
    "custom_logit_processor": refused_field("requests run no code"),
    "custom_params": ignored_field("requests run no code"),
    "watermarking": refused_field("there is no watermark", False),
    "lora": refused_field("there are no adapters", []),
    "lora_path": refused_field("there are no adapters", ""),
    "extra_key": refused_field("use cache_salt"),
    "task": refused_field("ask for it in the prompt"),
    "image_data": refused_field("only text is read", []),
    "truncation_side": refused_field("the last tokens of a prompt are kept", "left"),
}
_NO_SAMPLER = "there is no such sampler"
SAMPLERS: Fields = {  # of llama.cpp and others: accepted where they are off
    "samplers": ignored_field("samplers run in one order"),
    **_each(
        {
            "dry_allowed_length dry_base dry_penalty_last_n dry_sequence_breakers adaptive_decay "
            "dynatemp_exponent mirostat_eta mirostat_tau penalize_nl xtc_threshold": ignored_field(
                "it sets a sampler that there is not"
            ),
            "dry_multiplier dynatemp_range top_a xtc_probability": refused_field(
                _NO_SAMPLER, 0, 0.0
            ),
            "tfs tfs_z typical_p": refused_field(_NO_SAMPLER, 1, 1.0),
            "mirostat min_keep": refused_field(_NO_SAMPLER, 0),
            "adaptive_target top_n_sigma": refused_field(_NO_SAMPLER, -1, -1.0),
        }
    ),
}
PROMPT: Fields = {  # vLLM's
    "truncate_prompt_tokens": ValueKind(
        "an integer of at least 1, or -1", Annotated[int, Meta(ge=-1)]
    ),
    "add_special_tokens": table.BOOLEAN,
}
# Of chats, text completions and responses:
GENERATION: Fields = {**SAME, **HINTS, **SAMPLERS, **CHANGING}


ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_ONLY = "only text is generated"
NO_SERVICE = "this server runs nothing beside the model"
CALLING: table.Fields = {
    **table.TOOLS,
    "tool_choice": ValueKind(
        "auto, none, required, or an object: the tool to call, or `allowed_tools`",
        str | dict[str, Any],
    ),
    "parallel_tool_calls": table.BOOLEAN,
}
IGNORED: table.Fields = {  # by chat completions and by responses
    "moderation": ignored_field("there is no moderation"),
    "prompt_cache_options": ignored_field("caching is automatic", {"mode": "implicit"}),
    "prompt_cache_retention": ignored_field("the cache is in memory", "in_memory"),
    "service_tier": ignored_field("there is one tier", "auto", "default"),
}
VERBOSITY = ignored_field("ask for it in the prompt", "medium")
