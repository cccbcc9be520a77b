"""Fields that other servers' chat completions have, each with the value that those servers default
to, as their sources have them (vLLM's and SGLang's protocol.py, llama.cpp's server-task.cpp)."""

from __future__ import annotations

from typing import Any


def _each(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


_OPENAI: dict[str, Any] = {
    **_each(0.0, "frequency_penalty presence_penalty"),
    **_each(
        None,
        "logit_bias max_tokens max_completion_tokens response_format seed "
        "stream_options tools reasoning_effort user",
    ),
    **_each(False, "logprobs stream"),
    "n": 1,
    "stop": [],
    **_each(1.0, "temperature top_p"),
    "parallel_tool_calls": True,
}
VLLM: dict[str, Any] = {
    **_OPENAI,
    **_each(
        None,
        "top_logprobs thinking_token_budget watermarking truncate_prompt_tokens "
        "truncation_side prompt_logprobs logprob_token_ids allowed_token_ids documents "
        "chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs "
        "structured_outputs session_id return_tokens_as_token_ids return_token_ids "
        "return_prompt_text cache_salt kv_transfer_params ec_transfer_params vllm_xargs "
        "repetition_detection stream_interval guided_json guided_regex guided_choice "
        "guided_grammar guided_decoding_backend guided_whitespace_pattern "
        "logits_processors",
    ),
    **_each(
        True,
        "include_reasoning skip_special_tokens spaces_between_special_tokens "
        "add_generation_prompt return_mm_kwargs",
    ),
    **_each(
        False,
        "use_beam_search include_stop_str_in_output ignore_eos echo "
        "continue_final_message add_special_tokens return_token_offsets early_stopping",
    ),
    **_each(0, "top_k min_tokens priority routed_experts_prompt_start"),
    "min_p": 0.0,
    **_each(1.0, "repetition_penalty length_penalty"),
    **_each([], "stop_token_ids bad_words"),
    "request_id": "chatcmpl-1",
}
SGLANG: dict[str, Any] = {
    **_OPENAI,
    **_each(
        False,
        "return_hidden_states return_routed_experts return_cached_tokens_details "
        "return_prompt_token_ids return_token_ids return_meta_info no_stop_trim "
        "ignore_eos continue_final_message use_audio_in_video",
    ),
    **_each(0, "routed_experts_start_len min_tokens"),
    **_each(
        None,
        "task regex ebnf stop_token_ids stop_regex lora_path session_id session_params "
        "chat_template_kwargs max_dynamic_patch min_dynamic_patch images_config "
        "custom_logit_processor custom_params input_ids rid extra_key cache_salt "
        "ngram_corpus_id priority bootstrap_host bootstrap_port bootstrap_room "
        "routed_dp_rank disagg_prefill_dp_rank data_parallel_rank custom_labels",
    ),
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    **_each(True, "skip_special_tokens separate_reasoning stream_reasoning"),
}
LLAMA_CPP: dict[str, Any] = {
    **_each(
        False,
        "timings_per_token stream return_tokens return_progress penalize_nl "
        "post_sampling_probs backend_sampling ignore_eos reasoning_in_content "
        "thinking_forced_open grammar_lazy",
    ),
    **_each(True, "cache_prompt parse_tool_calls"),
    **_each(-1, "n_predict t_max_predict_ms dry_penalty_last_n id_slot slot_id"),
    **_each(
        0,
        "n_indent n_keep n_discard n_cache_reuse mirostat min_keep n_probs speculative.n_min",
    ),
    **_each(1, "n_cmpl speculative.ngram_m_hits"),
    **_each(
        [],
        "response_fields stop lora image_data grammar_triggers preserved_tokens",
    ),
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    **_each(-1.0, "top_n_sigma adaptive_target"),
    **_each(
        0.0,
        "xtc_probability dynatemp_range frequency_penalty presence_penalty dry_multiplier",
    ),
    **_each(0.1, "xtc_threshold mirostat_eta"),
    **_each(1.0, "typical_p dynatemp_exponent repeat_penalty"),
    "temperature": 0.8,
    "repeat_last_n": 64,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_sequence_breakers": ["\n"],
    "mirostat_tau": 5.0,
    "adaptive_decay": 0.9,
    "samplers": ["top_k", "temperature"],
    **_each(None, "grammar json_schema"),
    "speculative.n_max": 16,
    "speculative.p_min": 0.75,
    "speculative.type": "none",
    "speculative.ngram_size_n": 12,
    "speculative.ngram_size_m": 48,
    "chat_format": "Content-only",
    "reasoning_format": "deepseek",
}
