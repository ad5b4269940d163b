"""Names that other engines have for arguments and fields, as data for the pages of `tools.other_engines`.

`octavo.core.absent` has the reasons for names that octavo does not have; the notes here are for names that it has.
"""

from __future__ import annotations

from typing import Final, NamedTuple

VLLM_ENGINE: Final = """
model tokenizer revision code_revision tokenizer_revision served_model_name hf_config_path hf_token hf_overrides
runner
convert task dtype seed max_model_len max_logprobs logprobs_mode quantization enforce_eager trust_remote_code
tokenizer_mode skip_tokenizer_init enable_prompt_embeds config_format generation_config override_generation_config
model_impl logits_processors io_processor_plugin enable_sleep_mode disable_sliding_window disable_cascade_attn
allowed_local_media_path allowed_media_domains pooler_config
load_format download_dir model_loader_extra_config ignore_patterns safetensors_load_strategy use_tqdm_on_load
pt_load_map_location structured_outputs_config guided_decoding_backend reasoning_parser
block_size gpu_memory_utilization kv_cache_memory_bytes swap_space kv_cache_dtype num_gpu_blocks_override
enable_prefix_caching prefix_caching_hash_algo cpu_offload_gb calculate_kv_scales kv_sharing_fast_prefill
mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size kv_offloading_size kv_offloading_backend
max_num_batched_tokens max_num_seqs max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold
num_lookahead_slots scheduler_delay_factor preemption_mode enable_chunked_prefill scheduling_policy
disable_hybrid_kv_cache_manager async_scheduling stream_interval scheduler_cls max_seq_len_to_capture
num_scheduler_steps disable_async_output_proc use_v2_block_manager
tensor_parallel_size pipeline_parallel_size decode_context_parallel_size prefill_context_parallel_size
data_parallel_size
data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port
data_parallel_backend data_parallel_hybrid_lb data_parallel_external_lb distributed_executor_backend nnodes node_rank
master_addr master_port enable_expert_parallel all2all_backend enable_dbo enable_eplb eplb_config
expert_placement_strategy max_parallel_loading_workers ray_workers_use_nsight disable_custom_all_reduce worker_cls
worker_extension_cls device
enable_lora enable_lora_bias max_loras max_lora_rank max_cpu_loras lora_dtype lora_extra_vocab_size
fully_sharded_loras default_mm_loras enable_prompt_adapter max_prompt_adapters max_prompt_adapter_token
limit_mm_per_prompt media_io_kwargs mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type
mm_encoder_tp_mode mm_encoder_attn_backend interleave_mm_strings skip_mm_profiling enable_mm_embeds video_pruning_rate
speculative_config speculative_model num_speculative_tokens
kv_transfer_config kv_events_config ec_transfer_config compilation_config optimization_level cuda_graph_sizes
cudagraph_capture_sizes max_cudagraph_capture_size
attention_backend attention_config additional_config rope_scaling rope_theta
disable_log_stats otlp_traces_endpoint collect_detailed_traces show_hidden_metrics_for_version
performance_mode quantization_config allow_deprecated_quantization kv_cache_dtype_skip_layers
enable_return_routed_experts enable_cumem_allocator fail_on_environ_validation
offload_backend offload_group_size offload_num_in_group offload_prefetch_step offload_params cpu_offload_params
mamba_cache_mode mamba_backend enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds gdn_prefill_backend
ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold cp_kv_cache_interleave_size
dcp_kv_cache_interleave_size dcp_comm_backend enable_elastic_ep enable_ep_weight_filter num_redundant_experts
eplb_window_size eplb_step_interval eplb_log_balancedness disable_nccl_for_dp_synchronization
cpu_distributed_timeout_seconds distributed_timeout_seconds data_parallel_multi_port_external_lb numa_bind
numa_bind_nodes numa_bind_cpus
enable_tower_connector_lora specialize_active_lora lora_target_modules enable_mixed_moe_lora_format
language_model_only mm_encoder_only mm_tensor_ipc mm_shm_cache_max_object_size_mb mm_encoder_attn_dtype
disable_mm_preprocessor_cache enable_multimodal_encoder_data_parallel
spec_method spec_model spec_tokens reasoning_parser_plugin reasoning_config weight_transfer_config profiler_config
moe_backend linear_backend kernel_config enable_flashinfer_autotune ir_op_priority safetensors_prefetch_num_threads
safetensors_prefetch_block_size enable_layerwise_nvtx_tracing cudagraph_metrics enable_mfu_metrics kv_cache_metrics
kv_cache_metrics_sample
max_num_queued_reqs max_num_queued_tokens max_num_active_seqs max_num_scheduled_tokens scheduler_reserve_full_isl
prefill_schedule_interval long_prefill_token_threshold_adaptive disable_chunked_mm_input device_memory_utilization
device_ids renderer_num_workers model_class_overrides use_fp64_gumbel return_sampling_mask enable_trace_replay
aux_output_config watermark_config diffusion_config per_request_spec_decode_metrics custom_histogram_buckets
enable_logging_iteration_details watchdog_config monokernel sleep_mode_backend logging_config log_level watermark
sleep_mode_offload_cudagraph sleep_preserve_parameter_names
prefix_cache_retention_interval prefix_match_unit enable_mamba_shared_prefix_checkpoint mamba_ssu_algorithm
use_replayssm replayssm_buffer_len swa_bounded_replay kda_decode_backend kda_prefill_backend
sparse_indexer_topk_backend enable_flash_late_interaction jit_monitor_mode jit_monitor_verbose
max_lora_cls_labels enable_moe_shared_loras video_pruning_method mm_hasher_algorithm mm_device_do_normalize
mm_processor_device mm_ipc_gpu_memory_gb mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
mm_encoder_fp8_scale_save_margin dcp_q_replicate dp_sync_interval ec_manager_config elastic_ep_max_dp_size
enable_batch_sharded_sampling enable_fault_tolerance fault_tolerance_config enable_hc_sp enable_nccl_comm_suspend
enable_scale_out enable_shm_tensor_arena engram_config model_weights mamba_config enable_mm_processor_stats
"""

