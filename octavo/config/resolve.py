"""From what a person wrote to the configuration: a pure function of arguments, checkpoint and platform."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from os.path import expanduser
from pathlib import Path
from typing import Any, cast

from octavo.config.activation_bits import activation_bits
from octavo.config.args import EngineArgs
from octavo.config.checkpoint import GENERATION_CONFIG, Checkpoint, read_token_ids
from octavo.config.draft_config import draft_config, limited
from octavo.config.effects import without_effect
from octavo.config.embedding_size import embedding_size
from octavo.config.json_options import profiler_config
from octavo.config.kv_events import check_kv_events
from octavo.config.listed import naming_unlisted
from octavo.config.media.speech import read_speech
from octavo.config.media_args import media_limits
from octavo.config.own_adapters import for_own_adapters
from octavo.config.pooling.pooling_config import PoolingConfig
from octavo.config.pooling.read_pooling import pooling_config
from octavo.config.schema import (
    CacheConfig,
    DeviceConfig,
    DType,
    EngineConfig,
    GenerationDefault,
    LoRAConfig,
    ModelConfig,
    ObservabilityConfig,
    ReplicaConfig,
    SchedulerConfig,
)
from octavo.config.section import LARGEST_SIZE, Section, read_json_object
from octavo.config.speculative_args import speculative_config
from octavo.config.speculators import with_verifier
from octavo.config.transfer_args import transfer_config
from octavo.core.sampling_params import SamplingParams
from octavo.errors import CheckpointError, ConfigError, InvalidRequest, suggestion
from octavo.platform import Platform

_GENERATION_KEYS = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "skip_special_tokens")},
    "max_new_tokens": "max_tokens",
}
"""Keys of generation_config.json that have a sampling parameter, and which."""

_END_TOKENS = "eos_token_id"
_PACKED_CACHE_FROM_BYTES = 128 << 20
"""Smaller weights are packed in a moment."""

_log = logging.getLogger(__name__)


def configure(args: EngineArgs) -> EngineConfig:
    """Find the checkpoint (downloading it if need be), look at the machine, and resolve.

    Raises ConfigError or CheckpointError.
    """
    from octavo.config import hub
    from octavo.config.draft_method import with_method
    from octavo.config.sources import user_directory

    args = with_method(args)
    model_path = hub.locate_model(args)
    checkpoint = Checkpoint.open(model_path, args.hf_overrides, hub.locate_mmproj(args, model_path))
    if (beside := with_verifier(args, checkpoint, model_path)) is not args:
        return configure(beside)
    with naming_unlisted(checkpoint):
        return resolve(
            args,
            checkpoint,
            Platform.detect(),
            tokenizer_path=hub.locate_tokenizer(args, model_path),
            cache_directory=user_directory("cache"),
            draft_path=hub.locate_draft(args, model_path),
        )


def resolve(
    args: EngineArgs,
    checkpoint: Checkpoint,
    platform: Platform,
    *,
    tokenizer_path: Path | None = None,
    cache_directory: Path | None = None,
    draft_path: Path | None = None,
) -> EngineConfig:
    """Return the configuration that follows from `args` for this checkpoint on this platform.

    `cache_directory` is where files may be kept that can be made again; None where the user has no such place.
    `draft_path`: the checkpoint of the model that guesses, which `speculative_config` names; None without one.

    Reads only what `checkpoint` reads, and the files that `generation_config` and `chat_template` name.
    Raises ConfigError where arguments contradict each other or the checkpoint.
    """
    pooling = pooling_config(args, checkpoint)
    args = for_own_adapters(_for_whole_prompts(args, pooling), checkpoint)
    media_limits(args)
    max_model_len = _max_model_len(args, checkpoint, pooling)
    most_threads = _most_threads(args, platform)
    _check_ranks(args)
    check_kv_events(args)
    profiler_config(args.profiler_config)
    speculative = speculative_config(args)
    _warn_of_turns(args, platform.cores)
    dtype = _dtype(args, checkpoint)
    has_gpus = args.device == "cuda" or (platform.has_gpu and _device(args) == "auto")
    return EngineConfig(
        model=ModelConfig.of(
            args,
            path=str(checkpoint.path),
            mmproj=None if checkpoint.mmproj is None else str(checkpoint.mmproj),
            tokenizer_path=str(tokenizer_path or checkpoint.path),
            served_model_names=args.served_model_name or (args.model,),
            packed_directory=_packed_cache(args, checkpoint, cache_directory),
            user_set_packed_cache=args.packed_cache != "auto",
            dtype=dtype,
            activation_bits=activation_bits(args, checkpoint, has_gpus=has_gpus),
            max_model_len=max_model_len,
            user_set_max_model_len=args.max_model_len is not None,
            chooses_tokens=checkpoint.chooses_tokens(max_model_len),
            vocab_size=checkpoint.positive("vocab_size"),
            eos_token_ids=_eos_token_ids(args, checkpoint),
            bos_token_id=checkpoint.bos_token_id(),
            generation_defaults=_generation_defaults(args, checkpoint, max_model_len),
            chat_template=_chat_template(args.chat_template),
            pooling=pooling,
            embedding_size=embedding_size(checkpoint, pooling) if args.enable_prompt_embeds else None,
            speech=read_speech(checkpoint),
        ),
        cache=cache_config(args, dtype),
        scheduler=scheduler_config(_with_room_for_one(args, pooling, max_model_len), max_model_len, has_gpus=has_gpus),
        device=DeviceConfig.of(
            args,
            device=_device(args),
            threads=args.threads or most_threads,
            user_set_threads=args.threads is not None,
            needs_exact_rows=speculative is not None,
            has_gpus=has_gpus,
        ),
        observability=ObservabilityConfig.of(args),
        replicas=ReplicaConfig.of(args),
        transfer=transfer_config(args),
        lora=_lora_config(args, dtype),
        speculative=limited(speculative, draft_path),
        draft=None
        if speculative is None or draft_path is None
        else draft_config(args, speculative, checkpoint, tokenizer_path or checkpoint.path, draft_path),
    )


def _lora_config(args: EngineArgs, dtype: DType) -> LoRAConfig:
    """Return the section of adapters for a model in `dtype`. Raises ConfigError."""
    if args.num_host_adapters < args.max_loras:
        raise ConfigError(
            f"max_cpu_loras is {args.max_cpu_loras}, must be at least max_loras, which is {args.max_loras}: every "
            "adapter that runs is in host memory, too; raise the one or lower the other"
        )
    if args.enable_lora and args.record_trace is not None:
        raise ConfigError("enable_lora is set, and record_trace does not record when adapters are read; leave one out")
    lora_dtype = dtype if args.lora_dtype == "auto" else args.lora_dtype
    return LoRAConfig.of(args, lora_dtype=lora_dtype)


def _most_threads(args: EngineArgs, platform: Platform) -> int:
    """Return how many threads a replica has at most. Raises ConfigError where more are asked for."""
    num_replicas = args.num_engines
    most_threads = max(1, platform.cores // num_replicas)
    if args.threads is not None and args.threads > most_threads:
        share = "" if num_replicas == 1 else f" for each of {num_replicas} replicas"
        raise ConfigError(
            f"threads is {args.threads}, must be at most {most_threads}{share}, the processors that this process may "
            "use (its affinity mask and the quota of its control group): more would wait for each other; lower it or "
            "leave it out"
        )
    return most_threads


def _check_ranks(args: EngineArgs) -> None:
    num_ranks = args.tensor_parallel_size * args.pipeline_parallel_size
    if num_ranks % args.nnodes:
        raise ConfigError(
            f"nnodes is {args.nnodes}, must divide {num_ranks}, the ranks of tensor_parallel_size x "
            "pipeline_parallel_size: each machine has the same number of them; change one of the sizes"
        )
    if args.nnodes > 1 and args.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size is {args.data_parallel_size}, and nnodes is {args.nnodes}: replicas are on one "
            "machine; leave one of them at 1, or put several servers behind a router"
        )
    if args.nnodes > 1 and args.executor == "ray":
        raise ConfigError(f"nnodes is {args.nnodes}, but Ray places the ranks; leave it at 1")
    if args.nnodes > 1 and args.cluster_secret_file is None:
        raise ConfigError(
            f"nnodes is {args.nnodes}, but cluster_secret_file is not set; give all machines the same secret"
        )


def _warn_of_turns(args: EngineArgs, num_processors: int) -> None:
    """Log a warning where this machine has fewer processors than replicas and ranks. Ray finds places by itself."""
    names = ["tensor_parallel_size", "pipeline_parallel_size"] * (args.executor != "ray")
    sizes = {name: size for name in names if (size := getattr(args, name)) > 1}
    if args.num_engines > 1:
        sizes = {"(prefill + decode)" if args.prefill else "data_parallel_size": args.num_engines} | sizes
    count = math.prod(sizes.values()) // args.nnodes
    if count > num_processors:
        _log.warning(
            "%s is %d%s, but there %s: they take turns",
            " x ".join(sizes),
            count,
            " on this machine" if args.nnodes > 1 else "",
            "is 1 processor" if num_processors == 1 else f"are {num_processors} processors",
        )


def _device(args: EngineArgs) -> str:
    """Return the device's name, which `instruction_set` may give as well. Raises ConfigError when they differ."""
    if args.instruction_set != "reference":
        return args.device
    if args.device not in ("auto", "reference"):
        raise ConfigError(
            f"instruction_set is reference, which is another name for the device reference, but device is "
            f"{args.device}; leave one of them at auto"
        )
    return "reference"


