"""What is special about ranks that Ray places; `test_conformance` has what all executors do."""

from __future__ import annotations

import dataclasses
import os
import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from octavo.errors import ConfigError, EngineDeadError
from octavo.executor.executor import make_executor
from tests.executor.test_conformance import with_ranks
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.rank import FakeRank
from tests.worker.engine_config import make_config


def test_without_ray_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    config = with_ranks(make_config(make_checkpoint("llama", tmp_path / "model")), 2, 1)
    config = msgspec.structs.replace(config, device=dataclasses.replace(config.device, executor="ray"))
    with pytest.raises(ConfigError, match=r"executor is ray, which is not installed; pip install 'octavo\[ray\]'"):
        make_executor(config)


@pytest.mark.filterwarnings("default")
def test_ranks_beyond_the_cluster_are_refused_at_the_deadline(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    request.getfixturevalue("ray_cluster")
    from octavo.executor.ray import start_ray_ranks

    config = make_config(make_checkpoint("llama", tmp_path / "model"))
    with pytest.raises(EngineDeadError, match=r"no room for 4 ranks .* for 1 s: 2 CPUs are free on 2 machines"):
        start_ray_ranks(with_ranks(config, 4, 1, distributed_timeout_seconds=1.0), open_worker=FakeRank)


@pytest.mark.filterwarnings("default")
def test_each_rank_sees_the_gpu_that_ray_has_given_to_its_actor(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    cluster = request.getfixturevalue("ray_cluster")
    from octavo.executor.ray import start_ray_ranks

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")  # those of machines that are added from now on
    config = make_config(make_checkpoint("llama", tmp_path / "model"))

    def seen(num_ranks: int) -> list[str]:
        sizes = with_ranks(config, num_ranks, 1, has_gpus=True, distributed_timeout_seconds=20.0)
        executor = start_ray_ranks(sizes, module="tests.fakes.rank", open_worker=FakeRank)
        try:
            return [each["seen GPUs"] for each in executor.call("identity")]
        finally:
            executor.shutdown()
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,6"

    # a machine with two GPUs, and one with the third
    nodes = [cluster.add_node(num_cpus=count, num_gpus=count, object_store_memory=80 << 20) for count in (2, 1)]
    try:
        assert sorted(seen(2)) == ["5", "6"]
        assert sorted(seen(3)) == ["5", "5", "6"]
        with monkeypatch.context() as patch:
            patch.setattr("torch.cuda.is_initialized", lambda: True)
            with pytest.raises(ConfigError, match="CUDA is in use here already"):
                seen(2)
        small = with_ranks(config, 4, 1, has_gpus=True, distributed_timeout_seconds=1.0)
        with pytest.raises(EngineDeadError, match=r"4 ranks of one CPU and one GPU each.* and 3 GPUs are free"):
            start_ray_ranks(small, open_worker=FakeRank)
    finally:
        for node in nodes:
            cluster.remove_node(node)


@pytest.mark.filterwarnings("default")
def test_machines_with_different_numbers_of_ranks_plan_with_the_largest(request: pytest.FixtureRequest) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    cluster = request.getfixturevalue("ray_cluster")
    from octavo.executor.ray import _place

    larger = cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
    try:
        with ExitStack() as resources:
            _, bundles, most = _place(3, 60.0, resources)
            assert bundles == [[0], [1], [2]]
            assert most == 2
    finally:
        cluster.remove_node(larger)
