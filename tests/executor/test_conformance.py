"""What every executor does alike: the order of steps and their results, calls, failures, death and the end."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from secrets import token_hex
from typing import Any, NamedTuple

import msgspec
import pytest

from octavo.config.schema import EngineConfig
from octavo.core.process.authentication import read_secret
from octavo.core.step import SchedulerOutput
from octavo.errors import ConfigError, EngineDeadError
from octavo.executor.executor import Executor, OnNote, make_executor
from octavo.executor.multiprocess import MultiprocessExecutor
from octavo.executor.ranks import serve_node, start_ranks
from octavo.simulate.executor import END_TOKEN, Clock, Script, SimulatedExecutor
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.engine import make_core, make_request, run
from tests.fakes.executor import HashExecutor
from tests.fakes.rank import BLOCK_SIZE, FAILS, MEETS, NOTE_BYTES, NOTES, NUM_NOTES, FakeRank, is_running
from tests.simulate.parts import make_costs
from tests.worker.engine_config import make_config, start_worker
from tests.worker.prefix_model import row, step

NUM_REQUESTS = 4
OP_CHOICES = "op_choices"
RAY = pytest.param(
    "ray",
    marks=[
        pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`"),
        pytest.mark.filterwarnings("default"),
    ],
)


class Opened(NamedTuple):
    """An executor, one that carries its steps out in this process as they come, and how many ranks it has."""

    executor: Executor
    reference: Executor
    num_ranks: int = 1


Open = Callable[..., Opened]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = make_checkpoint("llama", tmp_path_factory.mktemp("conformance") / "model")
    return make_config(path, num_gpu_blocks_override=64, block_size=BLOCK_SIZE)


@pytest.fixture
def open_executor(config: EngineConfig, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens an executor by name; `device` are fields of DeviceConfig."""
    executors = []

    def open_named(
        name: str, on_death: Callable[[str], None] | None = None, on_note: OnNote | None = None, **device: Any
    ) -> Opened:
        match name:
            case "single":
                opened = Opened(start_worker(config), start_worker(config))
            case "simulated":
                opened = Opened(simulated(), simulated())
            case "ray":
                request.getfixturevalue("ray_cluster")
                from octavo.executor.ray import start_ray_ranks

                two = with_ranks(config, 1, 2, **device)
                executor = start_ray_ranks(two, on_death, on_note, module="tests.fakes.rank", open_worker=FakeRank)
                opened = Opened(executor, HashExecutor(BLOCK_SIZE), 2)
            case _:
                if name == "machines":
                    device |= join_elsewhere(tmp_path)
                sizes = {"ranks": (2, 1), "stages": (1, 3), "machines": (1, 2)}[name]
                executor = start_fakes(with_ranks(config, *sizes, **device), on_death, on_note)
                opened = Opened(executor, HashExecutor(BLOCK_SIZE), sizes[0] * sizes[1])
        executors.append(opened.executor)
        return opened

    yield open_named
    for executor in executors:
        executor.shutdown()


def with_ranks(config: EngineConfig, tensor: int, pipeline: int, **device: Any) -> EngineConfig:
    section = replace(config.device, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, **device)
    return msgspec.structs.replace(config, device=section)


def start_fakes(
    config: EngineConfig, on_death: Callable[[str], None] | None = None, on_note: OnNote | None = None
) -> MultiprocessExecutor:
    return start_ranks(config, on_death, on_note, module="tests.fakes.rank", open_worker=FakeRank)


def join_elsewhere(folder: Path, module: str = "tests.fakes.rank") -> dict[str, Any]:
    """Let the ranks of another machine, which is this one, join soon; return the settings under which they do."""
    secret = folder / "secret"
    secret.write_text(token_hex(16))
    port = free_port()
    threading.Thread(
        target=serve_node,
        args=["127.0.0.1", port, read_secret(str(secret))],
        kwargs={"node": 1, "timeout_s": 60.0, "module": module},
        daemon=True,
    ).start()
    return {"nnodes": 2, "master_port": port, "cluster_secret_file": str(secret)}


