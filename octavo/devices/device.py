"""The protocol of a device, and the choice of one at start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention.backend import AttentionBackend
from octavo.attention.metadata import ModelInput
from octavo.config.schema import DeviceConfig
from octavo.core.step import BlockCopy
from octavo.core.step_times import KernelClock
from octavo.devices import DEVICES
from octavo.devices.token_store import TokenStore
from octavo.errors import ConfigError
from octavo.ops.pages import Pages
from octavo.ops.registry import Ops
from octavo.platform import Memory, Platform
from octavo.sampling.filters import Filter
from octavo.sampling.processors import LogitsProcessor
from octavo.sampling.sampler import DescribingSampler

_log = logging.getLogger(__name__)

KV_BYTES_ON_HOST: Final = 4 << 30
"""Most KV cache in the host's memory unless the user asks for more: the machine has other things to do."""


class AttentionChoice(NamedTuple):
    """An attention backend and the reason for it."""

    backend: AttentionBackend
    because: str


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory that the plan divides. `source` says what limits it: "machine" or "cgroup"."""

    total: int
    available: int
    source: str
    is_host: bool = True
    """Swap space is taken from the same memory."""
    host_available: int | None = None
    """Bytes of the host for swap space, which is pinned at start; None where the device computes in this memory."""
    most_kv_bytes: int | None = KV_BYTES_ON_HOST
    """Largest KV cache in bytes unless the user asks for more; None for all memory that is left."""

    @classmethod
    def of_host(cls, memory: Memory) -> DeviceMemory:
        """Return the memory of the machine."""
        return cls(memory.total, memory.available, memory.source)

    def share(self, num_ranks: int) -> DeviceMemory:
        """Return the memory of each of `num_ranks` ranks of a machine, each with its own device; they share the
        host."""
        if not self.is_host:
            of_host = self.host_available
            return self if of_host is None else replace(self, host_available=of_host // num_ranks)
        most_kv_bytes = None if self.most_kv_bytes is None else self.most_kv_bytes // num_ranks
        return replace(self, available=self.available // num_ranks, most_kv_bytes=most_kv_bytes)


class MemoryUse(NamedTuple):
    """Bytes of a device's memory that were taken since it began to be measured."""

    peak: int
    """The most at one time, including what libraries and graphs hold, and what is kept for later tensors."""
    beside: int
    """The bytes that libraries and graphs hold now."""


class CacheTier(NamedTuple):
    """The KV caches of some layers in one kind of memory."""

    caches: Sequence[Tensor]
    """One per layer, blocks in dimension 1, all with the same strides; a block of a plane lies in one piece."""
    planes: Tensor
    """int64: the addresses at which block 0 of each cache, and of each of its planes in dimension 0, begins."""
    blocks: Tensor
    """[blocks, layers, ...]: the memory of the caches, a block of all layers in one piece."""
    is_swap_space: bool = False


class LanguageModel(Protocol):
    """The part of a model that the model runner calls."""

    def __call__(self, batch: ModelInput) -> Tensor:
        """Return the last hidden states [tokens, hidden]; a pipeline stage that is not the last, what it sends."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits, float32 [rows, vocab]."""


