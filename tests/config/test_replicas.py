"""What one replica gets of what was given for all."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from octavo.config.replicas import replica_config
from octavo.config.schema import EngineConfig
from tests.fakes.core import core_ready, engine_config


def config_of(count: int, **cache: object) -> EngineConfig:
    config = engine_config()
    return msgspec.structs.replace(
        config,
        cache=dataclasses.replace(config.cache, **cache),  # type: ignore[arg-type]
        replicas=dataclasses.replace(config.replicas, data_parallel_size=count),
    )


def test_a_single_replica_has_everything() -> None:
    config = config_of(1)
    assert replica_config(config, 0) == config


def test_memory_is_shared_evenly_and_blocks_are_for_each() -> None:
    given = {"kv_cache_memory": 3 << 30, "prefix_cache_size": 300, "swap_space": 3.0, "num_gpu_blocks_override": 77}
    cache = replica_config(config_of(3, gpu_memory_utilization=0.9, **given), 1).cache
    assert cache.gpu_memory_utilization == pytest.approx(0.3)
    assert (cache.kv_cache_memory, cache.prefix_cache_size, cache.swap_space) == (1 << 30, 100, 1.0)
    assert cache.num_gpu_blocks_override == 77


def test_what_a_gpu_has_is_for_one_replica() -> None:
    given = {"kv_cache_memory": 3 << 30, "prefix_cache_size": 300, "swap_space": 3.0}
    config = config_of(3, gpu_memory_utilization=0.9, **given)
    config = msgspec.structs.replace(config, device=dataclasses.replace(config.device, has_gpus=True))
    cache = replica_config(config, 1).cache
    assert (cache.gpu_memory_utilization, cache.kv_cache_memory, cache.prefix_cache_size) == (0.9, 3 << 30, 300)
    assert cache.swap_space == 1.0, "the host is shared"


def test_replicas_have_numbers_and_processors_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.config.replicas.core_shares", lambda count: [[0, 1], [2, 3]])
    places = [replica_config(config_of(2), number).replicas for number in range(2)]
    assert [(each.number, each.cpus, each.name) for each in places] == [(0, (0, 1), "core 0"), (1, (2, 3), "core 1")]


def test_prefill_and_decode_are_roles_with_equal_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.config.replicas.core_shares", lambda count: [[number] for number in range(count)])
    config = config_of(1, kv_cache_memory=3 << 30)
    config = msgspec.structs.replace(config, transfer=dataclasses.replace(config.transfer, prefill=1, decode=2))
    found = [replica_config(config, number) for number in range(3)]
    assert [each.transfer.role for each in found] == ["prefill", "decode", "decode"]
    assert [each.replicas.name for each in found] == ["prefill 0", "decode 1", "decode 2"]
    assert [(each.replicas.cpus, each.cache.kv_cache_memory) for each in found] == [((n,), 1 << 30) for n in range(3)]


def test_a_core_that_replaces_another_has_as_many_blocks() -> None:
    cache = replica_config(config_of(2), 1, before=core_ready(num_blocks=123), num_starts=1).cache
    assert (cache.num_gpu_blocks_override, cache.gpu_memory_utilization) == (123, 0.9)


@pytest.mark.parametrize(
    ("count", "number", "num_starts", "name"),
    [
        (1, 0, 0, "/tmp/trace.bin"),
        (1, 0, 2, "/tmp/trace-restart2.bin"),
        (2, 1, 0, "/tmp/trace-replica1.bin"),
        (2, 1, 1, "/tmp/trace-replica1-restart1.bin"),
    ],
)
def test_each_start_has_a_recording_of_its_own(count: int, number: int, num_starts: int, name: str) -> None:
    config = config_of(count)
    recorded = dataclasses.replace(config.observability, record_trace="/tmp/trace.bin")
    config = msgspec.structs.replace(config, observability=recorded)
    assert replica_config(config, number, num_starts=num_starts).observability.record_trace == name
