"""A simulation from its description; where replicas do not depend on each other, in several processes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from octavo.errors import ConfigError, EngineDeadError
from octavo.scheduler.build import SchedulerSettings
from octavo.simulate.cluster import Cluster, Disaggregation, Outcome, Sample
from octavo.simulate.cost_model import CostModel
from octavo.simulate.replica import Replica
from octavo.simulate.router import RoundRobin, make_router
from octavo.simulate.traces import Trace, TraceRequest

_UNBOUNDED_TOKENS = 1 << 24
"""Of a step of a replica that only decodes: what is transferred to it costs no computation, so no budget either."""


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated besides the trace. All replicas are alike, but for the pools of `disaggregation`."""

    settings: SchedulerSettings
    cost_model: CostModel
    num_replicas: int = 1
    router: str = "round-robin"
    disaggregation: Disaggregation | None = None
    candidate_spread: float = 0.5


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """What one of several processes does: the requests of every `num_shards`-th replica from `first` on."""

    simulation: Simulation
    requests: list[TraceRequest]
    first: int
    num_shards: int


def simulate(
    trace: Trace,
    simulation: Simulation,
    num_processes: int = 1,
    progress: Callable[[float], None] | None = None,
) -> Outcome:
    """Run it. The result does not depend on `num_processes`. Raises ConfigError for what cannot be simulated.

    `progress` is called with the share of the requests that have ended; not where several processes are at work.
    """
    if simulation.num_replicas < 1:
        raise ConfigError(f"replicas is {simulation.num_replicas}, must be at least 1")
    if simulation.disaggregation is not None:
        return _disaggregated(trace, simulation, simulation.disaggregation)
    num_shards = min(num_processes, simulation.num_replicas)
    router = make_router(simulation.router, simulation.settings.cache.block_size)
    # a later turn arrives when the one before has ended, wherever that ran
    if num_shards > 1 and not router.needs_feedback and not trace.followers:
        return _in_processes(trace, simulation, num_shards)
    return Cluster(trace, _replicas(simulation, range(simulation.num_replicas)), router).run(progress)


def _replicas(simulation: Simulation, numbers: Sequence[int]) -> list[Replica]:
    return [_replica(simulation, number, simulation.settings) for number in numbers]


def _replica(simulation: Simulation, number: int, settings: SchedulerSettings) -> Replica:
    return Replica(number, settings, simulation.cost_model, candidate_spread=simulation.candidate_spread)


def _disaggregated(trace: Trace, simulation: Simulation, disaggregation: Disaggregation) -> Outcome:
    num_prefill = disaggregation.num_prefill
    if not 1 <= num_prefill < simulation.num_replicas:
        raise ConfigError(
            f"disaggregated is {num_prefill}, must leave at least one of {simulation.num_replicas} replicas to decode "
            "and be at least 1; raise replicas, or change it"
        )
    settings = simulation.settings
    decode_settings = msgspec.structs.replace(
        settings,
        scheduler=dataclasses.replace(settings.scheduler, max_num_batched_tokens=_UNBOUNDED_TOKENS, target_step_ms=0.0),
    )
    replicas = [
        _replica(simulation, number, settings if number < num_prefill else decode_settings)
        for number in range(simulation.num_replicas)
    ]
    block_size = settings.cache.block_size
    return Cluster(
        trace,
        replicas,
        make_router(simulation.router, block_size),
        disaggregation=disaggregation,
        decode_router=make_router("least-loaded", block_size),
        kv_bytes_per_token=simulation.cost_model.kv_bytes_per_token,
    ).run()


def _in_processes(trace: Trace, simulation: Simulation, num_shards: int) -> Outcome:
    jobs = [
        msgspec.msgpack.encode(
            Shard(simulation=simulation, requests=list(trace.requests), first=first, num_shards=num_shards)
        )
        for first in range(num_shards)
    ]
    command = [sys.executable, "-m", "octavo.simulate.simulation"]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in jobs]
    try:
        for process, job in zip(processes, jobs, strict=True):
            # it reads all before it writes anything, so this cannot block for ever
            assert process.stdin is not None
            process.stdin.write(job)
            process.stdin.close()
        outcomes = []
        for process in processes:
            assert process.stdout is not None
            body = process.stdout.read()
            if process.wait() != 0:
                raise EngineDeadError(f"a simulating process ended with exit code {process.returncode}")
            outcomes.append(msgspec.msgpack.decode(body, type=Outcome))
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    return merged(outcomes)


def run_shard(shard: Shard) -> Outcome:
    """This shard's replicas, with the requests that come to each in turn by arrival.

    One after the other, since none depends on another: what a single one works on stays in the processor's caches.
    """
    simulation, trace = shard.simulation, Trace(shard.requests)
    num_replicas = simulation.num_replicas
    order = sorted(range(len(trace)), key=lambda number: trace.requests[number].arrival_s)
    outcomes = []
    for number in range(shard.first, num_replicas, shard.num_shards):
        replica = _replica(simulation, number, simulation.settings)
        requests = sorted(order[number::num_replicas])
        outcomes.append(Cluster(trace, [replica], RoundRobin(), numbers=requests).run())
    return merged(outcomes)


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """Outcomes of parts that had nothing to do with each other, as one."""
    return Outcome(
        records=sorted((record for each in outcomes for record in each.records), key=lambda record: record.number),
        samples=_merged_samples([each.samples for each in outcomes]),
        num_replicas=sum(each.num_replicas for each in outcomes),
        num_steps=sum(each.num_steps for each in outcomes),
        busy_s=sum(each.busy_s for each in outcomes),
        num_preemptions=sum(each.num_preemptions for each in outcomes),
        num_swapped_blocks=sum(each.num_swapped_blocks for each in outcomes),
        num_recomputed_tokens=sum(each.num_recomputed_tokens for each in outcomes),
        gaps=dict(sum((Counter(each.gaps) for each in outcomes), Counter[int]())),
    )


def _merged_samples(parts: Sequence[list[Sample]]) -> list[Sample]:
    """Sums at the times of the coarsest part; all others have these times too, up to their end."""
    times = {sample.time_s for part in parts for sample in part}
    for part in parts:
        end = part[-1].time_s if part else -1.0
        have = {sample.time_s for sample in part}
        times = {time for time in times if time in have or time > end}
    sums = {time: Sample(time, 0, 0, 0, 0.0, 0.0) for time in sorted(times)}
    for part in parts:
        for sample in part:
            total = sums.get(sample.time_s)
            if total is not None:
                total.num_running += sample.num_running
                total.num_waiting += sample.num_waiting
                total.num_swapped += sample.num_swapped
                total.kv_usage += sample.kv_usage
                total.max_kv_usage = max(total.max_kv_usage, sample.max_kv_usage)
    return list(sums.values())


def main() -> int:
    """One shard: from standard input to standard output."""
    shard = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Shard)
    sys.stdout.buffer.write(msgspec.msgpack.encode(run_shard(shard)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