@runtime_checkable
class DrawingModel(LanguageModel, Protocol):
    """A model whose decode steps can draw and store tokens in the launch that computes them."""

    def padded(self, num_rows: int) -> int:
        """Return the number of rows to which a decode step is padded: launches exist for some sizes only."""

    def draw(
        self, batch: ModelInput, asked: NDArray[np.float64], key: Hashable, draw: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor | None:
        """Compute logits and launch `draw` with them and `asked` on the device; return what it returns, valid until the
        next step. None, and nothing is computed, where the step cannot be launched so.

        key: says which steps make the same launches with other numbers in `asked`.
        """


class StepRun(Protocol):
    """A step without data, for the memory plan."""

    def __call__(self, ops: Ops, attention: AttentionBackend, num_tokens: int, *, is_decode: bool = False) -> int:
        """Compute `num_tokens` tokens on the meta device, of one row each where `is_decode`; return the result's bytes.

        Unless `is_decode`, logits of as many rows are computed as a step computes at once.
        """


class Device(Protocol):
    """What a worker computes with. One object per worker, made at start from the configuration by `open_device`."""

    name: str
    because: str
    """Why this device was chosen."""
    torch_device: torch.device
    """Where weights, caches and activations are."""
    ops: Ops
    """The operators, bound once."""
    rows_are_exact: bool
    """Whether the bits of a row never depend on the number of rows in a step, on any processor."""
    lacks: Mapping[str, str]
    """Those of `support.FEATURES` that the device lacks, each with the reason."""
    ranks_over: str | None
    """The backend of torch's process groups by which ranks on such devices reach each other: "nccl"; None where their
    tensors are in the memory of the host."""
    launches_beside_host: bool
    """Whether steps and swaps run in parallel with the host. Then swap space is made at start: it has to be pinned."""
    keeps_float8: bool
    """Whether its products read weights of FP8 checkpoints as they are stored."""
    processor: str
    """The properties of the processor and its compiler that decide bits, for ranks that exchange KV blocks; empty where
    `worker.identity` is enough."""
    warms_up: bool
    """Whether the largest steps are made at start, and the KV cache follows from what they took: the device has memory
    of its own, and kernels to compile."""
    most_graphs: int
    """Most recordings of a model that take memory beside tensors and are kept at a time."""
    kernel_clock: KernelClock | None
    """Counts the time of the device's own kernels; None where torch computes."""

    def __init__(self, config: DeviceConfig, platform: Platform, because: str, place: int = 0) -> None:
        """place: the number of the rank among those of all engines of this machine; where each has a device, it takes
        the one with this number.

        Raise ConfigError for settings that the device does not have, and where there are too few devices.
        """

    @staticmethod
    def obstacle(platform: Platform) -> str | None:
        """Return why the device cannot be used on this machine; None where it can."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised dense tensor in the memory of activations."""

    def memory(self) -> DeviceMemory:
        """Return the memory to divide between weights, activations and KV cache."""

    def attention(
        self, dtype: torch.dtype, cache_dtype: torch.dtype, *, head_dims: Collection[int], block_size: int
    ) -> AttentionChoice:
        """Return the best attention backend for all layers of a model in `dtype` with a cache in `cache_dtype`.

        head_dims: the sizes of heads in them.
        """

    def sampler(self, processors: Sequence[LogitsProcessor] = (), filters: Sequence[Filter] = ()) -> DescribingSampler:
        """Return a sampler. `processors` act before those that sampling parameters ask for, `filters` after them."""

    def sampling_bytes(self, num_rows: int, vocab_size: int) -> int:
        """Return the most bytes that the sampler holds for that many rows of logits, the logits not included."""

    def token_store(self) -> TokenStore:
        """Return an empty store for the tokens of a worker's sequences."""

    def recorded(self, model: LanguageModel, max_tokens: int) -> LanguageModel:
        """Return `model` with its small steps recorded and repeated where the device can, else `model` itself.

        A step has at most `max_tokens` tokens.
        """

    def activation_bytes(self, run: StepRun, num_tokens: int) -> int:
        """Return the most bytes that models hold beside weights and KV cache, attention's workspace not included.

        `run` is called for a forward pass of `num_tokens` tokens, and for a smaller one where those are recorded. The
        device holds no more from then on.
        """

    def loading(self, plain_bytes: int, pages: Pages | None) -> AbstractContextManager[None]:
        """Enclose the loading of a model whose plain weights take `plain_bytes`, and adapt the threads to its size.

        `pages` is memory for weights that was fetched ahead; what is not used of it is given back at the end.
        """

    def library_threads(self) -> AbstractContextManager[None]:
        """Enclose what torch itself computes between steps, such as an encoder: it gets the threads of the device."""

    def begin_step(self, num_tokens: int) -> None:
        """Prepare for a step that computes `num_tokens`."""

    def copy_blocks(self, sources: CacheTier, targets: CacheTier, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks of all layers from one tier to another or within one, in the order of `copies`."""

    def behind_steps(self, work: Callable[[], Tensor]) -> Tensor:
        """Run work that reads or writes KV blocks after the steps that were launched before; wait, and return its
        result. Called by any thread."""

    def swap_space(self, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Tensor]:
        """Begin to make memory [blocks, ...] of the host, to and from which `copy_blocks` copies, and return what waits
        for it. That raises ConfigError where the host has too little.
        """

    def measure(self) -> Callable[[], MemoryUse]:
        """Return a function that returns the memory taken from now on; none where the device uses the host's memory."""

    def release_idle(self) -> None:
        """Give back memory of activations that no tensor uses."""


def open_device(config: DeviceConfig, platform: Platform, place: int = 0) -> Device:
    """Return the device of `config.device`; for auto, the first of `DEVICES` that can be used on this machine.

    place: the number of the rank among those of all engines of this machine. Raises ConfigError for a device that
    cannot be used here, and for settings that it does not have.
    """
    obstacles: dict[str, str] = {}
    for name in DEVICES if config.device == "auto" else (config.device,):
        device = _device_class(name)
        obstacle = device.obstacle(platform)
        if obstacle is None:
            if "cpu" in obstacles and name == "reference" and config.instruction_set == "auto":
                _log.warning("%s; PyTorch computes instead, several times slower", obstacles["cpu"])
            reasons = [f"{other} cannot run: {reason}" for other, reason in obstacles.items()]
            chosen = "the best that can run here" if config.device == "auto" else "asked for"
            opened = device(config, platform, "; ".join(reasons) or chosen, place)
            if config.needs_exact_rows and not opened.rows_are_exact:
                raise ConfigError(
                    f"speculative_config is set, but the bits of a row on the device {name} ({opened.because}) may "
                    "depend on how many rows there are, and so results on guesses; leave it out, give batch_invariant "
                    "on a GPU, or use a device with compiled kernels"
                )
            return opened
        obstacles[name] = obstacle
    raise ConfigError(f"device is {config.device}, but {obstacles[config.device]}; or leave device at auto")


def _device_class(name: str) -> type[Device]:
    module, _, class_name = DEVICES[name].rpartition(".")
    found: type[Device] = getattr(import_module(module), class_name)
    return found
