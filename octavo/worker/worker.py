"""One rank of the device plane: loads its model, sizes and holds its KV cache, carries out steps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch

from octavo.config.checkpoint import Checkpoint
from octavo.config.explain import MemoryPlan
from octavo.core.model_shape import ModelShape
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.core.step_times import KernelClock
from octavo.devices.choice import make_sampler
from octavo.devices.cpu.recorded_model import RecordedModel
from octavo.distributed.mesh import Mesh
from octavo.models.loader import DTYPES, load_model, make_model
from octavo.models.packed_folder import PackedFolder
from octavo.ops.pages import trim_heap
from octavo.ops.registry import bind, open_runtime
from octavo.platform import Platform
from octavo.quantization.registry import method_named
from octavo.worker.ahead import Ahead
from octavo.worker.attention_backend import attention_backend
from octavo.worker.cache_engine import CacheEngine
from octavo.worker.dummy import FULLEST, dummy_end, dummy_step
from octavo.worker.memory import Workspace, longest_sequence, plan_memory
from octavo.worker.model_runner import ModelRunner
from octavo.worker.step_watch import StepWatch, TimedModel

if TYPE_CHECKING:
    from octavo.config.schema import EngineConfig

_PROGRESS_FROM_BYTES = 256 << 20
"""Smaller models are there before a progress bar is."""

_TORCH_THREADS_FROM_BYTES = 32 << 20
"""Smaller models on plain torch run on one thread: where other processes want the cores too, waiting for a preempted
thread of its pool costs a hundred times the work."""

_ALONE_BYTES = 64 << 20
"""Weights times tokens up to which a step runs on one thread: its kernels are shorter than it pays to gather others."""


class Cpu(KernelClock, Protocol):
    """The part of the compiled library that the worker sets."""

    is_alone: bool


class Worker:
    """The methods are the control calls of an executor; `execute` is the step."""

    def __init__(
        self,
        runner: ModelRunner,
        plan: MemoryPlan,
        op_choices: list[tuple[str, str, str]],
        cpu: Cpu | None = None,
        *,
        most_tokens_alone: int = 0,
        packed: PackedFolder | None = None,
        release_activations: Callable[[], None] | None = None,
    ) -> None:
        """most_tokens_alone: steps of up to as many tokens run on one thread."""
        self._packed = packed
        self._release_activations = release_activations
        self._runner = runner
        self._cpu = cpu
        self._most_tokens_alone = most_tokens_alone
        self._plan = plan
        self._op_choices = op_choices
        self._watch: StepWatch | None = None

    @classmethod
    def build(cls, config: EngineConfig, ahead: Ahead | None = None) -> Worker:
        """Plan the memory, load the weights, allocate the caches. Raises ConfigError or CheckpointError.

        `ahead` is what was begun before.
        """
        ahead = ahead or Ahead()
        device = torch.device(config.device.device)
        taken_bytes = ahead.taken_bytes
        platform = Platform.detect().with_available(taken_bytes)
        checkpoint = Checkpoint.open(Path(config.model.path))
        dtype = DTYPES[config.model.dtype]
        plain_bytes = make_model(checkpoint, Mesh.single(), dtype=dtype).plain_bytes()
        threads = config.device.threads
        runtime = open_runtime(platform, threads, config.device.instruction_set)
        if runtime is not None and ahead.pages is not None:
            runtime.weights.begin_with(ahead.pages)
        ops = bind(platform, config.device.op_overrides, runtime=runtime)
        attention = attention_backend(checkpoint, runtime, model=config.model, cache=config.cache)
        # before the weights: a plan that cannot work fails at once
        plan = plan_memory(
            checkpoint,
            platform,
            ops,
            attention.backend,
            model=config.model,
            cache=config.cache,
            scheduler=config.scheduler,
            device=config.device.device,
        )
        # a setting of the process: this worker owns its threads. Two pools would wait for each other's processors
        is_worth_it = config.device.user_set_threads or plain_bytes >= _TORCH_THREADS_FROM_BYTES
        torch.set_num_threads(threads if runtime is None and is_worth_it else 1)
        model = load_model(
            checkpoint,
            dtype=dtype,
            mesh=Mesh.single(),
            backend=attention.backend,
            ops=ops,
            device=device,
            progress=sys.stderr.isatty() and plan.weights_bytes >= _PROGRESS_FROM_BYTES,
            load_format=config.model.load_format,
            seed=config.model.seed,
            packed=ahead.packed,
            max_positions=longest_sequence(plan.max_model_len, config.scheduler),
            method=method_named(config.model.quantization),
        )
        if runtime is not None:
            runtime.weights.trim()
        shape = model.config.shape()
        cache = _cache_engine(shape, plan, attention.backend, device, runtime)
        is_recorded = runtime is not None and not config.device.enforce_eager
        runner = ModelRunner(
            RecordedModel(model, runtime) if is_recorded else model,
            cache,
            vocab_size=shape.vocab_size,
            block_size=plan.cache.block_size,
            max_num_tokens=config.scheduler.max_num_batched_tokens,
            device=device,
            sampler=make_sampler(runtime),
        )
        choices = [(each.operator, each.implementation, each.because) for each in ops.choices]
        choices.append(("attention", attention.backend.name, attention.because))
        cpu = None if runtime is None else runtime.cpu
        most_alone = 0 if config.device.user_set_threads else _ALONE_BYTES // plain_bytes
        return cls(
            runner,
            plan,
            choices,
            cpu,
            most_tokens_alone=most_alone,
            packed=ahead.packed,
            release_activations=None if runtime is None else runtime.release_idle,
        )

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Carry out a step. When it raises, the sequences are in no known state and the worker is of no further use."""
        if self._cpu is not None and step.rows:
            self._cpu.is_alone = step.num_tokens <= self._most_tokens_alone
        if self._watch is None:
            return self._runner.execute(step)
        self._watch.begin()
        output = self._runner.execute(step)
        return msgspec.structs.replace(output, times=self._watch.end())

    def memory_plan(self) -> MemoryPlan:
        """How the memory was divided."""
        return self._plan

    def op_choices(self) -> list[tuple[str, str, str]]:
        """Operator, the implementation that it got, and the reason."""
        return self._op_choices

    def release_memory(self, empty_blocks: list[int]) -> None:
        """Give back the memory of these KV blocks and of activations. The next step fetches what it needs."""
        self._runner.release_memory(empty_blocks)
        if self._release_activations is not None:
            self._release_activations()
        trim_heap()

    def time_steps(self, is_on: bool) -> None:
        """Report the times of a step's parts with its results from now on, or no longer."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if isinstance(self._runner.model, TimedModel):
            self._runner.model = self._runner.model.model
        if is_on:
            self._watch = StepWatch(self._cpu)
            self._runner.model = TimedModel(self._runner.model, self._watch)

    def check_health(self) -> None:
        """Nothing to check: a worker in this process lives as long as its caller."""

    def shutdown(self) -> None:
        """Give up what runs in the background."""
        if self._packed is not None:
            self._packed.close()

    def dummy_step(self, num_seqs: int, num_tokens: int, params: SamplingParams = FULLEST) -> SchedulerOutput:
        """A step for `execute`; see `octavo.worker.dummy`. Not while requests run: it overwrites the caches."""
        return dummy_step(
            num_seqs,
            num_tokens,
            num_blocks=self._plan.cache.num_blocks,
            block_size=self._plan.cache.block_size,
            params=params,
        )

    def run_dummy(self, num_seqs: int, num_tokens: int) -> None:
        """Execute one such step and forget its sequences."""
        self.execute(self.dummy_step(num_seqs, num_tokens))
        self.execute(dummy_end(num_seqs))


def _cache_engine(
    shape: ModelShape, plan: MemoryPlan, backend: Workspace, device: torch.device, runtime: Any
) -> CacheEngine:
    """The caches that the plan has room for, in the layout of the attention backend."""
    return CacheEngine(
        backend.cache_shape(plan.cache.num_blocks + 1, plan.cache.block_size, shape.num_kv_heads, shape.head_dim),
        shape.num_layers,
        plan.cache.num_blocks,
        plan.cache.num_host_blocks,
        backend.element_type,
        device,
        runtime,
    )
