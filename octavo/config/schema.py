"""The resolved configuration: frozen sections, computed once by `resolve()` and never edited.

A section is what a person wrote in that group of arguments, with what follows from it for a checkpoint and a machine: a
new argument is in it without being stated again. A component takes the section, or the single values, that it needs;
only `EngineCore.build` and `Worker.__init__` see the whole. All sections cross process borders as msgpack or JSON.
Values that are measured at start (the number of blocks) are not here.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import Literal

import msgspec

from octavo.config.args import CacheArgs, LoRAArgs, ModelArgs, ObservabilityArgs, ReplicaArgs
from octavo.config.device_args import DeviceArgs
from octavo.config.pooling.pooling_config import PoolingConfig as PoolingConfig
from octavo.config.scheduler_args import PreemptionMode as PreemptionMode
from octavo.config.scheduler_args import SchedulerArgs
from octavo.config.speculative_args import MODEL_METHODS as MODEL_METHODS
from octavo.config.speculative_args import DraftConfig as DraftConfig
from octavo.config.speculative_args import SpeculativeConfig as SpeculativeConfig
from octavo.config.transfer_args import TransferConfig as TransferConfig
from octavo.core.speech import SpeechTokens

DType = Literal["float32", "bfloat16", "float16"]
CacheDType = Literal["float32", "bfloat16", "float16", "int8", "fp8"]

GenerationDefault = int | float | str | bool | list[int] | None


class ModelConfig(ModelArgs):
    """Which weights and tokenizer, and what the checkpoint says about them."""

    path: str
    """Directory that holds the checkpoint on this machine."""
    tokenizer_path: str
    """Directory (or tokenizer.json) of the tokenizer on this machine."""
    served_model_names: tuple[str, ...]
    """Names by which clients may ask for the model; the first one is used in responses."""
    packed_directory: str | None = None
    """Directory that keeps packed weights for later starts; None for no such directory."""
    user_set_packed_cache: bool = False
    dtype: DType
    activation_bits: int = 8
    max_model_len: int
    user_set_max_model_len: bool = False
    chooses_tokens: bool = False
    """Whether queries of the longest contexts choose the tokens that they attend to, by an indexer."""
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    generation_defaults: dict[str, GenerationDefault] = field(default_factory=dict)
    """Sampling values that hold when a request does not set them, from generation_config.json."""
    chat_template: str | None = None
    """Text of a template that replaces the checkpoint's own."""
    pooling: PoolingConfig | None = None
    """How vectors are made of prompts; None for a model that generates text."""
    embedding_size: int | None = None
    """Width of the vectors in whose form prompts may be given; None where none may."""
    speech: SpeechTokens | None = None
    """The tokens of a model that writes down speech; None for another."""

    @property
    def name(self) -> str:
        """What the person asked for: a hub name, a directory, or octavo-tiny."""
        return self.model


class CacheConfig(CacheArgs):
    """The KV cache: its block size and what may be spent on it."""

    dtype: CacheDType

    @property
    def swap_space_bytes(self) -> int:
        return int(self.swap_space * (1 << 30))


class SchedulerConfig(SchedulerArgs):
    """How many tokens and sequences a step may have, and in which order requests get them."""

    max_model_len: int
    max_steps_in_flight: int = 1
    max_loras: int = 0
    """Different adapters that run at once; 0 where adapters are off."""
    max_cpu_loras: int = 0

    @property
    def target_step_s(self) -> float | None:
        """Seconds that a step which computes prompts may take while other sequences decode; 0 is no limit. None: a
        multiple of the time of a step that only decodes."""
        return None if self.target_step_ms is None else self.target_step_ms / 1e3

    def max_live_tokens(self, sliding_window: int | None) -> int | None:
        """Return the most tokens of one sequence in KV blocks at once under a sliding window: those that the first
        token of a step sees, and those that the step computes. None: all of them, as also where prompts are computed
        whole.

        Behind a sequence that decodes stay one token and one for each step in flight: what those draw may be dropped.
        """
        if sliding_window is None or not self.enable_chunked_prefill:
            return None
        most_new = max(self.max_num_batched_tokens, self.max_steps_in_flight + 1)
        return sliding_window - 1 + most_new + self.num_lookahead_slots


class DeviceConfig(DeviceArgs):
    """Where and how the model runs."""

    threads: int
    user_set_threads: bool = False
    """Whether the number of threads was given: then short steps use all of them too."""
    needs_exact_rows: bool = False
    """Whether results must not depend on how many rows a step has: where it speculates."""
    has_gpus: bool = False
    """Whether each rank has a GPU: asked for, or to be expected on this machine where the device is auto."""
    most_ranks_together: int | None = None
    """Ranks on the machine that has most, where machines have different numbers; then each counts as a machine."""

    @property
    def num_ranks(self) -> int:
        """Ranks that share the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_machine(self) -> int:
        """Ranks that share the memory and the processors of a machine."""
        return self.most_ranks_together or self.num_ranks // self.nnodes


ObservabilityConfig = ObservabilityArgs

LoRAConfig = LoRAArgs
"""Its `lora_dtype` is resolved."""


class ReplicaConfig(ReplicaArgs):
    """The replicas, and which of them a core is.

    number: the place of this replica among them. cpus: the processors that it may run on; empty for all.
    name: how log lines and errors call the core.
    """

    number: int = 0
    cpus: tuple[int, ...] = ()
    name: str = "core"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All sections together."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    device: DeviceConfig
    observability: ObservabilityConfig = ObservabilityConfig()
    replicas: ReplicaConfig = ReplicaConfig()
    transfer: TransferConfig = TransferConfig()
    lora: LoRAConfig = LoRAConfig()
    speculative: SpeculativeConfig | None = None
    draft: DraftConfig | None = None
    """The model that guesses in the workers, where there is one."""

    @property
    def num_engines(self) -> int:
        """Return the number of cores behind one front."""
        return self.transfer.prefill + self.transfer.decode or self.replicas.data_parallel_size

    def with_weights(self, path: str) -> EngineConfig:
        """Return the configuration for the weights of another checkpoint of the model, a directory or a file."""
        draft = self.draft
        if draft is not None and draft.path == self.model.path:  # a part of the model
            draft = msgspec.structs.replace(draft, path=path)
        model = replace(self.model, path=path, load_format="auto")
        return msgspec.structs.replace(self, model=model, draft=draft)

    def place(self, rank: int) -> int:
        """Return the number of a rank of this core among the ranks of all cores of its machine."""
        ranks_here = self.device.ranks_per_machine
        return self.replicas.number * ranks_here + rank % ranks_here

    @property
    def numerics(self) -> dict[str, str]:
        """Return the settings that decide the bits of results, besides the checkpoint and the build."""
        return {
            "device": self.device.device,
            "dtype": self.model.dtype,
            "quantization": str(self.model.quantization),
            "activation_bits": str(self.model.activation_bits),
            "kv_cache_dtype": self.cache.dtype,
            "lora_dtype": self.lora.lora_dtype if self.lora.enable_lora else "none",
            "tensor_parallel_reduce": self.device.tensor_parallel_reduce,
        }

    @property
    def announces_requests(self) -> bool:
        """Return whether the front acts upon what a core has begun to compute: it goes on elsewhere, or is fetched."""
        return self.num_engines > 1 or self.replicas.max_core_restarts > 0 or self.transfer.role is not None