VLLM_SERVER: Final = """
host port uds root_path api_key allow_credentials allowed_origins allowed_methods allowed_headers middleware
ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers enable_ssl_refresh
h11_max_incomplete_event_size h11_max_header_count
chat_template chat_template_content_format default_chat_template_kwargs reasoning_effort_map
trust_request_chat_template response_role
lora_modules prompt_adapters return_tokens_as_token_ids enable_auto_tool_choice tool_call_parser tool_parser_plugin
tool_server exclude_tools_when_tool_choice_none
enable_log_requests disable_log_requests enable_log_outputs max_log_len log_config_file log_error_stack
uvicorn_log_level disable_uvicorn_access_log
enable_prompt_tokens_details enable_force_include_usage enable_server_load_tracking enable_request_id_headers
enable_tokenizer_info_endpoint disable_fastapi_docs api_server_count headless disable_frontend_multiprocessing
shutdown_timeout enable_per_request_metrics fingerprint_mode fingerprint_value enable_log_deltas
disable_access_log_for_endpoints enable_offline_docs tokens_only grpc data_parallel_supervisor_port
dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s
sse_keep_alive_interval tool_strict_level trust_request_mm_kwargs anthropic_disabled_thinking_effort cohere_format
cohere_is_reasoning_model grpc_port aggregate_engine_logging
"""

VLLM_SAMPLING: Final = """
n best_of presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed use_beam_search
length_penalty early_stopping stop stop_token_ids bad_words include_stop_str_in_output ignore_eos max_tokens
min_tokens
logprobs prompt_logprobs logprob_token_ids flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens
output_kind logits_processors truncate_prompt_tokens structured_outputs guided_decoding logit_bias allowed_token_ids
extra_args thinking_token_budget repetition_detection skip_reading_prefix_cache prompt_logprob_token_ids
prompt_logprob_start trace_decode_token_ids
"""

VLLM_REQUEST: Final = """
best_of use_beam_search length_penalty top_k min_p repetition_penalty stop_token_ids include_stop_str_in_output
ignore_eos
min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs allowed_token_ids
bad_words echo add_generation_prompt continue_final_message add_special_tokens documents chat_template
chat_template_kwargs mm_processor_kwargs structured_outputs guided_json guided_regex guided_choice guided_grammar
guided_decoding_backend guided_whitespace_pattern priority request_id logits_processors return_tokens_as_token_ids
return_token_ids return_weight_versions cache_salt kv_transfer_params vllm_xargs include_reasoning thinking_token_budget
prompt_embeds logprob_token_ids repetition_detection ec_transfer_params stream_interval truncation_side session_id
watermarking return_prompt_text return_token_offsets return_mm_kwargs routed_experts_prompt_start mm_payload
"""

