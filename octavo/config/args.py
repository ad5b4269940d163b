"""Everything a person may set about the engine, each once; `octavo serve` adds what `server_args` has.

A field states its default, documentation and limits. From it come the keyword of `LLM`, the `--flag`, the YAML key,
the `OCTAVO_*` variable, the line in the reference page and the check that each of these ways goes through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from octavo.config.checkpoint_args import ChatArgs, CheckpointArgs
from octavo.config.device_args import DeviceArgs
from octavo.config.fields import ArgumentGroup, Arguments, arg
from octavo.config.media_args import MediaArgs
from octavo.config.scheduler_args import SchedulerArgs
from octavo.config.speculative_args import SpeculativeArgs
from octavo.config.transfer_args import TransferArgs

if TYPE_CHECKING:
    import argparse

    from octavo.config.argument_parser import Parser

BUILTIN_MODEL = "octavo-tiny"
"""The demonstration model that ships with the package."""

ModelSource = Literal["huggingface", "modelscope"]


class ModelArgs(CheckpointArgs, ChatArgs, MediaArgs, heading="Model"):
    """Which weights and tokenizer, and how they are read."""

    model: str = arg(
        BUILTIN_MODEL,
        "Hub name, short name (qwen3:0.6b), directory or GGUF file of the model; octavo-tiny is the demonstration "
        "model that ships with the package.",
    )
    tokenizer: str | None = arg(
        None,
        "Hub name, directory, or file of the tokenizer (tokenizer.json, tekken.json, tokenizer.model, qwen.tiktoken, "
        "tiktoken.model); by default the model's.",
    )
    revision: str | None = arg(None, "Branch, tag or commit of the model on the hub.")
    tokenizer_revision: str | None = arg(None, "Branch, tag or commit of --tokenizer on the hub.")
    served_model_name: tuple[str, ...] = arg(
        (), "Name by which clients ask for the model; may be given several times. By default what --model says."
    )
    model_source: ModelSource = arg("huggingface", "Hub that names refer to.")
    download_dir: str | None = arg(None, "Where downloads are kept; by default the hub's own cache.")
    load_format: Literal["auto", "dummy"] = arg(
        "auto", "auto reads the checkpoint's weights; dummy makes random ones, to measure speed."
    )
    packed_cache: str = arg(
        "auto",
        "Where weights are kept in the form that they are computed in, so that later starts map them instead of "
        "packing them again: auto is octavo/packed in the user's cache folder (XDG_CACHE_HOME) for models from "
        "128 MiB on, none is nowhere, anything else is a directory. Takes about as much room as the weights; those "
        "on a GPU are not kept.",
    )
    packed_cache_size: int = arg(
        20 << 30,
        "Most room for packed weights of all models together, with a suffix such as 20GiB; those that were used "
        "longest ago are removed.",
        ge=1,
        is_bytes=True,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = arg(
        "auto", "Number format of weights and activations; auto takes the checkpoint's."
    )
    quantization: Literal["int8", "int4", "int4-g128"] | None = arg(
        None,
        "Number format of the weights that are multiplied, made while loading: int8 has a scale per output "
        "channel, int4 one per 64 inputs of it, int4-g128 one per 128. By default weights stay as they are.",
    )
    allow_requantize: bool = arg(
        False, "Let --quantization quantise a checkpoint that is quantised already, which adds to its error."
    )
    activation_bits: int | None = arg(
        None,
        "Bits to which activations are rounded where weights are quantised. By default 8, on the CPU 16 for "
        "encoders in GGUF files, and on GPUs 16 beside weights that are made for unrounded activations (W4A16, "
        "W8A16): int4, GPTQ, AWQ and the like, but not int8, W8A8 and GGUF.",
        only=(8, 16),
        otherwise="bits are 8 or 16",
    )
    max_model_len: int | None = arg(
        None,
        "Most tokens of prompt and output together; by default what the checkpoint was made for. Where positions "
        "are LongRoPE's (Phi), it chooses the short or the long factors.",
        ge=1,
    )
    seed: int | None = arg(
        None,
        "Seed from which requests without a seed of their own get theirs, in their order and alike in each "
        "run. By default 0 offline; a server draws one at each start, so that it repeats no other server.",
        ge=0,
        le=2**63 - 1,
    )
    max_logprobs: int = arg(
        20, "Most log-probabilities per position that a request may ask for; -1 is the whole vocabulary.", ge=-1
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = arg(
        "raw_logprobs",
        "Distribution whose log-probabilities outputs have: the model's own, or the one that tokens are drawn from, "
        "behind penalties, grammars, temperature, top-k, top-p and min-p, as trainers need it.",
    )
    trust_remote_code: bool = arg(
        False,
        "Accepted without effect: octavo never runs code from a checkpoint. Families whose code others take from there "
        "are built in; octavo models lists them.",
    )


class LoRAArgs(ArgumentGroup, heading="Adapters (LoRA)"):
    """Whether requests may use adapters, and the memory for them."""

    enable_lora: bool = arg(False, "Let requests use adapters: PEFT's LoRA beside the model's weights.")
    max_loras: int = arg(1, "Different adapters that run at once; requests with others wait.", ge=1, le=1024)
    max_cpu_loras: int | None = arg(
        None,
        "Adapters that are kept in host memory, so that their files are not read again; those that were used "
        "longest ago are dropped. At least max_loras, which is the default.",
        ge=1,
        le=1 << 16,
    )
    max_lora_rank: int = arg(16, "Largest rank of an adapter; the memory of every slot is made for it.", ge=1, le=1024)
    enable_lora_experts: bool = arg(
        False, "Take adapters of experts (target_parameters of PEFT), too; the memory of every slot is made for them."
    )
    lora_dtype: Literal["auto", "float32", "bfloat16", "float16"] = arg(
        "auto", "Number format of adapters; auto takes the model's."
    )
    lora_modules: tuple[str, ...] = arg(
        (),
        "Adapter of a server: the name by which clients ask for it and its folder, as name=path or as a JSON "
        "object with name, path and base_model_name; may be given several times.",
    )
    lora_resolver_cache_dir: str | None = arg(
        None,
        "Folder of adapters, which a server loads when clients ask for a model with the name of one: the path "
        "below this folder.",
    )

    @property
    def num_host_adapters(self) -> int:
        """The number of adapters that are kept in host memory."""
        return self.max_cpu_loras or self.max_loras


class PoolingArgs(ArgumentGroup, heading="Vectors"):
    """Whether the model writes text, or makes vectors or scores of its prompts."""

    runner: Literal["auto", "generate", "pooling"] = arg(
        "auto",
        "generate writes text, pooling makes vectors or scores; auto is pooling for encoders, classifiers, "
        "models without a head and checkpoints with sentence-transformers' modules.json.",
    )
    convert: Literal["auto", "none", "embed", "classify"] = arg(
        "auto", "What a pooling model makes: embed is vectors, classify is scores; auto takes what the checkpoint says."
    )
    pooler_config: dict[str, Any] = arg(
        {},
        "How the vector or scores of a prompt are made, where it differs from what the checkpoint says, in "
        "JSON: pooling_type (CLS, LAST, MEAN; ALL or STEP for rows of tokens), task, use_activation, "
        "step_tag_id.",
    )


class CacheArgs(ArgumentGroup, heading="Memory and cache"):
    """The KV cache and the memory for it."""

    block_size: int = arg(16, "Tokens in a KV block.", ge=1, le=1024)
    gpu_memory_utilization: float = arg(
        0.9, "Share of the memory free at start that octavo may use: the GPU's, or on a CPU the machine's.", gt=0, le=1
    )
    kv_cache_memory: int | None = arg(
        None,
        "Memory for the KV cache, with a suffix such as 2GiB, on a GPU whatever gpu_memory_utilization says; by "
        "default what is left over, as it is measured at start on a GPU, on a CPU at most 4GiB.",
        ge=1,
        is_bytes=True,
    )
    num_gpu_blocks_override: int | None = arg(
        None, "Exact number of KV blocks, on any device, instead of one derived from memory.", ge=1
    )
    swap_space: float = arg(
        4,
        "Host memory for swapped-out blocks of each rank, in GiB or with a suffix such as 512MiB; replicas share it.",
        ge=0,
        le=1 << 20,
        is_gib=True,
    )
    enable_prefix_caching: bool = arg(True, "Reuse KV blocks of prompts that start alike.")
    prefix_cache_size: int | None = arg(
        None,
        "Most memory for cached prefixes that no request uses, with a suffix such as 1GiB: beyond it they are "
        "evicted before the KV cache takes memory that it has not used before. By default they may fill the "
        "KV cache.",
        ge=0,
        is_bytes=True,
    )
    prefix_cache_eviction: Literal["lru", "cost"] = arg(
        "lru",
        "Which cached block is evicted first: the least recently used one (lru), or the one that was found "
        "least often of late (cost).",
    )
    state_snapshot_tokens: int = arg(
        512,
        "Tokens between the snapshots of recurrent layers' states that the prefix cache keeps beside those at ends "
        "of prompts; 0 keeps no others.",
        ge=0,
        le=1 << 20,
    )
    watermark: float = arg(0.01, "Share of the KV blocks kept free when a request is admitted.", ge=0, le=0.5)
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8", "fp8", "fp8_e4m3"] = arg(
        "auto",
        "Number format of the KV cache; auto takes the model's. int8 and fp8 (e4m3) have a scale per token and "
        "head, and hold almost twice as many tokens as bfloat16.",
    )


class ObservabilityArgs(ArgumentGroup, heading="Logging"):
    """What is logged and recorded."""

    disable_log_stats: bool = arg(False, "Log no lines about queues, blocks and tokens per second.")
    log_level: Literal["debug", "info", "warning", "error"] = arg("info", "Lowest level of messages that are logged.")
    record_trace: str | None = arg(
        None,
        "File that gets every request, result and clock reading of the scheduler, tokens included, so that "
        "octavo replay takes the same decisions again.",
    )
    enable_kv_events: bool = arg(
        False,
        "GET /kv/events reports by digests which blocks enter and leave the prefix cache. Without API keys, anyone "
        "who reaches it can find out whether a prompt that was sent without cache_salt is cached.",
    )
    kv_events_config: dict[str, Any] = arg(
        {},
        'JSON such as {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}, with vLLM\'s fields: publishes '
        "over ZeroMQ which blocks enter and leave the prefix cache, with their tokens, which whoever reaches the "
        "endpoint can read. Needs the extra zmq.",
    )
    profiler_config: dict[str, Any] = arg(
        {}, 'JSON such as {"profiler": "torch", "torch_profiler_dir": "traces"}: lets start_profile record traces.'
    )


class ReplicaArgs(ArgumentGroup, heading="Replicas"):
    """How many engines there are behind one front, and what follows when one of them dies."""

    data_parallel_size: int = arg(
        1,
        "Engines with the whole model behind one server or AsyncLLM, each in a process of its own with an equal "
        "share of the processors and of the memory; limits of queues and sequences hold for each.",
        ge=1,
        le=256,
    )
    router: Literal["prefix-aware", "least-loaded", "round-robin", "session"] = arg(
        "prefix-aware",
        "Which replica gets a request: the one that was sent the longest part of its prompt unless it is too busy "
        "(prefix-aware), the one with the fewest open requests, each in turn, or the same one for all requests "
        "with one cache_salt, or without it of one API key or user (session).",
    )
    max_core_restarts: int = arg(
        3,
        "How often a replica whose process died or froze is started again within ten minutes; its requests go on. "
        "0: its open requests end with an error.",
        ge=0,
        le=1000,
    )


class EngineArgs(
    Arguments,
    ModelArgs,
    LoRAArgs,
    PoolingArgs,
    CacheArgs,
    SchedulerArgs,
    SpeculativeArgs,
    DeviceArgs,
    ReplicaArgs,
    TransferArgs,
    ObservabilityArgs,
):
    """What a person wrote about the engine, checked field by field; `resolve()` makes the configuration of it.

    Raises ConfigError naming the argument, its value, its limit and what to do.
    """

    @property
    def num_engines(self) -> int:
        """Return the number of cores behind one front."""
        return self.prefill + self.decode or self.data_parallel_size

    @staticmethod
    def add_cli_args(parser: Parser) -> Parser:
        """Add a flag for each argument to a parser of argparse, and return it; without the flag a value is that of the
        OCTAVO_* variable, or the default."""
        from octavo.config.argument_parser import add_engine_flags

        return add_engine_flags(parser)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """Return the engine arguments among parsed flags. Raises ConfigError for a wrong value."""
        from octavo.config.argument_parser import args_of_namespace

        return args_of_namespace(args)


AsyncEngineArgs = EngineArgs
"""The name under which users of vLLM know the arguments of an asynchronous engine; there is one set for both."""
