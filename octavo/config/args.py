"""Everything a person may set about the engine, each once; `octavo serve` adds what `server_args` has.

A field's annotation carries its documentation, limits and group. From it come the keyword of `LLM`, the `--flag`, the
YAML key, the `OCTAVO_*` variable, the line in the reference page and the check that each of these ways goes through.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from octavo.config.checkpoint_args import ChatArgs, CheckpointArgs
from octavo.config.device_args import DeviceArgs
from octavo.config.fields import Arg, check_values, names_its_arguments
from octavo.config.lora_args import LoRAArgs
from octavo.config.media_args import MediaArgs
from octavo.config.pooling_args import PoolingArgs
from octavo.config.speculative_args import SpeculativeArgs
from octavo.config.transfer_args import TransferArgs

BUILTIN_MODEL = "octavo-tiny"
"""The demonstration model that ships with the package."""

ModelSource = Literal["huggingface", "modelscope"]
PreemptionMode = Literal["auto", "recompute", "swap", "classic"]


@dataclass(frozen=True, kw_only=True)
class ModelArgs(CheckpointArgs, ChatArgs, MediaArgs):
    """Which weights and tokenizer, and how they are read."""

    heading: ClassVar = "Model"

    model: Annotated[
        str,
        Arg(
            "Hub name, short name (qwen3:0.6b) or directory of the model; octavo-tiny is the demonstration model that "
            "ships with the package."
        ),
    ] = BUILTIN_MODEL
    tokenizer: Annotated[
        str | None, Arg("Hub name, directory, tokenizer.json or tekken.json of the tokenizer; by default the model's.")
    ] = None
    revision: Annotated[str | None, Arg("Branch, tag or commit of the model on the hub.")] = None
    tokenizer_revision: Annotated[str | None, Arg("The same for the tokenizer.")] = None
    served_model_name: Annotated[
        tuple[str, ...],
        Arg("Name by which clients ask for the model; may be given several times. By default what --model says."),
    ] = ()
    model_source: Annotated[ModelSource, Arg("Hub that names refer to.")] = "huggingface"
    download_dir: Annotated[str | None, Arg("Where downloads are kept; by default the hub's own cache.")] = None
    load_format: Annotated[
        Literal["auto", "dummy"], Arg("auto reads the checkpoint's weights; dummy makes random ones, to measure speed.")
    ] = "auto"
    packed_cache: Annotated[
        str,
        Arg(
            "Where weights are kept in the form that they are computed in, so that later starts map them instead of "
            "packing them again: auto is octavo/packed in the user's cache folder (XDG_CACHE_HOME) for models from "
            "128 MiB on, none is nowhere, anything else is a directory. Takes about as much room as the weights."
        ),
    ] = "auto"
    packed_cache_size: Annotated[
        int,
        Arg(
            "Most room for packed weights of all models together, with a suffix such as 20GiB; those that were used "
            "longest ago are removed.",
            ge=1,
            is_bytes=True,
        ),
    ] = 20 << 30
    dtype: Annotated[
        str,
        Arg(
            "Number format of weights and activations; auto takes the checkpoint's.",
            choices=("auto", "float32", "bfloat16", "float16"),
        ),
    ] = "auto"
    quantization: Annotated[
        str | None,
        Arg(
            "Number format of the weights that are multiplied, made while loading: int8 has a scale per output "
            "channel, int4 one per 64 inputs of it, int4-g128 one per 128. By default weights stay as they are.",
            choices=("int8", "int4", "int4-g128"),
        ),
    ] = None
    allow_requantize: Annotated[bool, Arg("Let quantization take quantised checkpoints, which loses more.")] = False
    activation_bits: Annotated[
        int,
        Arg("What activations are rounded to beside quantised weights.", only=(8, 16), otherwise="bits are 8 or 16"),
    ] = 8
    max_model_len: Annotated[
        int | None,
        Arg(
            "Most tokens of prompt and output together; by default what the checkpoint was made for. Where positions "
            "are LongRoPE's (Phi), it chooses the short or the long factors.",
            ge=1,
        ),
    ] = None
    seed: Annotated[
        int | None,
        Arg(
            "Seeds the requests that have no seed of their own, alike in each run: the first one, the second one, and "
            "so on. By default 0 offline; a server draws one at each start, so that it repeats no other server.",
            ge=0,
            le=2**63 - 1,
        ),
    ] = None
    max_logprobs: Annotated[
        int, Arg("Most log-probabilities per position that a request may ask for; -1 is the whole vocabulary.", ge=-1)
    ] = 20
    trust_remote_code: Annotated[
        bool,
        Arg(
            "Run code that comes with a checkpoint.",
            only=(False,),
            otherwise="octavo never runs code from a checkpoint; the architectures it knows are in octavo/models",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class CacheArgs:
    """The KV cache and the memory for it."""

    heading: ClassVar = "Memory and cache"

    block_size: Annotated[int, Arg("Tokens in a KV block.", ge=1, le=1024)] = 16
    gpu_memory_utilization: Annotated[
        float, Arg("Share of what the device has free at start that octavo may use, the machine on a CPU.", gt=0, le=1)
    ] = 0.9
    kv_cache_memory: Annotated[
        int | None,
        Arg(
            "Memory for the KV cache, with a suffix such as 2GiB, on a GPU whatever gpu_memory_utilization says; by "
            "default what is left over, as it is measured at start on a GPU, on a CPU at most 4GiB.",
            ge=1,
            is_bytes=True,
        ),
    ] = None
    num_gpu_blocks_override: Annotated[
        int | None, Arg("Exact number of KV blocks, on any device, instead of one derived from memory.", ge=1)
    ] = None
    swap_space: Annotated[
        float, Arg("Host memory for swapped-out blocks of each rank, in GiB; replicas share it.", ge=0, le=1 << 20)
    ] = 4
    enable_prefix_caching: Annotated[bool, Arg("Reuse KV blocks of prompts that start alike.")] = True
    prefix_cache_size: Annotated[
        int | None,
        Arg(
            "Memory for cached prefixes that no request uses, with a suffix such as 1GiB: from there on they are given "
            "up before the KV cache takes memory that it has not used before. By default they may fill the KV cache.",
            ge=0,
            is_bytes=True,
        ),
    ] = None
    prefix_cache_eviction: Annotated[
        str,
        Arg(
            "Which cached block is given up first: the one unused for longest (lru), or the one that was found least "
            "often of late (cost).",
            choices=("lru", "cost"),
        ),
    ] = "lru"
    state_snapshot_tokens: Annotated[
        int,
        Arg(
            "Tokens between the snapshots of recurrent layers' states that the prefix cache keeps beside those at ends "
            "of prompts; 0 keeps no others.",
            ge=0,
            le=1 << 20,
        ),
    ] = 512
    watermark: Annotated[float, Arg("Share of the KV blocks kept free when a request is admitted.", ge=0, le=0.5)] = (
        0.01
    )
    kv_cache_dtype: Annotated[
        str,
        Arg(
            "Number format of the KV cache; auto takes the model's. int8 and fp8 (e4m3) have a scale per token and "
            "head, and hold almost twice as many tokens as bfloat16.",
            choices=("auto", "float32", "bfloat16", "int8", "fp8", "fp8_e4m3"),
        ),
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class SchedulerArgs:
    """How many tokens and sequences a step has, and in which order requests get them."""

    heading: ClassVar = "Scheduling"

    max_num_seqs: Annotated[int, Arg("Most sequences in one step.", ge=1, le=1 << 16)] = 256
    max_num_batched_tokens: Annotated[int, Arg("Most tokens in one step.", ge=1, le=1 << 24)] = 2048
    stream_interval: Annotated[
        int, Arg("Tokens of a sequence that an event of a stream has at least; the first one is sent at once.", ge=1)
    ] = 1
    target_step_ms: Annotated[
        float | None,
        Arg(
            "Milliseconds that a step may take that computes prompts while other requests decode: prompts are cut into "
            "pieces for it; 0 is no limit. By default 2.5 times what a step takes that only decodes, and at least 20; "
            "0 for LLM.",
            ge=0,
            le=1e6,
        ),
    ] = None
    enable_chunked_prefill: Annotated[
        bool, Arg("Compute long prompts in pieces, together with decoding; off, a step is all prefill or all decode.")
    ] = True
    scheduling_policy: Annotated[
        str,
        Arg(
            "Which waiting request is next, and which running one is preempted: first come first served, priority "
            "(smaller numbers first), fair-share (least served tenant), deadline (who must start soonest), "
            "prefix-match (who finds most in the prefix cache).",
            choices=("fcfs", "priority", "fair-share", "deadline", "prefix-match"),
        ),
    ] = "fcfs"
    priority_ageing: Annotated[
        float, Arg("Seconds of waiting that count as one priority; 0 switches ageing off.", ge=0, le=1e9)
    ] = 0.0
    tenant_weights: Annotated[
        dict[str, float],
        Arg(
            "Shares of tenants under fair-share, such as alice=2; others have 1. A server's tenants are its API keys, "
            "by the names that --api-key-file gives them, or without keys what requests name as user."
        ),
    ] = dataclasses.field(default_factory=dict)
    max_bypasses: Annotated[
        int,
        Arg(
            "How many later requests may be admitted before a waiting one that does not fit yet; 0 keeps the order.",
            ge=0,
            le=1 << 20,
        ),
    ] = 0
    delay_factor: Annotated[
        float,
        Arg(
            "Without chunked prefill: prompts wait until the first has waited this many times the last prefill's time.",
            ge=0,
            le=1000,
        ),
    ] = 0.0
    max_queued_requests: Annotated[
        int | None,
        Arg(
            "A server refuses requests beyond this many that wait, those not counted that start in the next step; an "
            "engine in process (LLM) refuses none.",
            ge=1,
        ),
    ] = None
    max_queued_tokens: Annotated[
        int | None,
        Arg(
            "A server refuses a request behind which more prompt tokens than this would wait, but not the first in the "
            "queue; an engine in process (LLM) refuses none.",
            ge=1,
        ),
    ] = None
    prefill_tokens_per_s: Annotated[
        float | None,
        Arg(
            "Prompt tokens computed per second, as deadlines, refusals and preemption_mode auto reckon; measured while "
            "running unless it is given.",
            gt=0,
            le=1e9,
        ),
    ] = None
    swap_bytes_per_s: Annotated[
        float | None,
        Arg(
            "Bytes of keys and values moved per second between device and host, as preemption_mode auto reckons; "
            "measured while running unless it is given.",
            gt=0,
            le=1e13,
        ),
    ] = None
    num_lookahead_slots: Annotated[
        int, Arg("Token slots reserved for each running sequence beyond its next token.", ge=0, le=1 << 10)
    ] = 0
    preemption_mode: Annotated[
        PreemptionMode,
        Arg(
            "How a running request gives its blocks up when there are too few: recompute them later, swap them to the "
            "host, classic (requests with several sequences swap, others recompute), or auto, what costs less time."
        ),
    ] = "auto"
    max_steps_in_flight: Annotated[
        int | None,
        Arg(
            "Steps planned before the tokens of earlier ones are known. By default as many as "
            "pipeline_parallel_size, so that every stage has one, and 2 on a GPU.",
            ge=1,
            le=8,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ObservabilityArgs:
    """What is logged and recorded."""

    heading: ClassVar = "Logging"

    disable_log_stats: Annotated[bool, Arg("No log line about queues, blocks and tokens per second.")] = False
    log_level: Annotated[
        str, Arg("Least important messages that are logged.", choices=("debug", "info", "warning", "error"))
    ] = "info"
    record_trace: Annotated[
        str | None,
        Arg(
            "File that gets every request, result and clock reading of the scheduler, tokens included, so that "
            "octavo replay takes the same decisions again."
        ),
    ] = None
    enable_kv_events: Annotated[
        bool,
        Arg(
            "GET /kv/events reports by digests which blocks enter and leave the prefix cache. Without API keys, anyone "
            "who reaches it can find out whether a prompt that was sent without cache_salt is cached."
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class ReplicaArgs:
    """How many engines there are behind one front, and what follows when one of them dies."""

    heading: ClassVar = "Replicas"

    data_parallel_size: Annotated[
        int,
        Arg(
            "Engines with the whole model behind one server or AsyncLLM, each in a process of its own with an equal "
            "share of the processors and of the memory; limits of queues and sequences hold for each.",
            ge=1,
            le=256,
        ),
    ] = 1
    router: Annotated[
        str,
        Arg(
            "Which replica gets a request: the one that was sent the longest part of its prompt unless it is too busy "
            "(prefix-aware), the one with the fewest open requests, each in turn, or the same one for all requests "
            "with one cache_salt, or without it of one API key or user (session).",
            choices=("prefix-aware", "least-loaded", "round-robin", "session"),
        ),
    ] = "prefix-aware"
    max_core_restarts: Annotated[
        int,
        Arg(
            "How often a replica whose process died or froze is started again within ten minutes; its requests go on. "
            "0: its open requests end with an error.",
            ge=0,
            le=1000,
        ),
    ] = 3


@names_its_arguments
@dataclass(frozen=True, kw_only=True)
class EngineArgs(
    TransferArgs,
    SpeculativeArgs,
    ReplicaArgs,
    ObservabilityArgs,
    PoolingArgs,
    LoRAArgs,
    DeviceArgs,
    SchedulerArgs,
    CacheArgs,
    ModelArgs,
):
    """What a person wrote about the engine, checked field by field; `resolve()` makes the configuration of it.

    Raises ConfigError naming the argument, its value, its limit and what to do.
    """

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def num_engines(self) -> int:
        """Return the number of cores behind one front."""
        return self.prefill + self.decode or self.data_parallel_size


AsyncEngineArgs = EngineArgs
"""The name under which users of vLLM know the arguments of an asynchronous engine; there is one set for both."""