def cache_config(args: EngineArgs, dtype: DType) -> CacheConfig:
    """Return the cache's section for a model in `dtype`."""
    wanted = {"auto": dtype, "fp8_e4m3": "fp8"}.get(args.kv_cache_dtype, args.kv_cache_dtype)
    return CacheConfig.of(args, dtype=wanted)


def scheduler_config(args: EngineArgs, max_model_len: int, *, has_gpus: bool = False) -> SchedulerConfig:
    """Return the scheduler's section. has_gpus: whether steps are launched beside the host.

    Raises ConfigError where its arguments contradict each other.
    """
    if args.max_num_batched_tokens < args.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens is {args.max_num_batched_tokens}, must be at least max_num_seqs, which is "
            f"{args.max_num_seqs}: every running sequence needs a token in each step; raise the one or lower the other"
        )
    for message in without_effect(args).values():
        raise ConfigError(message)
    depth = args.max_steps_in_flight or max(args.pipeline_parallel_size, 2 if has_gpus else 1)
    loras = {}
    if args.enable_lora:
        loras = {"max_loras": args.max_loras, "max_cpu_loras": args.num_host_adapters}
    return SchedulerConfig.of(args, max_model_len=max_model_len, max_steps_in_flight=depth, **loras)


def _packed_cache(args: EngineArgs, checkpoint: Checkpoint, cache_directory: Path | None) -> str | None:
    """Return the directory for packed weights, or None where there is none."""
    if args.packed_cache == "none":
        return None
    if args.packed_cache == "auto":
        if cache_directory is None or args.load_format == "dummy":
            return None
        is_worth_it = checkpoint.weights_bytes() >= _PACKED_CACHE_FROM_BYTES
        return str(cache_directory / "packed") if is_worth_it else None
    if args.load_format == "dummy":
        raise ConfigError(
            "packed_cache keeps the weights of a checkpoint, load_format dummy makes random ones; leave out one of them"
        )
    return str(Path(expanduser(args.packed_cache)))


