"""The CPU with compiled kernels."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch

from octavo.config.schema import DeviceConfig
from octavo.core.step import BlockCopy
from octavo.devices.cpu.attention import CpuBackend
from octavo.devices.cpu.dry_library import DryLibrary
from octavo.devices.cpu.recorded_model import MAX_RECORDINGS, MAX_TOKENS, RecordedModel
from octavo.devices.cpu.runtime import CpuRuntime, obstacle
from octavo.devices.cpu.sampler import NativeSampler
from octavo.devices.device import AttentionChoice, CacheTier, LanguageModel, StepRun
from octavo.devices.dry_run import DryAttention, peak_bytes
from octavo.devices.reference.attention import ReferenceBackend
from octavo.devices.reference.device import ReferenceDevice
from octavo.ops.pages import Pages
from octavo.platform import Platform
from octavo.sampling.filters import Filter
from octavo.sampling.processors import LogitsProcessor
from octavo.sampling.sampler import DescribingSampler

if TYPE_CHECKING:
    from octavo import _native

_CALL_BYTES = 256
"""The bytes of a recorded kernel call: its arguments, and the function object around them."""

_SAMPLING_BYTES = 512 << 10
"""Requests and results of a call of the sampler."""

_ALONE_BYTES = 64 << 20
"""Weights times tokens up to which a step runs on one thread: its kernels are too short to gather others."""


class CpuDevice(ReferenceDevice):
    """`Device` on the compiled library."""

    name = "cpu"
    rows_are_exact = True
    lacks: Mapping[str, str] = {}

    def __init__(self, config: DeviceConfig, platform: Platform, because: str, place: int = 0) -> None:
        self.because = because
        self.torch_device = torch.device("cpu")
        self.runtime = CpuRuntime.open(config.threads, config.instruction_set)
        self.kernel_clock = self.runtime.cpu
        self.ops = self.runtime.bind(config.op_overrides)
        self._config = config
        self._memory = platform.memory
        self._most_tokens_alone = 0

    @staticmethod
    def obstacle(platform: Platform) -> str | None:
        return obstacle(platform)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.runtime.empty(shape, dtype)

    def attention(
        self, dtype: torch.dtype, cache_dtype: torch.dtype, *, head_dims: Collection[int], block_size: int
    ) -> AttentionChoice:
        reason = CpuBackend.obstacle(dtype, cache_dtype, head_dims, block_size)
        if reason is not None:
            return AttentionChoice(ReferenceBackend(cache_dtype), reason)
        return AttentionChoice(CpuBackend(self.runtime, cache_dtype), self.runtime.because)

    def sampler(self, processors: Sequence[LogitsProcessor] = (), filters: Sequence[Filter] = ()) -> DescribingSampler:
        return NativeSampler(self.runtime.cpu, processors, filters)

    def sampling_bytes(self, num_rows: int, vocab_size: int) -> int:
        scratch: int = self.runtime.cpu.sampling_scratch_bytes(num_rows, vocab_size)
        return scratch + _SAMPLING_BYTES

    def recorded(self, model: LanguageModel, max_tokens: int) -> LanguageModel:
        return model if self._config.enforce_eager else RecordedModel(model, self.runtime, max_tokens)

    def activation_bytes(self, run: StepRun, num_tokens: int) -> int:
        """Count the memory that steps share, the scratch memory of kernels, and recordings."""
        library = DryLibrary(self.runtime.cpu)
        runtime = CpuRuntime(cast("_native.Cpu", library), "meta")
        ops, attention = runtime.bind(self._config.op_overrides), DryAttention(runtime.empty)
        beside = peak_bytes(lambda: run(ops, attention, num_tokens))
        # what other ranks send is beside the dry runtime, but in the memory of this one
        self.runtime.limit_memory(runtime.held_bytes + beside)
        total = runtime.held_bytes + beside + library.scratch_bytes
        if self._config.enforce_eager:
            return total
        library.num_calls, num_recorded = 0, min(MAX_TOKENS, num_tokens)
        result_bytes: list[int] = []
        total += peak_bytes(
            lambda: result_bytes.append(runtime.record(lambda: run(ops, attention, num_recorded, is_decode=True))[0])
        )
        calls_bytes = library.num_calls * _CALL_BYTES
        return total + runtime.recorded_bytes + MAX_RECORDINGS * (result_bytes[0] + calls_bytes)

    @contextmanager
    def loading(self, plain_bytes: int, pages: Pages | None) -> Iterator[None]:
        """Give torch one thread: two pools would wait for each other's processors."""
        torch.set_num_threads(1)
        self._most_tokens_alone = 0 if self._config.user_set_threads else _ALONE_BYTES // plain_bytes
        if pages is not None:
            self.runtime.weights.begin_with(pages)
        yield
        self.runtime.weights.trim()

    @contextmanager
    def library_threads(self) -> Iterator[None]:
        torch.set_num_threads(self._config.threads)
        try:
            yield
        finally:
            torch.set_num_threads(1)

    def begin_step(self, num_tokens: int) -> None:
        """Let a short step run on one thread."""
        # in a thread that is new to torch this makes its libraries compute on as many threads as torch is told to;
        # on more, products in float32 have other bits
        torch.get_num_threads()
        self.runtime.cpu.is_alone = num_tokens <= self._most_tokens_alone

    def copy_blocks(self, sources: CacheTier, targets: CacheTier, copies: Sequence[BlockCopy]) -> None:
        first = sources.caches[0]
        block_bytes, block_stride = first[0, 0].nbytes, first.stride(1) * first.element_size()
        pairs = torch.tensor([(copy.source, copy.target) for copy in copies])
        from_planes, to_planes = sources.planes, targets.planes
        self.runtime.cpu.copy_blocks(
            from_planes.data_ptr(),
            to_planes.data_ptr(),
            pairs.data_ptr(),
            len(from_planes),
            len(copies),
            block_bytes,
            block_stride,
        )

    def release_idle(self) -> None:
        self.runtime.release_idle()
