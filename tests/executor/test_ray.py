"""What is special about ranks that Ray places; `test_conformance` has what all executors do."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from octavo.errors import ConfigError, EngineDeadError
from octavo.executor.executor import make_executor
from tests.executor.test_conformance import with_ranks
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.rank import FakeRank
from tests.worker.engine_config import make_config


def test_without_ray_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    config = make_config(make_checkpoint("llama", tmp_path / "model"), executor="ray")
    with pytest.raises(ConfigError, match=r"executor is ray, which is not installed; pip install 'octavo\[ray\]'"):
        make_executor(with_ranks(config, 2, 1))


@pytest.mark.filterwarnings("default")
def test_more_ranks_than_the_cluster_has_room_for_are_refused_at_the_deadline(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    request.getfixturevalue("ray_cluster")
    from octavo.executor.ray import start_ray_ranks

    config = make_config(make_checkpoint("llama", tmp_path / "model"))
    with pytest.raises(EngineDeadError, match=r"no room for 4 ranks .* for 1 s: 2 CPUs are free on 2 machines"):
        start_ray_ranks(with_ranks(config, 4, 1, distributed_timeout_seconds=1.0), open_worker=FakeRank)


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