VLLM_PATHS: Final = """
/v1/models /v1/chat/completions /v1/chat/completions/batch /v1/completions /v1/responses /v1/messages
/v1/messages/count_tokens /v1/embeddings /v2/embed /pooling /classify /score /v1/score /rerank /v1/rerank /v2/rerank
/generative_scoring /v1/decisions
/v1/audio/transcriptions /v1/audio/translations /v1/realtime /tokenize /detokenize /tokenizer_info
/inference/v1/generate
/v1/load_lora_adapter /v1/unload_lora_adapter /health /ping /load /version /metrics /start_profile /stop_profile
/reset_prefix_cache /reset_mm_cache /reset_encoder_cache /sleep /wake_up /is_sleeping /pause /resume /is_paused
/abort_requests /inference/v1/abort_requests /get_world_size /update_weights
/init_weight_transfer_engine /shutdown_weight_transfer_engine /start_weight_update /start_draft_weight_update
/finish_weight_update /update_weight_version /weight_info /weight_checker /release_kv_cache_memory /collective_rpc
/server_info /kv_event_sources /scale_elastic_ep /is_scaling_elastic_ep /fault_tolerance/apply /fault_tolerance/status
/v1/chat/completions/render /v1/completions/render /v1/messages/render
/v1/chat/completions/derender /v1/completions/derender /invocations /v1/systemone /cohere/v2/chat
"""

VLLM_PATH_NOTES: Final = {
    "/start_profile": "with `--profiler-config`; the body has only `profile_prefix`",
    "/reset_prefix_cache": "409 while requests run; vLLM answers `success: false`",
    "/reset_mm_cache": "has no effect: images and sounds are kept only in the prefix cache",
    "/reset_encoder_cache": "as `/reset_mm_cache`",
    "/sleep": "by default open requests continue after `/wake_up`; vLLM ends them",
    "/generative_scoring": "with `item_first` a start token precedes the item; too long prompts are refused",
    "/v1/decisions": "of any model for chats; without `joint`",
    "/inference/v1/generate": "only text; `sampling_params` are those of completions",
    "/abort_requests": "ids are those of responses, or the engine's",
    "/inference/v1/abort_requests": "as `/abort_requests`: without ids all requests end",
    "/update_weights": "with `weight_dir`, the directory of a checkpoint, as prime-rl sends it; not `update_info`",
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), "the answer has the texts of documents, not their images"),
    "/finish_weight_update": "only labels the weights: they are in use when `/update_weights` answers",
}
"""What differs in endpoints of the same path."""

VLLM_NOTES: Final = {
    "model": "a directory in Hugging Face layout or a name on the hub; `octavo-tiny` by default",
    "quantization": "`int8`, `int4`, `int4-g128`, made while loading; leave it out for quantised checkpoints",
    "trust_remote_code": "has no effect: octavo never runs code from a checkpoint",
    "load_format": "`auto` (safetensors and PyTorch files) or `dummy`",
    "generation_config": "`none` instead of `vllm`",
    "gpu_memory_utilization": "on a CPU, the share of the machine's memory",
    "kv_cache_dtype": "also `int8`; scales are computed for each token and head, without calibration",
    "swap_space": "4 GiB by default; holds the blocks of preempted sequences",
    "preemption_mode": "`auto` takes the faster way",
    "num_lookahead_slots": "reserves slots; speculation does not need it",
    "scheduling_policy": "octavo has more policies",
    "watermark": "0.01 by default, at most 0.5; vLLM keeps no blocks free",
    "log_level": "`debug`, `info`, `warning` or `error`, in small letters",
    "device": "an NVIDIA GPU, or the CPU",
    "host": "127.0.0.1 by default; vLLM listens on all addresses",
    "max_loras": "only requests without an adapter overtake those that wait for a slot",
    "sse_keep_alive_interval": "15 seconds by default; vLLM sends no comments",
    "api_key": "guards all endpoints except health and version; `--api-key-file` has keys with rights",
    "allowed_origins": "none by default; vLLM allows all",
    "best_of": "vLLM no longer has it",
    "use_beam_search": "vLLM no longer has it; or `LLM.beam_search`, whose arguments are keywords",
    "length_penalty": "of beam search",
    "early_stopping": "of beam search",
    "logprobs": "-1 needs a `max_logprobs` that allows the whole vocabulary",
    "prompt_logprobs": "not in streams",
    "logit_bias": "refused beyond -100 and 100; vLLM clips it",
    "kv_events_config": "the same messages over ZeroMQ (extra `zmq`); also a stream of events, `GET /kv/events`",
    "kv_offloading_size": "shared by all engines of a server; `kv_disk` keeps blocks over restarts",
}
"""What differs in arguments and sampling parameters where the name is the same, or where octavo has another name."""

