"""The fields of chats and completions that other servers list, by server and route.

OpenAI's are of its published schema, vLLM's of 0.33.0 and SGLang's of 0.5.23, from the classes
`ChatCompletionRequest` and `CompletionRequest` of their packages.
"""

_TEXTS = {
    ("OpenAI", "chat"): """
metadata top_logprobs temperature top_p user safety_identifier prompt_cache_key prompt_cache_retention
prompt_cache_options messages model service_tier modalities verbosity reasoning_effort
max_completion_tokens frequency_penalty presence_penalty web_search_options response_format audio store
moderation stream stop logit_bias logprobs max_tokens n prediction seed stream_options tools tool_choice
parallel_tool_calls function_call functions
""",
    ("OpenAI", "completions"): """
model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop
stream stream_options suffix temperature top_p user
""",
    ("vLLM", "chat"): """
messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
presence_penalty response_format seed stop stream stream_options temperature top_p tools tool_choice
reasoning_effort thinking_token_budget include_reasoning parallel_tool_calls user use_beam_search top_k
min_p repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos
min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt
continue_final_message add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs
mm_processor_kwargs structured_outputs priority request_id session_id return_tokens_as_token_ids
return_token_ids return_weight_versions routed_experts_prompt_start return_token_offsets
return_prompt_text mm_payload return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params
vllm_xargs repetition_detection stream_interval
""",
    ("vLLM", "completions"): """
model prompt echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
stream_options suffix temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking
length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs
logprob_token_ids bad_words prompt_embeds add_special_tokens response_format structured_outputs priority
request_id session_id return_tokens_as_token_ids return_token_ids return_weight_versions
routed_experts_prompt_start return_token_offsets mm_payload return_mm_kwargs cache_salt
kv_transfer_params ec_transfer_params vllm_xargs repetition_detection thinking_token_budget
stream_interval
""",
    ("SGLang", "chat"): """
messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
presence_penalty response_format seed stop stream stream_options temperature top_p user tools tool_choice
parallel_tool_calls return_hidden_states return_routed_experts routed_experts_start_len
return_cached_tokens_details return_spec_tokens_details return_prompt_token_ids return_token_ids
return_meta_info return_input_ids_in_sglext return_output_ids_in_sglext return_sampling_mask
sampling_logprobs_mode return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64
reasoning_effort thinking task top_k min_p min_tokens regex ebnf repetition_penalty stop_token_ids
stop_regex no_stop_trim ignore_eos continue_final_message skip_special_tokens lora_path session_id
session_params separate_reasoning stream_reasoning chat_template_kwargs max_dynamic_patch
min_dynamic_patch use_audio_in_video images_config video_config mm_processor_kwargs
custom_logit_processor custom_params watermark input_ids rid extra_key cache_salt priority
data_parallel_rank bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank
""",
    ("SGLang", "completions"): """
model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop
stream stream_options suffix temperature top_p user return_hidden_states return_routed_experts
routed_experts_start_len return_cached_tokens_details return_spec_tokens_details return_token_ids top_k
min_p min_tokens json_schema regex ebnf repetition_penalty stop_token_ids stop_regex no_stop_trim
ignore_eos skip_special_tokens lora_path session_id session_params response_format custom_params
custom_logit_processor watermark images_config mm_processor_kwargs data_parallel_rank rid extra_key
cache_salt priority custom_labels bootstrap_host bootstrap_port bootstrap_room routed_dp_rank
disagg_prefill_dp_rank
""",
}
LISTS = {key: text.split() for key, text in _TEXTS.items()}
