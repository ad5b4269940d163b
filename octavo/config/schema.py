"""The resolved configuration: frozen sections, computed once by `resolve()` and never edited.

A component takes the section, or the single values, that it needs; only `EngineCore.build` and `Worker.build` see the
whole. All sections cross process borders as msgpack or JSON. Values that are measured at start (the number of blocks)
are not here.
"""

from __future__ import annotations

from typing import Literal

import msgspec

DType = Literal["float32", "bfloat16", "float16"]
CacheDType = Literal["float32", "bfloat16", "float16", "int8", "fp8"]
LoadFormat = Literal["auto", "dummy"]
Device = Literal["cpu", "cuda"]
PreemptionMode = Literal["auto", "recompute", "swap", "classic"]

GenerationDefault = int | float | str | bool | list[int] | None


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which weights and tokenizer, and what the checkpoint says about them."""

    name: str
    """What the person asked for: a hub name, a directory, or octavo-tiny."""
    path: str
    """Directory that holds the checkpoint on this machine."""
    tokenizer_path: str
    """Directory (or tokenizer.json) of the tokenizer on this machine."""
    served_model_names: tuple[str, ...]
    """Names by which clients may ask for the model; the first one is used in answers."""
    revision: str | None = None
    load_format: LoadFormat = "auto"
    packed_cache: str | None = None
    """Directory that keeps packed weights for later starts."""
    packed_cache_bytes: int = 20 << 30
    """Most bytes of them, of all models together."""
    user_set_packed_cache: bool = False
    dtype: DType
    quantization: str | None = None
    seed: int = 0
    max_model_len: int
    user_set_max_model_len: bool = False
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    generation_defaults: dict[str, GenerationDefault] = {}
    """Sampling values that hold when a request does not set them, from generation_config.json."""
    max_logprobs: int = 20
    chat_template: str | None = None
    """Text of a template that replaces the checkpoint's own."""

    @property
    def served_model_name(self) -> str:
        return self.served_model_names[0]


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache: its block size and what may be spent on it. Sizes are bytes."""

    block_size: int = 16
    dtype: CacheDType
    num_gpu_blocks_override: int | None = None
    """Exact number of usable device blocks, on any device."""
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    swap_space_bytes: int = 4 << 30
    enable_prefix_caching: bool = True
    prefix_cache_eviction: str = "lru"
    prefix_cache_bytes: int | None = None
    """Bytes of cached prefixes without users from which on no memory is taken that was not used before."""
    watermark: float = 0.01
    """Share of the device blocks that admission leaves free."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens and sequences a step may have, and in which order requests get them."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    target_step_s: float | None = None
    """What a step that computes prompts may take while other sequences decode; 0 is no limit. None: a multiple of a
    step that only decodes."""
    max_model_len: int
    policy: str = "fcfs"
    preemption_mode: PreemptionMode = "auto"
    priority_ageing_s: float = 0.0
    tenant_weights: dict[str, float] = {}
    max_bypasses: int = 0
    delay_factor: float = 0.0
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    prefill_tokens_per_s: float | None = None
    """What waiting is reckoned with: by the deadline policy, by admission control, and by preemption_mode auto.
    None: it is measured."""
    swap_bytes_per_s: float | None = None
    """Of keys and values between device and host, one way. None: it is measured."""
    num_lookahead_slots: int = 0
    """Token slots that each running sequence has beyond its next token."""
    max_loras: int = 0
    """Different adapters that run at once; 0 is no limit."""
    enable_chunked_prefill: bool = True
    max_steps_in_flight: int = 1

    def max_live_tokens(self, sliding_window: int | None) -> int | None:
        """Most tokens of one sequence that are in KV blocks at once under a sliding window: those that the first token
        of a step sees, and those that the step computes. None: all of them, as also where prompts are computed whole.

        Behind a sequence that decodes stay one token and one for each step in flight: what those draw may be dropped.
        """
        if sliding_window is None or not self.enable_chunked_prefill:
            return None
        most_new = max(self.max_num_batched_tokens, self.max_steps_in_flight + 1)
        return sliding_window - 1 + most_new + self.num_lookahead_slots


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how the model runs."""

    device: Device = "cpu"
    threads: int
    user_set_threads: bool = False
    """Somebody asked for this number: short steps use all of them too."""
    instruction_set: str = "auto"
    """What the compiled kernels run at; "reference" for plain torch."""
    enforce_eager: bool = False
    op_overrides: dict[str, str] = {}
    """Implementation by operator name, instead of the best one."""


class ObservabilityConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is logged."""

    log_stats: bool = True
    log_level: str = "info"
    record_trace: str | None = None
    """File that gets all that goes into the scheduler, for a replay."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All sections together."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    device: DeviceConfig
    observability: ObservabilityConfig = ObservabilityConfig()
