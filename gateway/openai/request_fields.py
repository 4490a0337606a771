"""The fields of chats and completions: what each is here, of OpenAI's, vLLM's and SGLang's. Data alone.

docs/request-fields.md is made of this table (`dalsegno.request_fields_page`), `gateway.openai.known_fields`
refuses and accepts by it, and the tests send every field and hold its names against those servers' own lists.
Null is absent. Any other value is one of these:

    supported   the request's answer follows it
    accepted    with any value: it describes the client, or is a hint that changes no answer
    refused     but for the values that change nothing
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

CHAT: Final = "chat"
COMPLETIONS: Final = "completions"
BOTH: Final = (CHAT, COMPLETIONS)


class Support(StrEnum):
    """What a field is here."""

    SUPPORTED = "supported"
    ACCEPTED = "accepted"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Field:
    """One field.

    Attributes:
        servers: the servers that have it: `OpenAI`, `vLLM`, `SGLang`, or `ours`.
        routes: the routes that know it here: `chat` and `completions`.
        support: what it is here.
        note: in Markdown: what its values are, or what to do instead.
        neutral: of a refused one, the values that change nothing.
    """

    name: str
    servers: str
    routes: tuple[str, ...]
    support: Support
    note: str = ""
    neutral: tuple[Any, ...] = ()


_ALL = "OpenAI, vLLM, SGLang"
_OTHERS = "vLLM, SGLang"


def _supported(name: str, servers: str, note: str, routes: tuple[str, ...] = BOTH) -> Field:
    return Field(name, servers, routes, Support.SUPPORTED, note)


def _accepted(name: str, servers: str, note: str = "it describes the client") -> Field:
    return Field(name, servers, BOTH, Support.ACCEPTED, note)


def _refused(name: str, servers: str, *neutral: Any, note: str = "", routes: tuple[str, ...] = BOTH) -> Field:
    return Field(name, servers, routes, Support.REFUSED, note, neutral)


_REASONING = "[reasoning](http.md#reasoning)"
_GUIDES = "[structured outputs](http.md#structured-outputs)"
FIELDS: Final = (
    # ---- the question ----------------------------------------------------------------------------------
    _supported("model", _ALL, "required; at most 256 characters"),
    _supported(
        "messages", _ALL,
        "required; `role` is one of `system`, `developer`, `user`, `assistant`, `tool`, `function`; "
        "`content` is a string or parts; `tool_calls` and `tool_call_id` as with [tools](http.md#tools)",
        (CHAT,),
    ),
    _supported(
        "prompt", _ALL,
        "required; a string, an array of token ids, or an array of either; no chat template", (COMPLETIONS,),
    ),
    _supported(
        "modalities", "OpenAI",
        'the outputs of the answer, by default `["text"]`; `["image"]` or `["text", "image"]` of '
        '[a model that draws](http.md#images-in-chats); `["text", "audio"]` of '
        "[a model that speaks](http.md#sound-in-chats)",
        (CHAT,),
    ),
    _supported(
        "audio", "OpenAI",
        'with `"audio"` in `modalities`: the `format` and the `voice` of [the sound](http.md#sound-in-chats)',
        (CHAT,),
    ),
    _supported("tools", _ALL, "up to 128 functions, of 128 KiB together: [tools](http.md#tools)", (CHAT,)),
    _supported(
        "tool_choice", _ALL,
        '`"auto"`, `"none"`, `"required"`, or one function; the latter two need `tools`', (CHAT,),
    ),
    _supported("parallel_tool_calls", _ALL, "a boolean; `false`: at most one call", (CHAT,)),
    _supported("chat_template_kwargs", _OTHERS, f"variables of the chat template: {_REASONING}", (CHAT,)),
    _supported(
        "truncate_prompt_tokens", "vLLM",
        "keep at most so many tokens of the prompt; `-1`: what the model takes",
    ),
    _supported(
        "truncation_side", "vLLM",
        "`left` keeps the last tokens, `right` the first; of a chat only `left`. Default: the tokenizer's",
    ),
    _supported("cache_salt", _OTHERS, "the prompt's cache is shared only with requests of the same salt"),
    # ---- reasoning -------------------------------------------------------------------------------------
    _supported("reasoning_effort", _ALL, f"`none` to `xhigh`: {_REASONING}", (CHAT,)),
    _supported("enable_thinking", "ours", f"Qwen's; {_REASONING}", (CHAT,)),
    _supported("thinking_budget", "ours", f"Qwen's; {_REASONING}", (CHAT,)),
    _supported("thinking_token_budget", "vLLM", "the same as `thinking_budget`", (CHAT,)),
    _supported("separate_reasoning", "SGLang", f"a boolean: where the {_REASONING} is", (CHAT,)),
    _supported("include_reasoning", "vLLM", f"a boolean: where the {_REASONING} is", (CHAT,)),
    # ---- the end of the prompt -------------------------------------------------------------------------
    _supported(
        "continue_final_message", _OTHERS,
        "`true`: the last message is the assistant's, and the answer [continues it](http.md#begun-answers)",
        (CHAT,),
    ),
    _supported(
        "add_generation_prompt", "vLLM",
        "`false`: the prompt ends behind the last message; not `true` with `continue_final_message`",
        (CHAT,),
    ),
    # ---- structured outputs ----------------------------------------------------------------------------
    _supported("response_format", _ALL, f"`text`, `json_object` or `json_schema`: {_GUIDES}"),
    _supported("guide", "ours", f"more {_GUIDES} than `response_format` has"),
    _supported("structured_outputs", "vLLM", _GUIDES),
    _supported("guided_json", "vLLM", f"{_GUIDES}, as older versions have them"),
    _supported("guided_regex", "vLLM", "as above"),
    _supported("guided_choice", "vLLM", "as above"),
    _supported("guided_grammar", "vLLM", "as above"),
    _supported("json_schema", "SGLang", _GUIDES),
    _supported("regex", "SGLang", _GUIDES),
    _supported("ebnf", "SGLang", f"{_GUIDES}; a grammar of llguidance's Lark"),
    # ---- sampling --------------------------------------------------------------------------------------
    _supported("n", _ALL, "the number of answers to each prompt; 1 or more"),
    _supported("best_of", "OpenAI, SGLang", "must equal `n`, or 1 without `n`", (COMPLETIONS,)),
    _supported("max_tokens", _ALL, "1 or more; for completions with `echo` also 0"),
    _supported("max_completion_tokens", _ALL, "takes precedence over `max_tokens`", (CHAT,)),
    _supported("min_tokens", _OTHERS, "at most the limit"),
    _supported("temperature", _ALL, "0 to 100"),
    _supported("top_p", _ALL, "above 0, to 1"),
    _supported("top_k", _OTHERS, "0 and -1 are off"),
    _supported("min_p", _OTHERS, "0 to 1"),
    _supported("seed", _ALL, "the same seed gives the same answer"),
    _supported("presence_penalty", _ALL, "-2 to 2"),
    _supported("frequency_penalty", _ALL, "-2 to 2"),
    _supported("repetition_penalty", _OTHERS, "0.01 to 100"),
    _supported("logit_bias", _ALL, "from token ids to -100 to 100"),
    _supported("bad_words", "vLLM", "up to 256 strings, or arrays of token ids"),
    _supported(
        "allowed_token_ids", "vLLM",
        "up to 8192 token ids: no others are chosen, those that end an answer included",
    ),
    _supported("stop", _ALL, "a string, or up to 16"),
    _supported("stop_token_ids", _OTHERS, "up to 256"),
    _supported("ignore_eos", _OTHERS, "a boolean: the model's end tokens do not end the answer"),
    # ---- the answer ------------------------------------------------------------------------------------
    _supported(
        "logprobs", _ALL,
        "chat: a boolean; completions: the number of the likeliest tokens, 0 to 20 (OpenAI's: 5)",
    ),
    _supported("top_logprobs", _ALL, "the likeliest tokens to list, 0 to 20; needs `logprobs`", (CHAT,)),
    _supported("echo", _ALL, "a boolean; `true`: the prompt precedes the answer", (COMPLETIONS,)),
    _supported(
        "stream", _ALL, "server-sent events; their `id` is for [resuming](http.md#resuming-a-stream)"
    ),
    _supported(
        "stream_options", _ALL,
        "`include_usage`, and beside it vLLM's `continuous_usage_stats`: every event has the counts so far; "
        "needs `stream`",
    ),
    _supported(
        "return_tokens_as_token_ids", "vLLM",
        "`true`: tokens with log probabilities are written as `token_id:5`, not as their text",
    ),
    _supported(
        "return_token_ids", _OTHERS,
        "`prompt_token_ids` of the prompt, and `token_ids` of each answer: [token ids](http.md#token-ids)",
    ),
    # ---- the request -----------------------------------------------------------------------------------
    _supported(
        "request_id", "vLLM",
        "the request's [id](http.md#request_id-and-retries), which is the answer's `id`",
    ),
    _supported("priority", _OTHERS, "-100 to 100: [priority](http.md#priority)"),
    _supported("timeout_s", "ours", "the [time limit](http.md#time-limits) in seconds"),
    _supported("linger_s", "ours", "the [disconnect grace](http.md#resuming-a-stream) in seconds"),
    _supported(
        "options", "ours",
        "[the options](http.md#get-v1modelsmodel) of the model's family; each may also be a field of its own",
    ),
    _accepted("user", _ALL),
    _accepted("metadata", "OpenAI"),
    _accepted("safety_identifier", "OpenAI"),
    _accepted("prompt_cache_key", "OpenAI", "a hint; what is cached is found by its content"),
    _accepted("prompt_cache_retention", "OpenAI", "a hint"),
    _accepted("prompt_cache_options", "OpenAI", "a hint"),
    _accepted("session_id", _OTHERS),
    # ---- refused: OpenAI's -----------------------------------------------------------------------------
    _refused("store", "OpenAI", False, note="use `POST /v1/responses`"),
    _refused("service_tier", "OpenAI", "auto", "default"),
    _refused("functions", "OpenAI", [], note="use `tools`", routes=(CHAT,)),
    _refused("function_call", "OpenAI", "none", "auto", note="use `tool_choice`", routes=(CHAT,)),
    _refused("prediction", "OpenAI", routes=(CHAT,)),
    _refused("web_search_options", "OpenAI", routes=(CHAT,)),
    _refused("moderation", "OpenAI", routes=(CHAT,)),
    _refused("verbosity", "OpenAI", "medium", routes=(CHAT,)),
    _refused("suffix", _ALL, "", routes=(COMPLETIONS,)),
    # ---- refused: vLLM's and SGLang's ------------------------------------------------------------------
    _refused("use_beam_search", "vLLM", False),
    _refused("length_penalty", "vLLM", 1),
    _refused("include_stop_str_in_output", "vLLM", False),
    _refused("no_stop_trim", "SGLang", False),
    _refused("stop_regex", "SGLang", [], note="use `guide`, or `stop`"),
    _refused("skip_special_tokens", _OTHERS, True),
    _refused("spaces_between_special_tokens", "vLLM", True),
    _refused("prompt_logprobs", "vLLM", note="use `echo` with `logprobs`"),
    _refused("logprob_token_ids", "vLLM"),
    _refused("add_special_tokens", "vLLM", False, note="a chat template writes them", routes=(CHAT,)),
    _refused("add_special_tokens", "vLLM", True, note="send token ids for other ones", routes=(COMPLETIONS,)),
    _refused("echo", "vLLM", False, routes=(CHAT,)),
    _refused("documents", "vLLM", routes=(CHAT,)),
    _refused("chat_template", "vLLM", note="serve a checkpoint with it", routes=(CHAT,)),
    _refused("stream_reasoning", "SGLang", True, routes=(CHAT,)),
    _refused("thinking", "SGLang", note="use `enable_thinking`", routes=(CHAT,)),
    _refused("thinking_token_budget", "vLLM", routes=(COMPLETIONS,)),
    _refused("task", "SGLang", routes=(CHAT,)),
    _refused("media_io_kwargs", "vLLM", routes=(CHAT,)),
    _refused("mm_processor_kwargs", _OTHERS),
    _refused("images_config", "SGLang"),
    _refused("video_config", "SGLang", routes=(CHAT,)),
    _refused("max_dynamic_patch", "SGLang", routes=(CHAT,)),
    _refused("min_dynamic_patch", "SGLang", routes=(CHAT,)),
    _refused("use_audio_in_video", "SGLang", False, routes=(CHAT,)),
    _refused("mm_payload", "vLLM"),
    _refused("return_mm_kwargs", "vLLM", False),
    _refused("prompt_embeds", "vLLM", routes=(COMPLETIONS,)),
    _refused("input_ids", "SGLang", note="use `/v1/completions` with token ids", routes=(CHAT,)),
    _refused("return_token_offsets", "vLLM", False),
    _refused("return_prompt_text", "vLLM", False, routes=(CHAT,)),
    _refused("return_prompt_token_ids", "SGLang", False, routes=(CHAT,)),
    _refused("return_meta_info", "SGLang", False, routes=(CHAT,)),
    _refused("return_input_ids_in_sglext", "SGLang", False, routes=(CHAT,)),
    _refused("return_output_ids_in_sglext", "SGLang", False, routes=(CHAT,)),
    _refused("return_hidden_states", "SGLang", False, note="use `/v1/embeddings` or `/generate`"),
    _refused("return_cached_tokens_details", "SGLang", False),
    _refused("return_spec_tokens_details", "SGLang", False),
    _refused("return_weight_versions", "vLLM", False),
    _refused("return_routed_experts", "SGLang", False),
    _refused("return_sampling_mask", "SGLang", False, routes=(CHAT,)),
    _refused("return_flat_raw_output_top_logprobs", "SGLang", False, routes=(CHAT,)),
    _refused("return_flat_raw_top_logprobs_b64", "SGLang", False, routes=(CHAT,)),
    _refused("sampling_logprobs_mode", "SGLang", routes=(CHAT,)),
    _refused("routed_experts_start_len", "SGLang", 0),
    _refused("routed_experts_prompt_start", "vLLM", 0),
    _refused("repetition_detection", "vLLM"),
    _refused("stream_interval", "vLLM", 1),
    _refused("watermarking", "vLLM", False),
    _refused("watermark", "SGLang"),
    _refused("custom_logit_processor", "SGLang"),
    _refused("custom_params", "SGLang"),
    _refused("custom_labels", "SGLang", routes=(COMPLETIONS,)),
    _refused("vllm_xargs", "vLLM"),
    _refused("kv_transfer_params", "vLLM"),
    _refused("ec_transfer_params", "vLLM"),
    _refused("lora_path", "SGLang", note="name the adapter in `model`"),
    _refused("lora", "ours", note="mini-sglang's; name the adapter in `model`"),
    _refused("session_params", "SGLang"),
    _refused("rid", "SGLang", note="use `request_id`"),
    _refused("extra_key", "SGLang", note="use `cache_salt`"),
    _refused("data_parallel_rank", "SGLang"),
    _refused("bootstrap_host", "SGLang"),
    _refused("bootstrap_port", "SGLang"),
    _refused("bootstrap_room", "SGLang"),
    _refused("routed_dp_rank", "SGLang"),
    _refused("disagg_prefill_dp_rank", "SGLang"),
)  # fmt: skip


def of(route: str, support: Support) -> list[Field]:
    """The fields of a route that are supported, accepted or refused."""
    return [field for field in FIELDS if route in field.routes and field.support is support]


def neutral_values(route: str) -> Mapping[str, tuple[Any, ...]]:
    """The values that a route's refused fields may have, by name."""
    return {field.name: field.neutral for field in of(route, Support.REFUSED)}
