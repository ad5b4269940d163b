"""The processes of ranks: what they are given, what they refuse, and that none stays behind."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any

import msgspec
import pytest

from octavo.config.replicas import replica_config
from octavo.config.schema import EngineConfig, ReplicaConfig
from octavo.core.process import frames, processes
from octavo.core.process.rendezvous import Rendezvous
from octavo.distributed.groups import open_groups
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, ConfigError, EngineDeadError
from octavo.executor.channel import Here, Start
from octavo.executor.multiprocess import MultiprocessExecutor, Rank
from octavo.executor.ranks import _exit_codes, config_of_rank, serve_node, spawn_rank, start_ranks
from octavo.worker.start.identity import Identity
from tests.executor.test_conformance import free_port, numbered
from tests.fakes.broken_rank import IS_KILLED, RAISES, REFUSES
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.rank import FAILS, FakeRank, is_running
from tests.worker.engine_config import make_config


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = make_checkpoint("llama", tmp_path_factory.mktemp("ranks") / "model")
    return two_ranks(make_config(path, num_gpu_blocks_override=64))


def two_ranks(config: EngineConfig) -> EngineConfig:
    return msgspec.structs.replace(config, device=replace(config.device, tensor_parallel_size=2))


def test_ranks_have_processors_threads_and_gpus_of_their_own_and_rank_0_gives_its_back(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    processors = os.sched_getaffinity(0)
    executor = start_ranks(config, module="tests.fakes.rank", open_worker=FakeRank, gpus=["3", "GPU-4"])
    assert executor.call("identity")[1] == {"seen GPUs": "GPU-4"}
    pids = [int(value[0][2]) for value in executor.call("op_choices")]
    shares = [os.sched_getaffinity(pid) for pid in pids]
    assert set.union(*shares) == processors
    if len(processors) > 1:
        assert shares[0].isdisjoint(shares[1])
    threads = {value[0][1] for value in executor.call("op_choices")}
    assert threads == {str(max(1, config.device.threads // 2))}
    executor.shutdown()
    assert os.sched_getaffinity(0) == processors


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        (REFUSES, ConfigError, r"rank 1 \(process [0-9]+\): needs 2 GPUs on this machine, and 1 can be seen"),
        (RAISES, EngineDeadError, r"rank 1 .*: the rank failed \(RuntimeError: CUDA error: out of memory\)"),
        (IS_KILLED, EngineDeadError, r"rank 1 was killed \(signal 9\)"),
    ],
)
def test_a_rank_that_does_not_open_its_device_is_named_before_the_deadline(
    config: EngineConfig, how: int, kind: type[Exception], message: str
) -> None:
    def open_worker(config: EngineConfig, rank: int, rendezvous: Rendezvous | None, *rest: Any) -> FakeRank:
        _, meet = rest
        assert rendezvous is not None
        open_groups(Mesh.of_rank(rank, tensor=2), rendezvous, backend="gloo", meet=meet)
        raise AssertionError("there is no other rank")

    begun = time.monotonic()
    broken = msgspec.structs.replace(config, model=replace(config.model, seed=how))
    with pytest.raises(kind, match=message):
        start_ranks(broken, module="tests.fakes.broken_rank", open_worker=open_worker)
    assert time.monotonic() - begun < config.device.distributed_timeout_seconds


def test_a_rank_that_fails_while_it_loads_is_named_though_the_first_one_loads_too(config: EngineConfig) -> None:
    executor = start_ranks(config, module="tests.fakes.rank", open_worker=FakeRank)
    with pytest.raises(CheckpointError, match=r"rank 1 \(process [0-9]+\): the disk is broken"):
        executor.call("load", 64, [0])
    executor.shutdown()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"octavo": "0.0.1"}, r"octavo is .* here and 0\.0\.1 on rank 0; install the same version"),
        ({"native_module": "abc"}, "native module is .* here and abc on rank 0; install the same build"),
        ({"files": "abc"}, "files is .* here and abc on rank 0; give every machine the same files of the model"),
    ],
)
def test_a_rank_of_another_build_or_model_fails(config: EngineConfig, change: dict[str, str], message: str) -> None:
    start = Start(
        identity=msgspec.structs.replace(Identity.of(config), **change),
        config=msgspec.Raw(frames.encode(config)),
        rendezvous=Rendezvous(),
    )
    rank = Rank(1, *processes.spawn("tests.fakes.rank"))
    executor = MultiprocessExecutor([rank], result_rank=0, timeout_s=60.0, on_death=None, on_shutdown=lambda: None)
    try:
        with pytest.raises(ConfigError, match=rf"rank 1 \(process [0-9]+\): {message}"):
            executor.start(start, lambda: FakeRank(config, 0, None))
    finally:
        executor.shutdown()


def test_settings_of_another_version_that_cannot_be_read_name_both_versions(config: EngineConfig) -> None:
    identity = msgspec.structs.replace(Identity.of(config), octavo="9.9")
    start = Start(identity=identity, config=msgspec.Raw(b"\x80"), rendezvous=Rendezvous())
    connection, process = processes.spawn("tests.fakes.rank")
    with connection:
        connection.sendall(frames.pack(start))
        assert b"cannot read the settings of 9.9" in (frames.read(connection) or b"")
    processes.end(process)


def test_the_log_elsewhere_says_why_its_rank_is_refused(
    config: EngineConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    identity = msgspec.structs.replace(Identity.of(config), files="abc")
    start = Start(identity=identity, config=msgspec.Raw(frames.encode(config)), rendezvous=Rendezvous())
    first, second = socket.socketpair()
    memory = os.memfd_create("test")
    with first, second:
        here = Here(second.fileno(), memory, (1, 1))
        starter, process = spawn_rank("tests.fakes.rank", [*os.sched_getaffinity(0)], memory, here)
        with starter:
            first.sendall(frames.pack(start))
            assert process.wait(200) == 1
    os.close(memory)
    assert "and abc on rank 0; give every machine the same files" in capfd.readouterr().err


def test_models_of_the_same_shape_have_different_digests(tmp_path: Path) -> None:
    config = make_config(make_checkpoint("llama", tmp_path / "model"))
    before = Identity.of(config)
    weights = tmp_path / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "files is" in (before.difference(Identity.of(config)) or "")


_HOLDER = """
import sys, time, msgspec
from octavo.config.schema import EngineConfig
from octavo.executor.ranks import start_ranks
from tests.executor.test_conformance import numbered
from tests.fakes.rank import MEETS, FakeRank
config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineConfig)
executor = start_ranks(config, module="tests.fakes.rank", open_worker=FakeRank)
print(executor.call("op_choices")[1][0][2], flush=True)
executor.submit(numbered(MEETS))
"""


def test_a_rank_ends_with_the_process_that_started_it_though_it_computes(config: EngineConfig) -> None:
    with subprocess.Popen([sys.executable, "-c", _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.write(frames.encode(config))
        holder.stdin.close()
        rank = int(holder.stdout.readline())
        holder.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 200
    while is_running(rank):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("count", "role"), [(1, "rank 1"), (2, "core 1 rank 1")])
def test_log_lines_name_the_rank_and_the_core_where_there_are_several(
    config: EngineConfig, count: int, role: str, capfd: pytest.CaptureFixture[str]
) -> None:
    own = replica_config(msgspec.structs.replace(config, replicas=ReplicaConfig(data_parallel_size=count)), count - 1)
    executor = start_ranks(own, module="tests.fakes.rank", open_worker=FakeRank)
    with pytest.raises(EngineDeadError, match="the disk is on fire"):
        executor.submit(numbered(FAILS)).result()
    executor.shutdown()
    assert re.search(rf"^[0-9:.]+ {role} ERROR the rank failed$", capfd.readouterr().err, re.MULTILINE)


def test_a_rank_has_its_share_of_the_threads(config: EngineConfig) -> None:
    many = msgspec.structs.replace(config, device=replace(config.device, threads=7))
    assert config_of_rank(many).device.threads == 3
    eight = msgspec.structs.replace(many, device=replace(many.device, tensor_parallel_size=16, nnodes=2))
    assert config_of_rank(eight).device.threads == 1
    uneven = msgspec.structs.replace(many, device=replace(many.device, nnodes=2, most_ranks_together=2))
    assert config_of_rank(uneven).device.threads == 3


@pytest.fixture
def machine(config: EngineConfig, tmp_path: Path) -> Iterator[tuple[MultiprocessExecutor, Future[bool]]]:
    """The executor of a rank here and one on another machine, which is this one, and what that machine comes to."""
    secret, port = tmp_path / "secret", free_port()
    secret.write_text(token_hex(16))
    cluster: dict[str, Any] = {"nnodes": 2, "master_port": port, "cluster_secret_file": str(secret)}
    over_two = msgspec.structs.replace(config, device=replace(config.device, **cluster))
    with ThreadPoolExecutor(1) as pool:
        key = secret.read_bytes()
        node = pool.submit(serve_node, "127.0.0.1", port, key, node=1, timeout_s=60.0, module="tests.fakes.rank")
        executor = start_ranks(over_two, module="tests.fakes.rank", open_worker=FakeRank)
        yield executor, node
        executor.shutdown()


def test_a_machine_whose_engine_ended_does_not_join_again(machine: tuple[MultiprocessExecutor, Future[bool]]) -> None:
    executor, node = machine
    executor.shutdown()
    assert not node.result(30)


def test_a_machine_whose_rank_was_killed_joins_again(
    machine: tuple[MultiprocessExecutor, Future[bool]], caplog: pytest.LogCaptureFixture
) -> None:
    executor, node = machine
    with caplog.at_level(logging.ERROR, "octavo"):
        os.kill(int(executor.call("op_choices")[1][0][2]), signal.SIGKILL)
        assert node.result(30)
    assert caplog.messages[0].startswith("rank 1 was killed (signal 9)")


def test_a_machine_whose_rank_has_failed_joins_again(machine: tuple[MultiprocessExecutor, Future[bool]]) -> None:
    executor, node = machine
    with pytest.raises(EngineDeadError, match="the disk is on fire"):
        executor.submit(numbered(FAILS)).result()
    executor.shutdown()
    assert node.result(30)


def test_a_rank_that_stays_stopped_is_killed_so_that_its_machine_can_join_again() -> None:
    rank = Rank(1, *processes.spawn("tests.fakes.rank"))
    with rank.connection:
        assert rank.process is not None
        rank.process.send_signal(signal.SIGSTOP)
        assert _exit_codes([rank], 0.1) == [-signal.SIGKILL]