def _for_whole_prompts(args: EngineArgs, pooling: PoolingConfig | None) -> EngineArgs:
    """Return the arguments for a model that makes vectors: where it computes prompts whole, without chunked prefill and
    prefix cache. Raises ConfigError for arguments that have no effect on vectors."""
    if pooling is None:
        return args
    if pooling.has_vocabulary and args.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size is {args.tensor_parallel_size}, but a model with a value for each token of the "
            "vocabulary (SPLADE, masked tokens) runs in one rank; use data_parallel_size for more throughput"
        )
    for name, off in (("speculative_config", None), ("role", None), ("prefill", 0), ("record_trace", None)):
        if getattr(args, name) != off:
            raise ConfigError(f"{name} is set, but the model makes vectors, not text; leave it out")
    if not pooling.needs_whole_prompts:
        return args
    return dataclasses.replace(args, enable_chunked_prefill=False, enable_prefix_caching=False, target_step_ms=None)


def _with_room_for_one(args: EngineArgs, pooling: PoolingConfig | None, max_model_len: int) -> EngineArgs:
    """Return the arguments with steps that hold the longest prompt, where prompts are computed whole."""
    if pooling is None or not pooling.needs_whole_prompts or args.max_num_batched_tokens >= max_model_len:
        return args
    return dataclasses.replace(args, max_num_batched_tokens=max_model_len)


