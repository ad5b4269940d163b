"""The device CUDA: one GPU of NVIDIA."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Final

import torch

from octavo.config.schema import DeviceConfig
from octavo.core.step import BlockCopy
from octavo.devices.cuda.attention import CudaBackend, RotatingCudaBackend
from octavo.devices.cuda.cubins import FOLDER, open_launcher, triton_version
from octavo.devices.cuda.driver import Driver, newest_cuda
from octavo.devices.cuda.graphs import MAX_GRAPHS, MAX_ROWS, Graph, GraphedModel
from octavo.devices.cuda.runtime import CudaRuntime, Launcher
from octavo.devices.cuda.sampler import CHUNK_BYTES, CudaSampler, read_later
from octavo.devices.cuda.swaps import STAGING_BYTES, Stream, Swaps, done_behind
from octavo.devices.device import AttentionChoice, CacheTier, DeviceMemory, LanguageModel, MemoryUse, StepRun
from octavo.devices.dry_run import DryAttention, peak_bytes
from octavo.devices.reference.device import ReferenceDevice
from octavo.devices.reference.sampler import reference_bytes
from octavo.devices.token_store import DeviceTokenStore, TokenStore
from octavo.errors import ConfigError
from octavo.ops.pages import Pages
from octavo.ops.registry import bind
from octavo.platform import Platform
from octavo.sampling.filters import Filter, default_filters
from octavo.sampling.processors import LogitsProcessor, default_processors
from octavo.sampling.sampler import DescribingSampler

LEAST_CAPABILITY: Final = (8, 0)
"""Ampere: the first with products of bfloat16."""
FLOAT8_CAPABILITY: Final = (8, 9)
"""Ada: the first that decodes floats of 8 bits."""


def _why_unavailable(needed: str) -> str:
    """Return why PyTorch finds no GPU. needed: the version of CUDA that it is built with."""
    newest = newest_cuda()
    if newest is None:
        return "no driver of NVIDIA is installed: libcuda.so.1 is missing"
    runs = f"the driver runs CUDA up to {newest[0]}.{newest[1]}, and this PyTorch is built with {needed}"
    # a driver runs all versions of its major one
    if newest[0] < int(needed.partition(".")[0]):
        return f"{runs}: install a newer driver, or a PyTorch for an older CUDA"
    return f"there is no GPU that can be used ({runs}): check nvidia-smi and CUDA_VISIBLE_DEVICES"


def _why_too_old(name: str, capability: tuple[int, int]) -> str | None:
    """Return why a GPU of this compute capability cannot be used; None where it can."""
    if capability >= LEAST_CAPABILITY:
        return None
    found, least = (".".join(map(str, each)) for each in (capability, LEAST_CAPABILITY))
    return f"{name} has compute capability {found}, and {least} is needed"


class CudaDevice(ReferenceDevice):
    """`Device` on a GPU. Operators without a kernel are torch's, as on the device `reference`."""

    name = "cuda"
    lacks: Mapping[str, str] = {"chosen_tokens": "no kernel computes the choice"}
    ranks_over = "nccl"
    launches_beside_host = True
    keeps_float8 = True
    warms_up = True
    most_graphs = MAX_GRAPHS

    def __init__(self, config: DeviceConfig, platform: Platform, because: str, place: int = 0) -> None:
        if config.instruction_set != "auto":
            raise ConfigError(
                f"instruction_set is {config.instruction_set}, but the device cuda has none ({because}); leave it at "
                "auto"
            )
        super().__init__(config, platform, because)
        self.torch_device = self._own_gpu(place)
        too_old = _why_too_old(f"the GPU {place} of this rank", self._capability())
        if too_old is not None:  # others of this machine may be newer
            raise ConfigError(f"{too_old}: choose others by CUDA_VISIBLE_DEVICES")
        self._swaps: Swaps | None = None
        self._transfer_streams = self._streams()
        has_float8 = self._capability() >= FLOAT8_CAPABILITY
        launcher, shared_bytes = self.launcher(config.batch_invariant), self.shared_bytes()
        self.runtime = CudaRuntime(config.batch_invariant, launcher, shared_bytes, has_float8)
        self.rows_are_exact = config.batch_invariant
        self.ops = self.runtime.bind(config.op_overrides)

    def launcher(self, is_invariant: bool) -> Launcher:
        """Return the launcher of kernels. is_invariant: as in `open_launcher`."""
        major, minor = self._capability()
        return open_launcher(10 * major + minor, self.shared_bytes(), Driver.open, is_invariant=is_invariant)

    def _capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability(self.torch_device)

    @property
    def processor(self) -> str:  # type: ignore[override]
        return f"compute capability {'.'.join(map(str, self._capability()))}, Triton {triton_version() or 'none'}"

    def shared_bytes(self) -> int:
        """Return the bytes of shared memory of an SM."""
        return torch.cuda.get_device_properties(self.torch_device).shared_memory_per_multiprocessor

    @staticmethod
    def obstacle(platform: Platform) -> str | None:
        if torch.version.cuda is None:
            return f"this PyTorch ({torch.__version__}) is built without CUDA: install a build that has it"
        if not torch.cuda.is_available():
            return _why_unavailable(torch.version.cuda)
        too_old = _why_too_old(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
        if too_old is not None:
            return too_old
        if triton_version() is None and not FOLDER.is_dir():
            return "Triton is not installed: pip install 'octavo[cuda]'"
        return None

    def _own_gpu(self, place: int) -> torch.device:
        """Return the GPU of a rank and make it the current one. Raises ConfigError where there are too few.

        Numbers are those of the GPUs that the process sees: CUDA_VISIBLE_DEVICES chooses them.
        """
        if self._config.executor == "ray" and self._config.num_ranks > 1:
            return self._current(0)  # the process sees that of its rank alone
        ranks_here = self._config.ranks_per_machine
        needed, found = (place // ranks_here + 1) * ranks_here, self._num_gpus()
        if needed > found:
            raise ConfigError(
                f"tensor_parallel_size x pipeline_parallel_size x data_parallel_size needs {needed} GPUs on this "
                f"machine, one for each rank, and {found} can be seen; lower them, or check CUDA_VISIBLE_DEVICES"
            )
        return self._current(place)

    def _num_gpus(self) -> int:
        return torch.cuda.device_count()

    def _current(self, index: int) -> torch.device:
        torch.cuda.set_device(index)
        return torch.device("cuda", index)

    def begin_step(self, num_tokens: int) -> None:
        """Make the rank's GPU that of the calling thread."""
        self._current(self.torch_device.index or 0)

    def memory(self) -> DeviceMemory:
        available, total = torch.cuda.mem_get_info(self.torch_device)
        of_host = self._memory.available
        return DeviceMemory(total, available, "device", is_host=False, host_available=of_host, most_kv_bytes=None)

    def attention(
        self, dtype: torch.dtype, cache_dtype: torch.dtype, *, head_dims: Collection[int], block_size: int
    ) -> AttentionChoice:
        reason = CudaBackend.obstacle(cache_dtype, head_dims, block_size)
        if reason is not None:
            raise ConfigError(reason)
        rotates = self._config.op_overrides.get("rotary", "triton") == "triton"
        backend = (RotatingCudaBackend if rotates else CudaBackend)(self.runtime, cache_dtype)
        return AttentionChoice(backend, "compiled by Triton")

    def sampler(self, processors: Sequence[LogitsProcessor] = (), filters: Sequence[Filter] = ()) -> DescribingSampler:
        every, own = (*processors, *default_processors()), (*default_filters(), *filters)
        return CudaSampler(self.runtime, self.torch_device, self.read_later, every, own)

    read_later = staticmethod(read_later)

    def token_store(self) -> TokenStore:
        return DeviceTokenStore(self.torch_device)

    def sampling_bytes(self, num_rows: int, vocab_size: int) -> int:
        return reference_bytes(num_rows, vocab_size, CHUNK_BYTES)

    def recorded(self, model: LanguageModel, max_tokens: int) -> LanguageModel:
        """Return `model` with its decode steps captured as CUDA graphs."""
        if self._config.enforce_eager or not max_tokens:
            return model
        return GraphedModel(model, self.graphs(), is_shared=self._config.num_ranks > 1)

    def graphs(self) -> Callable[[], Graph]:
        """Return a function that makes graphs, which share their memory."""
        stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        return partial(Graph, torch.cuda.graph_pool_handle(), stream)

    def activation_bytes(self, run: StepRun, num_tokens: int) -> int:
        """Return the bytes that the reference's operators hold, and those of graphs. Kernels of CUDA hold no more."""
        ops = bind()
        total = STAGING_BYTES + peak_bytes(lambda: run(ops, DryAttention(), num_tokens))
        if self._config.enforce_eager:
            return total
        return total + peak_bytes(lambda: run(ops, DryAttention(), min(MAX_ROWS, num_tokens), is_decode=True))

    @contextmanager
    def loading(self, plain_bytes: int, pages: Pages | None) -> Iterator[None]:
        """Release pages of the host after loading: weights are on the GPU."""
        yield
        if pages is not None:
            pages.release_from(0)

    def swap_space(self, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """Begin to pin memory in a thread, because gigabytes take seconds; allocate the buffer of swaps at once."""
        block_bytes = prod(shape[1:]) * dtype.itemsize
        if self._swaps is None or self._swaps.most_bytes < block_bytes:  # that of another cache group is too small
            self._swaps = Swaps(*self._streams(), self.torch_device, block_bytes)
        thread = ThreadPoolExecutor(1, thread_name_prefix="octavo-pinning")
        pinned = thread.submit(self._pinned, shape, dtype)
        thread.shutdown(wait=False)

        def wait() -> torch.Tensor:
            try:
                return pinned.result()
            except RuntimeError as error:
                raise ConfigError(
                    f"swap_space of {prod(shape) * dtype.itemsize:,} bytes cannot be pinned in the memory of the host: "
                    f"{error}; lower it"
                ) from error

        return wait

    def _pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.begin_step(0)  # a thread that has chosen no GPU would open the first one
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def _streams(self) -> tuple[Stream, Stream]:
        """Return the stream that computes, and a new one."""
        return Stream(self.torch_device, is_side=False), Stream(self.torch_device, is_side=True)

    def behind_steps(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        return done_behind(*self._transfer_streams, work)

    def copy_blocks(self, sources: CacheTier, targets: CacheTier, copies: Sequence[BlockCopy]) -> None:
        """Copy within the GPU in order with what computes; swap without waiting (`cuda/swaps`)."""
        if sources.is_swap_space == targets.is_swap_space:
            super().copy_blocks(sources, targets, copies)
            return
        assert self._swaps is not None, "there is no swap space"
        move = self._swaps.move_in if sources.is_swap_space else self._swaps.move_out
        move(sources.blocks, targets.blocks, copies)

    def measure(self) -> Callable[[], MemoryUse]:
        gpu = self.torch_device
        torch.cuda.reset_peak_memory_stats(gpu)
        (free, _), kept = torch.cuda.mem_get_info(gpu), torch.cuda.memory_reserved(gpu)

        def taken() -> MemoryUse:
            (free_now, _), kept_now = torch.cuda.mem_get_info(gpu), torch.cuda.memory_reserved(gpu)
            most = torch.cuda.max_memory_reserved(gpu)
            # another process may free memory meanwhile; what torch has taken is known all the same
            return MemoryUse(max(most - kept, free - free_now + most - kept_now), free - free_now - (kept_now - kept))

        return taken

    def release_idle(self) -> None:
        gc.collect()  # graphs and their models hold each other
        torch.cuda.empty_cache()
