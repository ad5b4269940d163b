"""octavo under Ray Serve. Needs the extra `ray`; CONTRIBUTING has the recipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("default")
pytest.importorskip("ray.serve", reason="needs the extra `ray`", exc_type=ImportError)

PROGRAM = Path(__file__).parent / "two_nodes.py"


def test_arguments_may_be_texts_and_options_of_the_deployment_are_passed_on() -> None:
    from octavo.deploy.ray_serve import build_app

    scaling = {"min_replicas": 1, "max_replicas": 4}
    arguments = {
        "model": "octavo-tiny",
        "max_num_seqs": "16",
        "threads": 3,
        "data_parallel_size": 2,
        "shutdown_timeout_s": "60",
    }
    deployment = build_app({**arguments, "deployment": {"autoscaling_config": scaling}})._bound_deployment
    assert (deployment.max_ongoing_requests, deployment.ray_actor_options["num_cpus"]) == (32, 6)
    assert deployment._deployment_config.graceful_shutdown_timeout_s == 60
    assert deployment._deployment_config.autoscaling_config.max_replicas == 4
    engine_args, server_args = deployment.init_args
    assert (engine_args.model, engine_args.max_num_seqs, server_args.host) == ("octavo-tiny", 16, "0.0.0.0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_num_seq": 1}, "max_num_seq is not an argument; did you mean max_num_seqs"),
        ({"port": 1}, "port has no effect under Ray Serve, whose proxies have the connections; leave it out"),
        ({"max_num_seqs": "0"}, "max_num_seqs"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_deployed(arguments: dict[str, Any], message: str) -> None:
    from octavo.deploy.ray_serve import build_app

    with pytest.raises(ConfigError, match=message):
        build_app(arguments)


@pytest.mark.slow
def test_two_nodes_give_the_same_texts_and_a_killed_replica_is_replaced() -> None:
    """Its streams break off, those of the other one end as if nothing had happened, and later ones are all the same."""
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, timeout=240, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr
    report = json.loads(lines[0])
    undisturbed = report["undisturbed"]
    assert None not in undisturbed
    assert (report["replicas_before_load"], report["num_nodes"], report["num_cores"]) == (1, 2, 1)
    assert report["on_two_replicas"] == report["after"] == undisturbed
    ended = [pair for pair in zip(report["with_a_death"], undisturbed, strict=True) if pair[0] is not None]
    assert 0 < len(ended) < len(undisturbed)
    assert all(text == expected for text, expected in ended)