def _max_model_len(args: EngineArgs, checkpoint: Checkpoint, pooling: PoolingConfig | None) -> int:
    # a config without it may be that of a family that octavo does not have: that is found out when the model is opened
    longest = checkpoint.max_model_len(LARGEST_SIZE)
    if pooling is not None and pooling.max_tokens is not None:
        longest = min(longest, pooling.max_tokens)
    if args.max_model_len is not None and args.max_model_len > longest:
        raise ConfigError(
            f"max_model_len is {args.max_model_len}, must be at most {longest}, {checkpoint.context_note} "
            f"({checkpoint.origin()}); lower it or leave it out"
        )
    return args.max_model_len or longest


def _dtype(args: EngineArgs, checkpoint: Checkpoint) -> DType:
    if args.dtype != "auto":
        return args.dtype
    states_dtype = checkpoint.values.get("dtype") is not None or checkpoint.values.get("torch_dtype") is not None
    if args.load_format == "dummy" and not states_dtype:
        return "float32"  # there may be no weight files to look at
    return cast(DType, checkpoint.dtype_name())


def _generation_defaults(args: EngineArgs, checkpoint: Checkpoint, max_model_len: int) -> dict[str, GenerationDefault]:
    """Return the sampling values of generation_config.json under the names of SamplingParams, those that it states."""
    where, values = _generation_values(args.generation_config, checkpoint)
    defaults = _sampling_values(values)
    try:
        SamplingParams(**defaults)
    except InvalidRequest as error:
        raise CheckpointError(f"{where}: {error}; correct the file, or start with generation_config none") from error
    defaults |= _overrides(args.override_generation_config)
    if defaults.get("max_tokens", 0) >= max_model_len:
        # a default made for a longer context than this one is no request for more than fits
        defaults["max_tokens"] = None
    return defaults


def _sampling_values(values: Mapping[str, Any]) -> dict[str, Any]:
    return {ours: values[theirs] for theirs, ours in _GENERATION_KEYS.items() if values.get(theirs) is not None}


def _overrides(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling values of `override_generation_config`. Raises ConfigError."""
    for name in values:
        if name != _END_TOKENS and name not in _GENERATION_KEYS:
            known = (*_GENERATION_KEYS, _END_TOKENS)
            raise ConfigError(
                f"override_generation_config has {name!r}, expected {', '.join(known)}{suggestion(name, known)}"
            )
    try:
        SamplingParams(**_sampling_values(values))
    except InvalidRequest as error:
        raise ConfigError(f"override_generation_config: {error}") from error
    return _sampling_values(values)


def _eos_token_ids(args: EngineArgs, checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the tokens that end a text. A damaged generation_config.json is an error where its values are used."""
    try:
        own = read_token_ids(Section(args.override_generation_config, "override_generation_config"))
        token_ids = checkpoint.eos_token_ids() if own is None else own
    except CheckpointError as error:
        if _END_TOKENS in args.override_generation_config:
            raise ConfigError(str(error)) from error
        if args.generation_config == "auto":
            raise
        _log.warning("%s; end tokens come from config.json alone", error)
        token_ids = checkpoint.eos_token_ids(with_generation_config=False)
    unknown = [token_id for token_id in token_ids if not 0 <= token_id < checkpoint.positive("vocab_size")]
    if unknown:
        _log.warning("%s: end tokens %s are outside the vocabulary and ignored", checkpoint.path, unknown)
    return tuple(token_id for token_id in token_ids if token_id not in unknown)


def _generation_values(source: str, checkpoint: Checkpoint) -> tuple[Path, dict[str, Any]]:
    if source == "none":
        return checkpoint.path, {}
    if source == "auto":
        return checkpoint.path / GENERATION_CONFIG, dict(checkpoint.generation_config)
    path = Path(expanduser(source))
    if path.is_dir():
        path /= GENERATION_CONFIG
    if not path.is_file():
        raise ConfigError(f"generation_config is {source!r}: there is no file {path}; give auto, none, or a file")
    return path, read_json_object(path)


def _chat_template(source: str | None) -> str | None:
    """Return the template's text. A value with Jinja braces or a line break is the template, anything else a file."""
    if source is None or "{" in source or "\n" in source:
        return source
    path = Path(expanduser(source))
    if not path.is_file():
        raise ConfigError(f"chat_template is {source!r}: there is no such file; give a file or the template itself")
    return path.read_text(encoding="utf-8")
