"""The endpoints that vLLM has for trainers and operators."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from octavo.config.args import ObservabilityArgs
from octavo.config.server_args import ServerArgs
from octavo.core.absent import absent_paths
from octavo.server.app import loading_app
from octavo.server.endpoints import ENDPOINTS
from octavo.server.routes.control import abort_own, own_counts
from tests.server.conftest import Served
from tests.server.raw import ask, connect, eventually


def test_open_requests_are_ended_by_the_ids_of_responses_or_all_at_once(server: Served) -> None:
    server.llm.hold_after = 1
    body = msgspec.json.encode({"prompt": ["a", "b"], "max_tokens": 9, "stream": True})
    with connect(server.url) as first, connect(server.url) as second:
        for number, connection in enumerate((first, second)):
            headers = {"Content-Type": "application/json", "X-Request-Id": f"r{number}"}
            connection.request("POST", "/v1/completions", body, headers)
            assert connection.getresponse().read(1)
        ended = [ask(server.url, "/abort_requests", {"request_ids": [name]}).json for name in ("cmpl-r0", "cmpl-r9")]
        assert ended == [{"aborted": 2, "status": "aborted"}, {"aborted": 0, "status": "aborted"}]
        assert sorted(each[:9] for each in server.llm.ended) == ["cmpl-r0-0", "cmpl-r0-1"]
        assert ask(server.url, "/inference/v1/abort_requests", {}).json["aborted"] == 4
    eventually(lambda: not server.http.context.engine_ids)


def test_requests_of_other_servers_are_ended_too(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    async def abort(names: list[str]) -> int:
        asked.append(names)
        return 3

    monkeypatch.setattr(server.http.context, "abort_at_others", abort)
    assert ask(server.url, "/abort_requests", {"request_ids": ["cmpl-r0"]}).json["aborted"] == 3
    assert asked == [["cmpl-r0"]]


@pytest.mark.anyio
async def test_a_server_that_loads_its_model_has_no_requests_and_no_counts_for_others() -> None:
    context = loading_app(ServerArgs()).context
    assert (own_counts(context), await abort_own(context, [])) == ([], 0)


def test_ranks_are_counted_and_media_forgotten(server: Served) -> None:
    device = dataclasses.replace(server.llm.config.device, tensor_parallel_size=2, pipeline_parallel_size=2)
    replicas = dataclasses.replace(server.llm.config.replicas, data_parallel_size=3)
    config = server.llm.config
    server.llm.config = msgspec.structs.replace(config, device=device, replicas=replicas)
    assert ask(server.url, "/get_world_size").json == {"world_size": 12}
    assert ask(server.url, "/get_world_size?include_dp=false").json == {"world_size": 4}
    server.llm.config = config
    for path in ("/reset_mm_cache", "/reset_encoder_cache"):
        answer = ask(server.url, path, b"")
        assert (answer.status, answer.body) == (200, b"")


def test_weights_of_a_folder_are_taken_and_no_others(start_server: Callable[..., Served]) -> None:
    server = start_server()
    config = server.llm.config
    model = dataclasses.replace(config.model, enable_sleep_mode=True)
    server.llm.config = msgspec.structs.replace(config, model=model)
    assert ask(server.url, "/update_weights", {"weight_dir": "/there"}).json["success"]
    assert server.llm.weights == "/there"
    given = {"update_info": {"names": ["a"]}}
    for body, param in ((given, "update_info"), ({}, "weight_dir"), ({"weight_dir": "/x", "step": 3}, "step")):
        answer = ask(server.url, "/update_weights", body)
        assert (answer.status, answer.error["param"]) == (400, param)
    assert server.llm.weights == "/there"


def test_weights_have_a_label(server: Served) -> None:
    assert ask(server.url, "/weight_info", method="GET").json == {"weight_version": "default"}
    answer = ask(server.url, "/update_weight_version", {"new_version": "step-7"})
    assert answer.json == {"success": True, "new_version": "step-7"}
    assert ask(server.url, "/finish_weight_update", b"").json["message"] == "Weight update finished"
    assert ask(server.url, "/weight_info", method="GET").json == {"weight_version": "step-7"}
    assert ask(server.url, "/finish_weight_update", {"weight_version": "step-8"}).status == 200
    refused: list[tuple[str, dict[str, Any], str]] = [
        *(("/update_weight_version", {"new_version": each}, "new_version") for each in ("", "x" * 257, 8)),
        ("/update_weight_version", {}, "new_version"),
        ("/finish_weight_update", {"weight_version": ""}, "weight_version"),
    ]
    for path, body, param in refused:
        answer = ask(server.url, path, body)
        assert (answer.status, answer.error["param"]) == (400, param)
    assert ask(server.url, "/weight_info", method="GET").json == {"weight_version": "step-8"}


def test_a_profile_has_a_prefix_and_no_iterations(start_server: Callable[..., Served]) -> None:
    server = start_server()
    traced = ObservabilityArgs(profiler_config={"profiler": "torch", "torch_profiler_dir": "/traces"})
    server.llm.config = msgspec.structs.replace(server.llm.config, observability=traced)
    refused: list[tuple[dict[str, Any], str]] = [({"max_iterations": 5}, "max_iterations"), ({"x": 1}, "x")]
    for body, param in [*refused, ({"profile_prefix": "a/b"}, "profile_prefix")]:
        answer = ask(server.url, "/start_profile", body)
        assert (answer.status, answer.error["param"]) == (400, param)
    assert not server.llm.profiles
    body = {"profile_prefix": "a", "delay_iterations": 0, "max_iterations": None}
    assert ask(server.url, "/start_profile", body).json == {"is_profiling": True}


@pytest.mark.parametrize("path", ["/collective_rpc", "/server_info", "/weight_checker/", "/api/chat"])
def test_endpoints_of_others_are_refused_with_the_reason(server: Served, path: str) -> None:
    answer = ask(server.url, path, {})
    assert (answer.status, answer.error["code"]) == (404, "unknown_url")
    assert answer.error["message"] == f"there is no POST {path}: {absent_paths()[path.rstrip('/')]}"


def test_existing_endpoints_are_not_listed_as_absent() -> None:
    assert {path for endpoint in ENDPOINTS for path in endpoint.paths} & set(absent_paths()) == set()