VLLM_REQUEST_NOTES: Final = {
    "cache_salt": "divides the cache of one API key; keys share a cache only within a group",
    "priority": "has an effect with `--scheduling-policy priority`",
    "guided_decoding_backend": "has no effect: octavo compiles all grammars with llguidance",
    "chat_template": "needs `--trust-request-chat-template`",
    "thinking_token_budget": "in chats; elsewhere use `reasoning_budget` in `structured_outputs`",
    "session_id": "has no effect: the requests of a conversation share cached prefixes by themselves",
    "return_token_ids": "returns the ids of prompt and output beside the text",
}


class Row(NamedTuple):
    """What another engine calls something, octavo's name (empty where there is none), and a note."""

    theirs: str
    ours: str
    note: str = ""


VLLM_INTERFACES: Final = (
    Row("vllm serve MODEL", "octavo serve MODEL", "listens on this machine only, unless `--host` says otherwise"),
    Row(
        "`vllm serve --kv-transfer-config …` and a proxy",
        "octavo serve --prefill 1 --decode 1, octavo serve --role …, octavo proxy",
        "on one machine or on several ([recipe](split.md))",
    ),
    Row(
        "vllm serve --speculative-config.method mtp",
        "octavo serve --speculative-config.method mtp",
        "every field of an object has such a flag",
    ),
    Row("python -m vllm.entrypoints.openai.api_server --model MODEL", "octavo serve MODEL"),
    Row("vllm bench", "octavo bench", "`serve`, `throughput`, `latency` and `startup`"),
    Row("vllm chat", "octavo chat --url http://127.0.0.1:8000", "without `--url` it loads the model itself"),
    Row("vllm run-batch", "octavo run-batch", "continues after an interruption"),
    Row("LLM", "LLM", "arguments by name; a refused prompt returns an output with `error`, the others continue"),
    Row("LLM.generate, LLM.chat", "LLM.generate, LLM.chat"),
    Row(
        "LLM.enqueue, LLM.enqueue_chat, LLM.wait_for_completion",
        "LLM.enqueue, LLM.enqueue_chat, LLM.wait_for_completion",
    ),
    Row("LLM.beam_search(prompts, params)", "LLM.beam_search(prompts, beam_width=4, …)", "returns outputs"),
    Row("LoRARequest(name, id, path)", "LoRARequest(name, id, path)", "identified by the digest of its files"),
    Row(
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING, VLLM_LORA_RESOLVER_CACHE_DIR",
        "--allow-runtime-lora-updating, --lora-resolver-cache-dir",
        "adapters are loaded only from that folder ([recipe](lora.md))",
    ),
    Row("LLM.from_engine_args, LLM.llm_engine", "LLM.from_engine_args, LLM.llm_engine"),
    Row(
        "LLM.get_tokenizer()",
        "LLM.get_tokenizer()",
        "has `apply_chat_template`, `encode`, `decode` and other methods of transformers; token ids are plain lists",
    ),
    Row(
        "EngineArgs, AsyncEngineArgs",
        "EngineArgs, AsyncEngineArgs",
        "one class; arguments by name, and attributes can be set",
    ),
    Row(
        "EngineArgs.add_cli_args, EngineArgs.from_cli_args, FlexibleArgumentParser",
        "EngineArgs.add_cli_args, EngineArgs.from_cli_args, FlexibleArgumentParser",
        "with any parser of argparse; without a flag, `OCTAVO_…` or the default holds",
    ),
    Row("LLMEngine.from_engine_args", "LLMEngine.from_engine_args", "and `add_request(id, prompt, params)`, `step`, …"),
    Row(
        "AsyncLLM.from_engine_args, AsyncLLMEngine.from_engine_args",
        "AsyncLLM.from_engine_args, AsyncLLMEngine.from_engine_args",
        "the first request starts the core process",
    ),
    Row("AsyncLLMEngine.shutdown()", "AsyncLLMEngine.shutdown()", "`await` it to wait for the end of the process"),
    Row("RequestOutputKind", "RequestOutputKind", "or `OutputKind`"),
    Row("TextPrompt, TokensPrompt, EmbedsPrompt", "TextPrompt, TokensPrompt, EmbedsPrompt", "or a `dict`"),
    Row("`multi_modal_uuids` of a prompt", "multi_modal_uuids", "has no effect: media are identified by their content"),
    Row("PoolerConfig", "PoolerConfig", "or a `dict`"),
    Row(
        "AsyncLLM.add_lora, AsyncLLM.remove_lora, AsyncLLM.list_loras",
        "AsyncLLM.add_lora, AsyncLLM.remove_lora, AsyncLLM.list_loras",
        "for added adapters; requests may name others",
    ),
    Row(
        "AsyncLLM.errored, AsyncLLM.dead_error, AsyncLLM.is_running, AsyncLLM.wait_for_requests_to_drain(), "
        "AsyncLLM.get_num_unfinished_requests(), AsyncLLM.get_supported_tasks()",
        "same",
    ),
    Row(
        "LLM.reset_mm_cache(), AsyncLLM.reset_mm_cache(), AsyncLLM.reset_encoder_cache()",
        "same",
        "have no effect: images and sounds are kept only in the prefix cache",
    ),
    Row("LLM.get_world_size()", "LLM.get_world_size()"),
    Row("LLM.get_metrics()", "LLM.get_metrics()", "counters, gauges, histograms and vectors"),
    Row("RequestOutput.metrics", "RequestOutput.metrics", "the same names (`first_token_ts`, …), and a timeline"),
    Row("PoolingOutput.data", "PoolingOutput.data", "a numpy array; in vLLM a tensor"),
    Row("variables `VLLM_…`", "OCTAVO_…", "one for each engine argument, such as `OCTAVO_MAX_NUM_SEQS`"),
    Row("`extra_body` of an OpenAI client", "extra_body", "with the fields below"),
)