def free_port() -> int:
    """A free port before another one: the ranks' groups listen on the next."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as server, suppress(OSError):
            port: int = server.getsockname()[1]
            with socket.create_server(("127.0.0.1", port + 1)):
                return port


def simulated() -> SimulatedExecutor:
    executor = SimulatedExecutor(make_costs(), BLOCK_SIZE, Clock())
    for seed in range(NUM_REQUESTS):
        executor.expect(seed, Script([4], END_TOKEN + 100 * seed))
    return executor


def planned_steps() -> list[SchedulerOutput]:
    """The steps of some requests, with pieces of prompts, forks and ends."""
    core = make_core(max_num_batched_tokens=5)
    requests = [
        make_request(f"{seed}", range(3 * seed + 2), n=1 + seed % 2, max_tokens=4, seed=seed)
        for seed in range(NUM_REQUESTS)
    ]
    run(core, requests)
    steps: list[SchedulerOutput] = core.executor.steps  # type: ignore[attr-defined]
    return steps


@pytest.mark.parametrize("name", ["single", "ranks", "stages", "machines", RAY, "simulated"])
def test_steps_take_effect_in_their_order_and_each_has_its_result(open_executor: Open, name: str) -> None:
    executor, reference, _ = open_executor(name)
    steps = planned_steps()
    assert len(steps) > 5
    in_flight = [executor.submit(each) for each in steps]
    results = [each.result() for each in in_flight]
    assert [each.step_id for each in results] == [each.step_id for each in steps]
    assert [[row.seq_id for row in each.rows] for each in results] == [
        [row.seq_id for row in each.rows] for each in steps
    ]
    assert results == [reference.submit(each).result() for each in steps]


@pytest.mark.parametrize("name", ["single", "ranks", "stages", "machines", RAY])
def test_a_call_returns_one_value_per_rank(open_executor: Open, name: str) -> None:
    executor, _, num_ranks = open_executor(name)
    values = executor.call(OP_CHOICES)
    assert len(values) == num_ranks
    if num_ranks > 1:
        assert [value[0][0] for value in values] == [str(rank) for rank in range(num_ranks)]
        assert len({value[0][2] for value in values}) == num_ranks  # processes


@pytest.mark.parametrize("name", ["single", "ranks", "stages", "machines", RAY, "simulated"])
def test_a_call_of_another_name_is_refused_and_does_no_harm(open_executor: Open, name: str) -> None:
    executor, reference, _ = open_executor(name)
    with pytest.raises(ConfigError, match="submit is not a call of"):
        executor.call("submit")
    first = planned_steps()[0]
    assert executor.submit(first).result() == reference.submit(first).result()


@pytest.mark.parametrize("name", ["single", "ranks", "stages", "machines", RAY, "simulated"])
def test_shutdown_twice_is_shutdown_once(open_executor: Open, name: str) -> None:
    executor, _, _ = open_executor(name)
    for _ in range(2):
        executor.shutdown()
    if name != "simulated":
        with pytest.raises(EngineDeadError, match="the executor is shut down"):
            executor.submit(step()).result()
        with pytest.raises(EngineDeadError, match="the executor is shut down"):
            executor.call(OP_CHOICES)


@pytest.mark.parametrize("name", ["single", "ranks", "stages", "machines", RAY])
def test_after_a_step_that_failed_every_step_and_call_names_the_failure(open_executor: Open, name: str) -> None:
    executor, _, num_ranks = open_executor(name)
    if num_ranks == 1:
        with pytest.raises(KeyError, match="7"):
            executor.submit(step(rows=[row(7, 0, 1)])).result()  # a sequence that it does not have
        failure = "KeyError: 7"
    else:
        failure = r"rank 1 .*RuntimeError: the disk is on fire"
        with pytest.raises(EngineDeadError, match=failure):
            executor.submit(numbered(FAILS)).result()
    with pytest.raises(EngineDeadError, match=failure):
        executor.submit(step()).result()
    with pytest.raises(EngineDeadError, match=failure):
        executor.call(OP_CHOICES)


def numbered(step_id: int) -> SchedulerOutput:
    return msgspec.structs.replace(step(), step_id=step_id)


def process_of(executor: Executor) -> int:
    """The process of rank 1."""
    return int(executor.call(OP_CHOICES)[1][0][2])


@pytest.mark.parametrize("name", ["ranks", "stages", "machines", RAY])
def test_a_rank_that_is_killed_in_a_step_is_named_before_the_step_is_overdue(open_executor: Open, name: str) -> None:
    executor, _, _ = open_executor(name)
    threading.Timer(0.1, os.kill, [process_of(executor), signal.SIGKILL]).start()
    how = r"\(at [0-9.]+\) has closed its connection" if name in ("machines", "ray") else r"was killed \(signal 9\)"
    with pytest.raises(EngineDeadError, match=f"rank 1 {how}"):
        executor.submit(numbered(MEETS)).result()


@pytest.mark.parametrize("name", ["ranks", "stages"])
def test_a_rank_that_is_stopped_is_found_when_the_step_is_overdue(open_executor: Open, name: str) -> None:
    executor, _, num_ranks = open_executor(name, distributed_timeout_seconds=0.5)
    pids = [int(value[0][2]) for value in executor.call(OP_CHOICES)]
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match=rf"rank 1 \(process {pids[1]}\): stopped by a signal"):
        executor.submit(numbered(MEETS)).result()
    executor.shutdown()
    assert not [pid for pid in pids[1:] if is_running(pid)]
    assert len(pids) == num_ranks


def test_a_rank_may_take_its_time_to_write_a_trace(open_executor: Open) -> None:
    executor, _, _ = open_executor("ranks", distributed_timeout_seconds=0.2)
    assert executor.call("profile", None) == [None, None]


def test_the_death_of_a_rank_is_reported_while_nothing_waits(open_executor: Open) -> None:
    reasons: SimpleQueue[str] = SimpleQueue()
    executor, _, _ = open_executor("ranks", reasons.put)
    os.kill(process_of(executor), signal.SIGKILL)
    assert "rank 1 was killed" in reasons.get(timeout=200)


@pytest.mark.parametrize("name", ["ranks", "stages", "machines", RAY])
def test_notes_come_whole_and_in_order_from_each_rank_while_steps_run(open_executor: Open, name: str) -> None:
    notes: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
    executor, reference, num_ranks = open_executor(name, on_note=lambda *note: notes.put(note))
    steps = [numbered(NOTES), *planned_steps()]
    in_flight = [executor.submit(each) for each in steps]
    assert [each.result() for each in in_flight] == [reference.submit(each).result() for each in steps]
    of_rank: dict[int, list[bytes]] = {rank: [] for rank in range(num_ranks)}
    for _ in range(NUM_NOTES * num_ranks):
        rank, payload = notes.get(timeout=200)
        of_rank[rank].append(payload)
    in_order = [bytes([number]) * NOTE_BYTES for number in range(NUM_NOTES)]
    assert of_rank == dict.fromkeys(range(num_ranks), in_order)


def test_notes_of_the_only_rank_come_from_rank_0(config: EngineConfig) -> None:
    notes: list[tuple[int, bytes]] = []
    worker = make_executor(config, on_note=lambda *note: notes.append(note))
    worker._notify(b"saved")  # type: ignore[attr-defined]
    worker.shutdown()
    assert notes == [(0, b"saved")]
