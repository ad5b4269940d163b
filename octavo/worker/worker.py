"""One rank of the device plane: it loads its model, sizes and holds its KV cache, and executes steps."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from octavo.attention.backend import cache_layout
from octavo.attention.cache_format import CACHE_DTYPES
from octavo.config.explain import MemoryPlan
from octavo.config.json_options import profiler_config
from octavo.core.cache_limits import CacheLimits
from octavo.core.launched import LaunchedStep
from octavo.core.media import MediaInput
from octavo.core.process.processes import SHUTDOWN_TIMEOUT_S
from octavo.core.process.rendezvous import Rendezvous
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.devices.support import open_supporting
from octavo.distributed.groups import Allocate, Meet, open_groups
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, ConfigError, EngineDeadError
from octavo.kv_transfer.messages import PeerRank, TierFolder
from octavo.models.loader import DTYPES
from octavo.ops.pages import trim_heap
from octavo.platform import Platform
from octavo.worker.cache_engine import Arena, CacheEngine, SwapSpace, begin_swap_space
from octavo.worker.calls import MAY_FAIL, OF_ADAPTERS, STARTING, check_call
from octavo.worker.launching import LaunchingRunner
from octavo.worker.model_runner import ModelRunner
from octavo.worker.profiling import Profiling
from octavo.worker.start.ahead import Ahead, collect_frozen, collector_paused
from octavo.worker.start.identity import Identity
from octavo.worker.start.loading import LoadedRank, RankParts
from octavo.worker.start.memory import refusing_too_little
from octavo.worker.start.opening import kept_bytes, mesh_of_rank, open_models, proving_parts
from octavo.worker.start.sizing import Sizing
from octavo.worker.start.warm_up import WarmUp
from octavo.worker.step_watch import StepWatch, TimedModel

if TYPE_CHECKING:
    from octavo.config.schema import EngineConfig
    from octavo.worker.transfer.block_io import BlockIO
    from octavo.worker.transfer.rank_transfer import RankTransfer

_SHUT_DOWN = "the executor is shut down"


class Worker:
    """One rank, and the `Executor` of a model with a single rank: a step runs when it is submitted. Order of calls:
    `prepare`, `load`, `allocate` with the blocks that fit on all ranks, then steps. One thread at a time.
    """

    sends_tokens = False
    """The worker draws all tokens itself."""

    def __init__(
        self,
        config: EngineConfig,
        ahead: Ahead | None = None,
        rank: int = 0,
        rendezvous: Rendezvous | None = None,
        open_mesh: Callable[[Mesh, Rendezvous, Allocate, str | None, Meet | None], Mesh] = open_groups,
        notify: Callable[[bytes], None] | None = None,
        meet: Meet | None = None,
    ) -> None:
        """Open the device and the model without its weights. Raises ConfigError or CheckpointError.

        ahead: work that was started before. rendezvous: where `open_mesh` opens the groups of ranks; None: no other
        ranks.
        notify: sends notes of a KV connector, from any thread. meet: as in `open_groups`.
        """
        self._config, self._ahead = config, ahead or Ahead()
        self._notify = notify or (lambda _: None)
        platform = Platform.detect().with_available(self._ahead.taken_bytes)
        self._device = device = open_supporting(config, platform, config.place(rank))
        place = mesh_of_rank(config, rank)
        self._mesh = (
            place if rendezvous is None else open_mesh(place, rendezvous, device.empty, device.ranks_over, meet)
        )
        dtype = DTYPES[config.model.dtype]
        opened, draft = open_models(config, self._mesh, device)
        head_dims, self._groups = opened.shape.head_dims, opened.shape.cache_groups
        if draft is not None:
            head_dims |= draft.shape.head_dims
            self._groups += draft.cache_groups
        self._attention = device.attention(
            dtype, CACHE_DTYPES[config.cache.dtype], head_dims=head_dims, block_size=config.cache.block_size
        )
        from octavo import __version__

        packed = config.model.packed_directory
        folder = None if packed is None else Path(packed) / f"proofs-{__version__}"
        self._proof = opened.model.proof(*proving_parts(device), folder)
        self.plan: MemoryPlan
        """How the memory is divided, after `prepare`."""
        sections = config.model, config.scheduler, config.lora
        num_drafts = config.speculative.num_speculative_tokens if config.speculative else 0
        parts = RankParts(device, self._attention.backend, self._mesh, opened, draft, *sections, num_drafts)
        ranks_here = config.device.ranks_per_machine
        kept = kept_bytes(config.transfer, config.num_engines * ranks_here)
        self._parts = self._parts_to_load = parts
        self._sizing = Sizing(parts, config.cache, ranks_here, kept)
        self._is_measured = self._sizing.is_measured
        self._swap_space: SwapSpace | None = None
        self._loaded: LoadedRank
        self._runner: ModelRunner
        """It has the KV caches. Before `load` and `allocate`, and during a sleep, neither it nor the loaded models
        exist."""
        self._watch: StepWatch | None = None
        name = f"{config.replicas.name.replace(' ', '')}-rank{rank}"
        self.profile = Profiling(profiler_config(config.observability.profiler_config), name).switch
        self._failure: str | None = None

    def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Run the step; the returned future is done, with the result or the exception. After an error the state of
        sequences is undefined: every later step and call raises EngineDeadError."""
        future: Future[ModelRunnerOutput] = Future()
        try:
            self._check()
            if step.rows:
                self._device.begin_step(step.num_tokens)
            if step.connector is None:
                if isinstance(self._runner, LaunchingRunner) and self._watch is None:
                    return self._launched(self._runner, step)
                future.set_result(self._run(step))
            else:
                with self._transfer.step(step.connector):
                    output = self._run(step)
                future.set_result(output)
        except Exception as error:
            future.set_exception(self._note_failure(error))
        return future

    def _launched(self, runner: LaunchingRunner, step: SchedulerOutput) -> LaunchedStep:
        collect, mesh = runner.launch(step), self._mesh

        def checked() -> ModelRunnerOutput:
            output = collect()
            mesh.check()
            return output

        return LaunchedStep(checked, self._note_failure)

    def _note_failure(self, error: Exception) -> Exception:
        self._failure = self._failure or f"the worker failed in an earlier step: {type(error).__name__}: {error}"
        return error

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if self._watch is not None:
            self._watch.begin()
        output = self._runner.execute(step)
        if self._device.ranks_over is not None:
            self._mesh.check()
        return output if self._watch is None else msgspec.structs.replace(output, times=self._watch.end())

    @cached_property
    def _transfer(self) -> RankTransfer:
        """The rank's half of the KV connector, made when it is first used."""
        from octavo.worker.transfer.file_tier import FileTiers
        from octavo.worker.transfer.rank_transfer import RankTransfer

        model, cache = self._parts.opened.model, self._runner.cache
        blocks = self._blocks([*cache.caches, *cache.draft_caches])
        transfer, block_size = self._config.transfer, self.plan.cache.block_size
        return RankTransfer(
            blocks,
            () if self._device.launches_beside_host else model.layers.values(),
            self._notify,
            lambda: FileTiers(transfer, blocks, self.identity(), block_size),
        )

    def _blocks(self, caches: Sequence[Tensor]) -> BlockIO:
        from octavo.worker.transfer.block_io import BlockIO, held_heads

        model, draft = self._parts.opened.model, self._parts.draft
        layers = model.layer_range
        heads = [held_heads(group.keeps, self._mesh) for group in model.config.shape().cache_groups]
        if draft is not None:
            heads, layers = heads + draft.heads, range(layers.stop + draft.num_layers)
        return BlockIO(caches, self._groups, heads, layers, self._device.behind_steps)

    def explain_disk(self) -> str | None:
        """After `prepare`, return the prefix length from which on kv_disk is read, and why; None without kv_disk."""
        if (folder := self._config.transfer.kv_disk) is None:
            return None
        from octavo.worker.transfer.file_tier import explain_folder

        limits, groups = self.plan.cache, self._groups
        layouts = [cache_layout(self._attention.backend, each.keeps, 1, limits.block_size) for each in groups]
        places = sorted((layer, number) for number, each in enumerate(groups) for layer in each.layers)
        blocks = self._blocks([torch.empty(layouts[n].shape, dtype=layouts[n].dtype) for _, n in places])
        return explain_folder(Path(folder), blocks, self.identity(), limits)

    def identity(self) -> dict[str, str]:
        """Return the values that the bits of results and KV blocks depend on, besides the tokens. Raises
        CheckpointError."""
        config, model = self._config, self._config.model
        is_summed = self._mesh.tensor.size > 1 and self._mesh.reduce == "sum"
        return {
            **msgspec.structs.asdict(Identity.of(config)),
            **config.numerics,
            "tensor_parallel_reduce": f"sum of {self._mesh.tensor.size}" if is_summed else "gather",
            "dummy_seed": str(model.seed or 0) if model.load_format == "dummy" else "",
            # of the configured length, which is the same on all ranks, not of the one that fits this rank's memory
            **({"positions": note} if (note := self._parts.opened.model.config.rope_note(model.max_model_len)) else {}),
            **(self._parts.draft.identity() if self._parts.draft is not None else {}),
            "processor": self._device.processor,
            "operators": str(sorted((name, implementation) for name, implementation, _ in self.op_choices())),
        }

    def open_tiers(self) -> list[TierFolder]:
        """Open the tiers of this rank outside the cache. Raises ConfigError for a folder that cannot be used."""
        return self._transfer.tiers.folders

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Make one of `CALLS` and return its value in a list. Raises ConfigError for another name."""
        check_call(method)
        self._check()
        try:
            with collector_paused() if method in STARTING else nullcontext():
                return [getattr(self._loaded.adapters if method in OF_ADAPTERS else self, method)(*arguments)]
        except (CheckpointError, ConfigError, OSError) as error:
            if method not in MAY_FAIL:
                raise
            return [str(error)]

    def _check(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(self._failure)

    def prepare(self, *, is_dry: bool = False) -> MemoryPlan:
        """Return how this rank would divide its memory. Raises ConfigError, with a remedy, when there is too little.
        is_dry: nothing will be loaded, so memory that a start measures is planned instead."""
        self.plan = self._sizing.plan(is_dry=is_dry)
        return self.plan

    def load(self, max_model_len: int, num_host_blocks: list[int]) -> MemoryPlan:
        """Load the weights, after `prepare`, and return the memory plan, with measured steps if the device measures
        them.

        max_model_len: tokens that a sequence has at most on every rank. num_host_blocks: blocks of the swap space, for
        each cache group. Raises CheckpointError, or ConfigError for a folder of packed weights that cannot be made, and
        for too little memory.
        """
        self._max_model_len = max_model_len
        if self._device.launches_beside_host:  # it takes seconds, and runs while the weights load
            no_blocks = [0] * len(num_host_blocks)
            arenas = self._arenas(self.plan.cache.with_blocks(no_blocks, num_host_blocks))
            self._swap_space = begin_swap_space(arenas, self._device)
        self._load_weights(self._ahead)
        self._ahead = Ahead(self._ahead.packed)  # whose pages are the model's
        if self._is_measured:
            self.plan = self._sizing.measured(self.plan, self._loaded, self._made_cache, max_model_len)
        del self._sizing  # it holds the models
        return self.plan

    def _load_weights(self, ahead: Ahead) -> None:
        with refusing_too_little("while weights were loaded", self.plan.weights_bytes, kv_bytes=0):
            self._loaded = self._parts.load(ahead, self.plan.max_model_len)

    def allocate(self, num_blocks: list[int], num_host_blocks: list[int]) -> None:
        """Allocate the KV caches and the swap space, after `load`, with these numbers of blocks for each cache group.
        Raises ConfigError if swap space cannot be pinned, or the largest steps do not fit."""
        self.plan = self.plan.limited_to(num_blocks, num_host_blocks)
        self._make_runner()
        self.wake_up()

    def encode_media(self, examples: list[Any]) -> None:
        """Encode inputs (`MediaInput` as objects) to check the encoder. Raises like `PromptEncodings.check`."""
        if (encodings := self._runner.parts.encodings) is not None:
            for each in msgspec.convert(examples, list[MediaInput]):
                encodings.check(each)

    def _make_runner(self) -> None:
        with refusing_too_little("for the KV caches", self.plan.weights_bytes, self.plan.kv_bytes):
            cache = self._made_cache(self.plan.cache, self._swap_space)
            self._runner = self._loaded.runner(cache, self.plan.cache.block_size)

    def _made_cache(self, limits: CacheLimits, swap_space: SwapSpace | None = None) -> CacheEngine:
        num_draft_groups = len(self._groups) - len(self._parts.opened.shape.cache_groups)
        return CacheEngine(self._arenas(limits), self._device, num_draft_groups, swap_space)

    def _arenas(self, limits: CacheLimits) -> list[Arena]:
        backend, block_size = self._attention.backend, limits.block_size
        return [
            Arena(
                group.layers, cache_layout(backend, group.keeps, each.num_blocks + 1, block_size), each.num_host_blocks
            )
            for group, each in zip(self._groups, limits.groups, strict=True)
        ]

    def op_choices(self) -> list[tuple[str, str, str]]:
        """Return the choices made at start with reasons: the device, each operator's implementation, the attention."""
        device, attention = self._device, self._attention
        return [
            ("device", device.name, device.because),
            *([("model", "fallback", self._proof)] if self._proof is not None else []),
            *((each.operator, each.implementation, each.because) for each in device.ops.choices),
            ("attention", attention.backend.name, attention.because),
            *self._parts.opened.stored_as(),
        ]

    def release_memory(self, empty_blocks: list[list[int]]) -> None:
        """Give back the memory of these KV blocks, for each cache group, and of activations. The next step allocates
        what it needs. Memory that a device has measured stays: another process could take it meanwhile."""
        self._runner.cache.release(empty_blocks)
        if not self._is_measured:
            self._device.release_idle()
        trim_heap()

    def open_weights(self, path: str | None) -> None:
        """Open the weights for `load_again`: those of another checkpoint of the same model, or with None those of the
        start."""
        config = self._config if path is None else self._config.with_weights(path)
        self._parts_to_load = self._parts.reopened(config)

    def sleep(self) -> None:
        """Give back the memory of weights and KV caches. No sequence may be left, and `open_weights` comes before."""
        self._parts = self._parts_to_load
        self._drop_models()
        collect_frozen()  # models and recordings hold each other
        self._device.release_idle()
        trim_heap()

    def load_again(self) -> None:
        """Load the weights that were opened last, after `sleep`. `wake_up` must follow, or `sleep` if any rank
        fails."""
        self._parts, self._parts_to_load = self._parts_to_load, self._parts  # to which that `sleep` returns
        self._load_weights(Ahead())
        self._make_runner()

    def wake_up(self) -> None:
        """Prepare for steps, after `load_again` on all ranks. Raises ConfigError if swap space cannot be pinned."""
        self._parts_to_load = self._parts
        if self._is_measured:
            WarmUp(self._runner, self._config.scheduler, self.plan, self._max_model_len).repeat()
        self._runner.cache.wait_for_swap_space()

    def open_transfer(self, host: str, secret: str, epoch: str) -> PeerRank | None:
        """Prepare to fetch KV blocks from ranks of other engines, and, unless `host` is empty, to send blocks.

        host: an address of the first machine, or a directory for a Unix socket. secret, epoch: hexadecimal digits; the
        secret of both ends, and the id of this start of the engine. Returns the addresses that blocks are sent from; a
        rank on another machine chooses its address towards the first one. Raises ConfigError.
        """
        from octavo.core.process.listening import own_address

        device = self._config.device
        if host and self._mesh.rank >= self._mesh.size // device.nnodes:
            host = own_address(device.master_addr)
        return self._transfer.open(host, bytes.fromhex(secret), bytes.fromhex(epoch))

    def time_steps(self, is_on: bool) -> None:
        """Switch the report of the times of a step's parts, with its results, on or off."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if isinstance(self._runner.model, TimedModel):
            self._runner.model = self._runner.model.model
        if is_on:
            self._watch = StepWatch(self._device.kernel_clock)
            self._runner.model = TimedModel(self._runner.model, self._watch)

    def poison(self, reason: str) -> None:
        """Make calls that wait for other ranks raise EngineDeadError with this reason; from any thread."""
        self._mesh.poison(reason)

    def _drop_models(self) -> None:
        """Drop the loaded models after launched work has ended: other ranks would wait for its calls."""
        runner, loaded = (vars(self).pop(name, None) for name in ("_runner", "_loaded"))
        if isinstance(runner, LaunchingRunner):
            runner.finish(SHUTDOWN_TIMEOUT_S)
        if loaded is not None and loaded.adapters is not None:
            loaded.adapters.close()

    def shutdown(self) -> None:
        """Release the model and its memory. Idempotent."""
        if self._failure == _SHUT_DOWN:
            return
        if self._ahead.packed is not None:
            self._ahead.packed.close()
        self._drop_models()
        if "_transfer" in vars(self):
            self._transfer.close()
        self._mesh.close()
        release_idle = self._device.release_idle
        vars(self).clear()
        self._failure = _SHUT_DOWN
        gc.collect()  # runners and the functions that they record hold each other, and with them the weights
        release_idle()