LLAMA_CPP_FIELDS: Final = (
    Row("prompt", "prompt", "text, token ids, or a list; mixtures of both are refused"),
    Row("n_predict", "max_tokens", "16 by default in completions; for -1, use a chat and leave it out"),
    Row("temperature", "temperature", "1 by default, or the model's own; llama-server has 0.8"),
    Row("top_k", "top_k", "off by default, or the model's own; llama-server has 40"),
    Row("top_p", "top_p", "1 by default, or the model's own; llama-server has 0.95"),
    Row("min_p", "min_p", "0 by default; llama-server has 0.05"),
    Row("repeat_penalty", "repetition_penalty", "covers the whole prompt and output; there is no `repeat_last_n`"),
    Row("presence_penalty", "presence_penalty"),
    Row("frequency_penalty", "frequency_penalty"),
    Row("typical_p, dynatemp_*, dry_*, xtc_*, mirostat*, top_n_sigma, samplers", "", "not there"),
    Row("seed", "seed", "-1 means none"),
    Row("stop", "stop"),
    Row("ignore_eos", "ignore_eos"),
    Row("logit_bias", "logit_bias", 'an object of token ids, `{"15043": 1.0}`, from -100 to 100'),
    Row("`logit_bias` with `false`", "bad_words", "banned words; or a bias of -100"),
    Row("n_probs", "logprobs"),
    Row("n_cmpl", "n"),
    Row("stream", "stream", "events in OpenAI's format, ended by `[DONE]`"),
    Row("cache_prompt", "", "always on; `cache_salt` keeps a prompt's blocks apart"),
    Row("id_slot", "", "not there: there are no slots"),
    Row("n_keep, n_discard", "", "not there: octavo drops nothing from a context"),
    Row("grammar, json_schema", "structured_outputs", '`{"grammar": …}` or `{"json": …}`'),
    Row("response_format", "response_format"),
    Row("return_tokens", "return_token_ids"),
    Row("image_data, multimodal_data", "", "images are parts of a chat's messages ([recipe](images.md))"),
    Row("lora", "model", "the name of an adapter ([recipe](lora.md))"),
    Row("timings_per_token", "return_timings", "`usage.timings`, with the same names, when the answer is complete"),
    Row("return_progress", "", "not there; `GET /scheduler/timelines` has the events of a request"),
    Row("t_max_predict_ms", "", "not there; closing the connection ends the request"),
)

LLAMA_CPP_ENDPOINTS: Final = (
    Row("POST /completion", "POST /v1/completions", "with the fields below"),
    Row("POST /v1/chat/completions", "POST /v1/chat/completions"),
    Row("POST /v1/completions", "POST /v1/completions"),
    Row("GET /v1/models", "GET /v1/models"),
    Row("POST /tokenize", "POST /tokenize", "`prompt` instead of `content`"),
    Row("POST /detokenize", "POST /detokenize"),
    Row("POST /apply-template", "POST /tokenize", "with `messages`; it returns their token ids"),
    Row("GET /health", "GET /health"),
    Row("GET /metrics", "GET /metrics"),
    Row("GET /props", "GET /version", "and `octavo explain` on the command line"),
    Row("GET /slots", "GET /scheduler/timelines"),
    Row("POST /v1/responses", "POST /v1/responses"),
    Row("POST /v1/messages", "POST /v1/messages"),
    Row("POST /embedding", "POST /v1/embeddings", "`input` instead of `content`"),
    Row("POST /reranking", "POST /rerank"),
    Row("POST /infill", "POST /infill", "for llama.vim and llama.vscode ([fields](../reference/server.md#infill))"),
)
