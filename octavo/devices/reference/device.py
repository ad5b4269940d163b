"""The reference device: plain torch on the CPU. It runs everywhere and defines the results of the other devices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from octavo.config.schema import DeviceConfig
from octavo.core.step import BlockCopy
from octavo.core.step_times import KernelClock
from octavo.devices.device import AttentionChoice, CacheTier, DeviceMemory, LanguageModel, MemoryUse, StepRun
from octavo.devices.dry_run import DryAttention, peak_bytes
from octavo.devices.reference.attention import ReferenceBackend
from octavo.devices.reference.blocks import copy_blocks
from octavo.devices.reference.sampler import ReferenceSampler, reference_bytes
from octavo.devices.token_store import HostTokenStore, TokenStore
from octavo.errors import ConfigError
from octavo.ops.memory import zeroed
from octavo.ops.pages import Pages
from octavo.ops.registry import bind
from octavo.platform import Platform
from octavo.sampling.filters import Filter, default_filters
from octavo.sampling.processors import LogitsProcessor, default_processors
from octavo.sampling.sampler import DescribingSampler

_THREADS_FROM_BYTES = 32 << 20
"""Smaller models run on one thread: where other processes want the cores too, waiting for a preempted thread of torch's
pool costs a hundred times the work."""


class ReferenceDevice:
    """`Device` on torch's operators."""

    name = "reference"
    kernel_clock: KernelClock | None = None
    rows_are_exact = False
    lacks: Mapping[str, str] = {"draft_models": "the bits of a row may depend on how many rows there are"}
    ranks_over: str | None = None
    launches_beside_host = False
    keeps_float8 = False
    processor = ""
    warms_up = False
    most_graphs = 0

    def __init__(self, config: DeviceConfig, platform: Platform, because: str, place: int = 0) -> None:
        if config.instruction_set not in ("auto", "reference"):
            raise ConfigError(
                f"instruction_set is {config.instruction_set}, but the device {self.name} runs no compiled kernels "
                f"({because}); leave it at auto"
            )
        self.because = because
        self.torch_device = torch.device("cpu")
        self.ops = bind(overrides=config.op_overrides)
        self._config = config
        self._memory = platform.memory

    @staticmethod
    def obstacle(platform: Platform) -> str | None:
        return None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.torch_device)

    def memory(self) -> DeviceMemory:
        return DeviceMemory.of_host(self._memory)

    def attention(
        self, dtype: torch.dtype, cache_dtype: torch.dtype, *, head_dims: Collection[int], block_size: int
    ) -> AttentionChoice:
        return AttentionChoice(ReferenceBackend(cache_dtype), f"the only one of the device {self.name}")

    def sampler(self, processors: Sequence[LogitsProcessor] = (), filters: Sequence[Filter] = ()) -> DescribingSampler:
        return ReferenceSampler((*processors, *default_processors()), (*default_filters(), *filters))

    def sampling_bytes(self, num_rows: int, vocab_size: int) -> int:
        return reference_bytes(num_rows, vocab_size)

    def token_store(self) -> TokenStore:
        return HostTokenStore()

    def recorded(self, model: LanguageModel, max_tokens: int) -> LanguageModel:
        """Return the model itself: torch's operators are not recorded."""
        return model

    def activation_bytes(self, run: StepRun, num_tokens: int) -> int:
        return peak_bytes(lambda: run(self.ops, DryAttention(), num_tokens))

    @contextmanager
    def loading(self, plain_bytes: int, pages: Pages | None) -> Iterator[None]:
        """Set the number of torch's threads, which holds for the whole process."""
        is_worth_it = self._config.user_set_threads or plain_bytes >= _THREADS_FROM_BYTES
        torch.set_num_threads(self._config.threads if is_worth_it else 1)
        yield
        if pages is not None:
            pages.release_from(0)

    def library_threads(self) -> AbstractContextManager[None]:
        """Do nothing: torch has its threads already."""
        return nullcontext()

    def begin_step(self, num_tokens: int) -> None:
        """Do nothing: torch uses the same threads in every step."""

    def behind_steps(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        return work()

    def copy_blocks(self, sources: CacheTier, targets: CacheTier, copies: Sequence[BlockCopy]) -> None:
        copy_blocks(sources.caches, targets.caches, copies)

    def swap_space(self, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """Return what makes it: its pages take memory when they are written."""
        return lambda: zeroed(shape, dtype)

    def measure(self) -> Callable[[], MemoryUse]:
        return lambda: MemoryUse(0, 0)

    def release_idle(self) -> None:
        """Do nothing: torch frees memory at once."""
