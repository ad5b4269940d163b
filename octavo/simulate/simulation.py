"""A simulation from its description; where replicas do not depend on each other, in several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, cast

import msgspec

from octavo.config.schema import CacheConfig, SchedulerConfig
from octavo.core.cache_limits import CacheLimits
from octavo.engine.cores.router import ROUTERS, LeastLoaded, RoundRobin
from octavo.engine.cores.split import Split, SplitRates
from octavo.errors import ConfigError, EngineDeadError
from octavo.scheduler.build import SchedulerSettings
from octavo.simulate.cluster import Cluster
from octavo.simulate.cost_model import CostModel
from octavo.simulate.link import Disaggregation, Link
from octavo.simulate.outcome import Outcome, merged
from octavo.simulate.replica import SimulatedReplica
from octavo.simulate.speculation import Guessing
from octavo.simulate.traces import Trace, TraceRequest

if TYPE_CHECKING:
    from octavo.engine.cores.replica import Replica


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a simulation without its trace. All replicas are alike, except for the pools of
    `disaggregation`."""

    settings: SchedulerSettings
    cost_model: CostModel
    num_replicas: int = 1
    router: str = "round-robin"
    disaggregation: Disaggregation | None = None
    guessing: Guessing | None = None

    @classmethod
    def of_engine(
        cls, cache: CacheConfig, scheduler: SchedulerConfig, limits: CacheLimits, cost_model: CostModel
    ) -> Simulation:
        """Return the simulation of a running engine."""
        settings = SchedulerSettings(cache=cache, scheduler=scheduler, limits=limits)
        return cls(settings=settings, cost_model=cost_model)

    def replica(self, number: int) -> SimulatedReplica:
        """Return a new replica."""
        return SimulatedReplica(number, self.settings, self.cost_model, guessing=self.guessing)


def simulate(
    trace: Trace, simulation: Simulation, num_processes: int = 1, progress: Callable[[float], None] | None = None
) -> Outcome:
    """Return the outcome of the trace, which does not depend on `num_processes`. `progress` is called with the share of
    ended requests; with several processes, that of this process. Raises ConfigError for what cannot be simulated.
    """
    if simulation.num_replicas < 1:
        raise ConfigError(f"replicas is {simulation.num_replicas}, must be at least 1")
    if simulation.disaggregation is not None:
        return _disaggregated(trace, simulation, simulation.disaggregation, progress)
    num_shards = min(num_processes, simulation.num_replicas)
    router = ROUTERS[simulation.router](simulation.settings.cache.block_size)
    # a later turn arrives when the previous one has ended, on any replica
    if num_shards > 1 and not router.needs_feedback and not trace.followers:
        return _in_processes(trace, simulation, num_shards, progress)
    return Cluster(trace, [simulation.replica(each) for each in range(simulation.num_replicas)], router).run(progress)


def _disaggregated(
    trace: Trace,
    simulation: Simulation,
    disaggregation: Disaggregation,
    progress: Callable[[float], None] | None,
) -> Outcome:
    num_prefill, settings = disaggregation.num_prefill, simulation.settings
    if not 1 <= num_prefill < simulation.num_replicas:
        raise ConfigError(
            f"disaggregated is {num_prefill}, must leave at least one of {simulation.num_replicas} replicas to decode "
            "and be at least 1; raise replicas, or change it"
        )
    costs, block_size = simulation.cost_model, settings.cache.block_size
    links = [Link(disaggregation, block_size * costs.kv_bytes_per_token, costs.num_layers) for _ in range(num_prefill)]
    sources = {str(number): link for number, link in enumerate(links)}
    replicas = [
        SimulatedReplica(number, settings, costs, link=link, guessing=simulation.guessing)
        for number, link in enumerate(links)
    ]
    replicas += [
        SimulatedReplica(number, settings, costs, sources=sources, guessing=simulation.guessing)
        for number in range(num_prefill, simulation.num_replicas)
    ]
    scheduler = settings.scheduler
    make_split = partial(
        Split,
        cast("list[Replica]", replicas[:num_prefill]),
        router=ROUTERS[simulation.router](block_size),
        block_size=block_size,
        keep_s=disaggregation.keep_s,
        rates=SplitRates(disaggregation.min_tokens, scheduler.prefill_tokens_per_s, scheduler.max_num_batched_tokens),
    )
    return Cluster(
        trace,
        replicas,
        LeastLoaded(),
        make_split=lambda dispatch, clock: make_split(dispatch, clock=clock),
    ).run(progress)


def _in_processes(
    trace: Trace, simulation: Simulation, num_shards: int, progress: Callable[[float], None] | None
) -> Outcome:
    """Run the first shard in this process, and each of the others, of the same size, in a process of its own."""
    run = partial(_run_shard, simulation, trace.requests, num_shards)
    try:
        with ProcessPoolExecutor(num_shards - 1, mp_context=get_context("spawn")) as pool:
            others = pool.map(run, range(1, num_shards))
            return merged([run(0, progress), *others])
    except BrokenProcessPool as error:
        raise EngineDeadError(f"a simulating process has ended: {error}") from error


def _run_shard(
    simulation: Simulation,
    requests: Sequence[TraceRequest],
    num_shards: int,
    first: int,
    progress: Callable[[float], None] | None = None,
) -> Outcome:
    """Run every `num_shards`-th replica from `first` on, each with the requests that round-robin gives it.

    The replicas, which are independent, run one after the other: the data of a single one stay in the processor's
    caches.
    """
    trace, num_replicas = Trace(requests), simulation.num_replicas
    order = sorted(range(len(trace)), key=lambda number: trace.requests[number].arrival_s)
    own = range(first, num_replicas, num_shards)
    outcomes = []
    for done, number in enumerate(own):
        numbers = sorted(order[number::num_replicas])
        cluster = Cluster(trace, [simulation.replica(number)], RoundRobin(), numbers=numbers)
        outcomes.append(cluster.run(partial(_report, progress, done, len(own))))
    return merged(outcomes)


def _report(progress: Callable[[float], None] | None, done: int, of: int, share: float) -> None:
    if progress is not None:
        progress((done + share) / of)
