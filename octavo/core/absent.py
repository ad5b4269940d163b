"""Options that users of vLLM type and octavo does not have, and what octavo says to each.

One table for flags, keywords, YAML keys, variables, sampling parameters and the reference page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Final

from octavo.errors import suggestion

_NOT_YET: Final = {
    "this about LoRA adapters is": "lora_modules lora_extra_vocab_size fully_sharded_loras default_mm_loras "
    "enable_lora_bias",
    "prompt adapters are": "enable_prompt_adapter prompt_adapters max_prompt_adapters max_prompt_adapter_token",
    "this about tools is": "tool_parser_plugin tool_server exclude_tools_when_tool_choice_none",
    "this about reasoning is": "reasoning_parser_plugin",
    "input of images, audio and video is": "limit_mm_per_prompt mm_processor_kwargs mm_processor_cache_gb "
    "mm_processor_cache_type mm_encoder_tp_mode mm_encoder_attn_backend media_io_kwargs interleave_mm_strings "
    "allowed_local_media_path allowed_media_domains skip_mm_profiling enable_mm_embeds video_pruning_rate "
    "disable_chunked_mm_input image_input_type ec_transfer_config",
    "input of embeddings is": "enable_prompt_embeds",
    "pooling and embedding of text is": "runner convert task pooler_config override_pooler_config",
    "setting this about ranks, experts or front processes is": "decode_context_parallel_size "
    "prefill_context_parallel_size all2all_backend enable_eplb eplb_config enable_dbo "
    "expert_placement_strategy disable_custom_all_reduce max_parallel_loading_workers ray_workers_use_nsight",
    "CUDA, whose kernels and graphs this sets up, is": "compilation_config cuda_graph_sizes max_seq_len_to_capture "
    "disable_cascade_attn attention_config attention_backend optimization_level calculate_kv_scales "
    "quantization_param_path disable_async_output_proc num_scheduler_steps cpu_offload_gb",
    "sleeping without weights is": "enable_sleep_mode",
    "other hybrids of layers are": "mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size "
    "disable_hybrid_kv_cache_manager kv_sharing_fast_prefill disable_sliding_window",
    "tracing of a model's parts is": "collect_detailed_traces",
    "GGUF files are": "gguf_file",
    "log-probabilities of chosen tokens are": "logprob_token_ids",
    "a limit of repeating is": "repetition_detection",
    "default arguments for chat templates are": "default_chat_template_kwargs",
}
"""What is not there yet, with its verb, and the options that belong to it."""

_RENAMED: Final = {
    "allow_origins": "allowed_origins",
    "async_scheduling": "max_steps_in_flight",
    "chat_template_path": "chat_template",
    "ctx_size": "max_model_len",
    "context_length": "max_model_len",
    "distributed_executor_backend": "executor",
    "worker_use_ray": "executor",
    "enable_log_requests": "log_requests",
    "guided_decoding": "structured_outputs",
    "h11_max_incomplete_event_size": "max_header_size",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "kv_events_config": "enable_kv_events",
    "kv_offloading_size": "kv_host_size",
    "mem_fraction_static": "gpu_memory_utilization",
    "model_path": "model",
    "num_gpu_blocks": "num_gpu_blocks_override",
    "scheduler_delay_factor": "delay_factor",
    "pp": "pipeline_parallel_size",
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "uvicorn_log_level": "log_level",
}
"""Options that octavo has under another name."""

_WITHOUT: Final = {
    "grammars are read by llguidance alone": "structured_outputs_config guided_decoding_backend",
    "give structured_outputs": "guided_json guided_regex guided_choice guided_grammar",
    "octavo rank runs the ranks of machines that serve nothing": "headless",
    "give prefill and decode, or role on each machine and octavo proxy": "kv_transfer_config",
    "give speculative_config": "speculative_model num_speculative_tokens",
    "kv_host_size keeps KV blocks in host memory, kv_disk on a disk": "kv_offloading_backend",
    "engines of other machines are started with role, and octavo proxy routes to them": "data_parallel_rank "
    "data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port "
    "data_parallel_backend data_parallel_hybrid_lb data_parallel_external_lb",
    "SIGHUP reads keys and certificates again": "enable_ssl_refresh",
    "octavo logs no prompts, and requests only with log_requests": "disable_log_requests max_log_len "
    "disable_uvicorn_access_log enable_log_outputs log_error_stack log_config_file",
    "octavo has one engine; there is nothing to choose": "use_v2_block_manager model_impl worker_cls scheduler_cls "
    "worker_extension_cls disable_frontend_multiprocessing additional_config",
    "octavo runs no code that it is given": "middleware logits_processors logits_processor_pattern "
    "io_processor_plugin extra_args",
    "reasoning is read wherever its marks are known": "enable_reasoning",
    "chats have it; elsewhere give reasoning_end and reasoning_budget in structured_outputs": "thinking_token_budget",
    "octavo always reports cached tokens": "enable_prompt_tokens_details",
    "octavo always sends X-Request-Id": "enable_request_id_headers",
    "octavo always serves /openapi.json, and no page that shows it": "disable_fastapi_docs",
    "requests get their usage by stream_options": "enable_force_include_usage",
    "requests get ids by return_token_ids": "return_tokens_as_token_ids",
    "GET /load and /metrics always have the load": "enable_server_load_tracking show_hidden_metrics_for_version",
    "templates get text, and the answer's role is assistant": "chat_template_content_format response_role",
    "GET /tokenizer_info is always there": "enable_tokenizer_info_endpoint",
    "the limits of a request are max_header_size and header_timeout_s": "h11_max_header_count",
    "prefixes are known by SHA-256": "prefix_caching_hash_algo",
    "log-probabilities are of the model's own distribution, one object per position": "logprobs_mode flat_logprobs",
    "weights are mapped": "safetensors_load_strategy pt_load_map_location use_tqdm_on_load",
    "the hub's library reads the variable HF_TOKEN": "hf_token",
    "octavo reads a checkpoint's own files": "hf_overrides hf_config_path config_format tokenizer_mode "
    "skip_tokenizer_init rope_scaling rope_theta code_revision model_loader_extra_config ignore_patterns "
    "override_generation_config",
    "the tokens of a step are one budget, max_num_batched_tokens": "max_num_partial_prefills "
    "max_long_partial_prefills long_prefill_token_threshold",
}
"""Options that octavo does without, by the reason."""


@cache
def absent_options() -> Mapping[str, str]:
    """Return what is said to each option, by its name with underscores, in the order of the names."""
    said = {name: f"{feature} not there yet" for feature, name in _each(_NOT_YET)}
    said |= {name: reason for reason, name in _each(_WITHOUT)}
    said |= {name: f"octavo calls it {ours}" for name, ours in _RENAMED.items()}
    return MappingProxyType(dict(sorted(said.items())))


def renamed_options() -> Mapping[str, str]:
    """Return octavo's names of options, by the names that others have for them."""
    return MappingProxyType(_RENAMED)


def remark(name: str, known: Iterable[str]) -> str:
    """Return what follows "NAME is not an argument": why there is none, or the nearest `known` name, or nothing."""
    said = absent_options().get(name.lower().removeprefix("octavo_"))
    return f": {said}" if said is not None else suggestion(name, known)


def _each(names_by_reason: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for reason, names in names_by_reason.items():
        for name in names.split():
            yield reason, name
