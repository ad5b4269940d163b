"""The endpoints for operators, and `/`, `/openapi.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import octavo
from octavo.config.args import ObservabilityArgs
from octavo.errors import EngineDeadError, EngineRestartingError, EngineUnresponsiveError
from octavo.server.endpoints import ENDPOINTS, Endpoint
from tests.server.conftest import Served
from tests.server.raw import ask, events

AWAKE = {"is_paused": False, "is_sleeping": False}


def test_health_is_200_with_the_state_of_each_core_while_one_works(server: Served) -> None:
    answer = ask(server.url, "/health")
    assert (answer.status, answer.json) == (200, {"engines": [{"replica": 0, "role": None, "state": "ready", **AWAKE}]})


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (EngineUnresponsiveError("process 7 is stopped"), "engine_unresponsive"),
        (EngineDeadError("killed by signal 9"), "engine_dead"),
        (EngineRestartingError("it is being started again"), "engine_restarting"),
    ],
)
def test_health_is_503_with_the_reason_while_no_engine_works(server: Served, fault: Exception, code: str) -> None:
    server.llm.fault = fault
    answer = ask(server.url, "/health")
    assert (answer.status, answer.error["code"]) == (503, code)
    assert str(fault) in answer.error["message"]
    server.llm.fault = None
    assert ask(server.url, "/health").status == 200


def test_a_replica_is_drained_and_started_again_or_stopped(server: Served) -> None:
    assert ask(server.url, "/drain", {"replica": 0}).json == {"moved_requests": 7}
    assert ask(server.url, "/drain", {"stop": True}).json == {"moved_requests": 8}
    answer = ask(server.url, "/drain", {"replica": 3})
    assert (answer.status, answer.error["param"]) == (400, "replica")


def test_metrics_are_prometheus_text(server: Served) -> None:
    answer = ask(server.url, "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b'octavo:num_requests_running{model_name="letters"} 0.0' in answer.body


def test_front_page_lists_endpoints_that_exist(server: Served) -> None:
    listed = ask(server.url, "/").json["endpoints"]
    assert "POST /v1/chat/completions" in listed
    assert listed["GET /health"] == "Return the state of each engine core while one is ready"
    assert not any("Raises" in text or text.endswith(".") for text in listed.values())
    verbs = {"Abort", "Begin", "End", "Forget", "Give", "Go", "Keep", "Load", "Move", "Open", "Return", "Stream"}
    assert {text.split()[0] for text in listed.values()} <= verbs, "a row says what its endpoint does"
    off = ("kv_events_off", "response_not_stored", "adapters_fixed", "awake", "upgrade_required", "profiler_off")
    for endpoint in ENDPOINTS:
        path = endpoint.path.replace("{model_id}", "letters").replace("{name}", "app.js")
        body = {} if endpoint.method == "POST" else None
        # its stream has no end
        options = {"method": "HEAD"} if path == "/live" else {}
        answer = ask(server.url, path, body, **options)
        assert answer.status in (200, 400) or answer.error["code"] in off, path


def test_openapi_document_refers_only_to_what_it_defines(server: Served) -> None:
    answer = ask(server.url, "/openapi.json")
    schemas = answer.json["components"]["schemas"]
    references = {piece.split(b'"')[0].decode() for piece in answer.body.split(b"#/components/schemas/")[1:]}
    assert references <= set(schemas)
    assert set(answer.json["paths"]) == {endpoint.path for endpoint in ENDPOINTS}
    schema = ask(server.url, "/openapi.json").json["components"]["schemas"]["ChatCompletionRequest"]
    assert "temperature" in schema["properties"]
    assert "web_search_options" not in schema["properties"]
    assert schema["additionalProperties"] is False


def test_openapi_document_has_the_parameters_of_urls_with_their_types(server: Served) -> None:
    paths = ask(server.url, "/openapi.json").json["paths"]

    def of(method: str, path: str) -> dict[str, dict[str, object]]:
        return {
            each["name"]: each["schema"] for each in paths[path][method].get("parameters", []) if each["in"] == "query"
        }

    level = of("post", "/sleep")["level"]
    assert (level["type"], level["minimum"], level["maximum"], level["default"]) == ("integer", 0, 2, 1)
    tags = of("post", "/wake_up")["tags"]
    assert (tags["type"], tags["items"]) == ("array", {"enum": ["kv_cache", "scheduling", "weights"]})
    assert set(of("get", "/kv/events")) == {"after"}
    assert set(of("get", "/scheduler/decisions")) == set(of("get", "/scheduler/timelines")) == {"request_id"}
    mode, clear_cache = of("post", "/pause").values()
    assert (sorted(mode["enum"]), mode["default"]) == (["abort", "keep", "wait"], "abort")  # type: ignore[call-overload]
    assert (clear_cache["type"], clear_cache["default"]) == ("boolean", True)
    assert of("get", "/is_paused") == of("post", "/resume") == {}
    assert of("post", "/reset_prefix_cache")["reset_running_requests"]["default"] is False
    assert of("get", "/is_sleeping") == {}


@pytest.mark.parametrize("endpoint", [each for each in ENDPOINTS if each.query is not None], ids=lambda each: each.path)
def test_unknown_parameters_of_urls_are_refused_by_name(server: Served, endpoint: Endpoint) -> None:
    answer = ask(server.url, f"{endpoint.path}?no_such_parameter=true", {}, method=endpoint.method)
    assert (answer.status, answer.error["code"]) == (400, "unknown_parameter")
    assert answer.error["param"] == "no_such_parameter"
    known = endpoint.query.__struct_fields__ if endpoint.query is not None else ()
    assert all(name in answer.error["message"] for name in known)


def test_the_limit_of_tokens_is_described_with_its_default(server: Served) -> None:
    schemas = ask(server.url, "/openapi.json").json["components"]["schemas"]
    for name in ("ChatCompletionRequest", "CompletionRequest"):
        number, nothing = schemas[name]["properties"]["max_tokens"]["anyOf"]
        assert "by default 16 for a completion" in number["description"]
        assert nothing == {"type": "null"}


def test_load_tokenizer_and_version_are_shown(server: Served) -> None:
    assert ask(server.url, "/load").json == {"server_load": 0}
    assert ask(server.url, "/tokenizer_info").json["tokenizer_class"] == "Letters"
    assert ask(server.url, "/ping", method="POST").status == 200
    assert ask(server.url, "/version").json == {"version": octavo.__version__}


WEIGHTS = "/update_weights_from_disk"
CHAT = {"model": "letters", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "a", "max_tokens": 3}), ("/v1/chat/completions", CHAT)]
)
def test_what_a_pause_aborts_ends_with_what_it_has(server: Served, path: str, body: dict[str, Any]) -> None:
    server.llm.finish_reason = "abort"
    whole = ask(server.url, path, {**body, "n": 2})
    assert whole.status == 200
    texts = [each["text"] if "text" in each else each["message"]["content"] for each in whole.json["choices"]]
    assert texts == ["Blo", "Blo"]
    assert [each["finish_reason"] for each in whole.json["choices"]] == ["abort", "abort"]
    *chunks, end = events(ask(server.url, path, {**body, "stream": True}).body)
    choices = [each["choices"][0] for each in chunks]
    assert "".join(each["text"] if "text" in each else each["delta"].get("content", "") for each in choices) == "Blo"
    assert (choices[-1]["finish_reason"], end) == ("abort", "[DONE]")


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/messages", CHAT), ("/v1/responses", {"model": "letters", "input": "a", "max_output_tokens": 3})],
)
def test_apis_without_a_word_for_an_abort_answer_with_an_error(server: Served, path: str, body: dict[str, Any]) -> None:
    server.llm.finish_reason = "abort"
    answer = ask(server.url, path, body)
    assert answer.status == 503
    assert b"the request was aborted by the engine" in answer.body


def test_generation_is_paused_and_resumed(server: Served) -> None:
    assert ask(server.url, "/is_paused", method="GET").json == {"is_paused": False}
    for query, expected in (("", ("abort", True)), ("?mode=keep&clear_cache=false", ("keep", False))):
        assert ask(server.url, f"/pause{query}", b"").json == {"status": "paused"}
        assert server.llm.paused == expected
    assert ask(server.url, "/is_paused", method="GET").json == {"is_paused": True}
    assert ask(server.url, "/health").json["engines"][0]["is_paused"] is True
    assert ask(server.url, "/resume", b"").json == {"status": "resumed"}
    assert ask(server.url, "/is_paused", method="GET").json == {"is_paused": False}
    for query, param, code in (
        ("mode=stop", "mode", "invalid_value"),
        ("mode=wait&mode=keep", "mode", "invalid_value"),
        ("clear_cache=perhaps", "clear_cache", "invalid_type"),
        ("wait_for_inflight_requests=true", "wait_for_inflight_requests", "unknown_parameter"),
    ):
        answer = ask(server.url, f"/pause?{query}", b"")
        assert (answer.status, answer.error["param"], answer.error["code"]) == (400, param, code)
    assert server.llm.paused is None


@pytest.fixture
def sleepy(start_server: Callable[..., Served]) -> Served:
    served = start_server()
    config = served.llm.config
    model = dataclasses.replace(config.model, enable_sleep_mode=True)
    served.llm.config = msgspec.structs.replace(config, model=model)
    return served


def test_an_engine_sleeps_and_wakes_up(sleepy: Served) -> None:
    assert ask(sleepy.url, "/is_sleeping", method="GET").json == {"is_sleeping": False}
    assert ask(sleepy.url, "/sleep?level=2", b"").json == {"is_sleeping": True}
    assert ask(sleepy.url, "/is_sleeping", method="GET").json == {"is_sleeping": True}
    assert ask(sleepy.url, "/health").json["engines"][0]["is_sleeping"] is True
    assert ask(sleepy.url, "/wake_up?tags=weights&tags=kv_cache", b"").json == {"is_sleeping": False}
    assert ask(sleepy.url, "/sleep?level=0&mode=wait", b"").json == {"is_sleeping": False}
    assert sleepy.llm.paused == ("wait", False)
    assert ask(sleepy.url, "/wake_up?tags=scheduling", b"").json == {"is_sleeping": False}
    assert sleepy.llm.paused is None
    assert ask(sleepy.url, "/sleep", b"").json == {"is_sleeping": True}
    answer = ask(sleepy.url, WEIGHTS, {"model_path": "/there"})
    assert answer.json == {"message": "the weights are those of /there", "success": True}
    assert sleepy.llm.weights == "/there"
    assert not sleepy.llm.sleeps


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("/sleep?level=3", b"", 400, "level", "invalid_value"),
        ("/sleep?level=one", b"", 400, "level", "invalid_type"),
        ("/sleep?level=1&level=2", b"", 400, "level", "invalid_value"),
        ("/sleep?level=1&mode=stop", b"", 400, "mode", "invalid_value"),
        ("/wake_up?tags=all", b"", 400, "tags[0]", "invalid_value"),
        ("/wake_up?tag=weights", b"", 400, "tag", "unknown_parameter"),
        (f"{WEIGHTS}?model_path=/there", {"model_path": "/there"}, 400, "model_path", "unknown_parameter"),
        (WEIGHTS, {}, 400, "model_path", "missing_required_parameter"),
        (WEIGHTS, {"model_path": 5}, 400, "model_path", "invalid_type"),
        (WEIGHTS, {"model_path": "/there", "flush": True}, 400, "flush", "unknown_parameter"),
        (WEIGHTS, {"model_path": "/nowhere"}, 409, None, "weights_unchanged"),
    ],
)
def test_what_is_wrong_is_named(
    sleepy: Served, path: str, body: Any, status: int, param: str | None, code: str
) -> None:
    answer = ask(sleepy.url, path, body)
    assert (answer.status, answer.error["param"], answer.error["code"]) == (status, param, code)
    assert not sleepy.llm.sleeps
    assert sleepy.llm.weights is None


def test_without_the_mode_nothing_changes(server: Served) -> None:
    for path, body in (("/sleep", b""), ("/wake_up", b""), (WEIGHTS, {"model_path": "/there"})):
        answer = ask(server.url, path, body)
        assert (answer.status, answer.error["code"]) == (403, "awake")
        assert "--enable-sleep-mode" in answer.error["message"]
    assert server.llm.weights is None


def test_profiles_begin_and_end_where_the_server_allows_them(start_server: Callable[..., Served]) -> None:
    server = start_server()
    for path in ("/start_profile", "/stop_profile"):
        answer = ask(server.url, path, b"")
        assert (answer.status, answer.error["code"]) == (404, "profiler_off")
    assert "--profiler-config" in answer.error["message"]
    config = server.llm.config
    traced = ObservabilityArgs(profiler_config={"profiler": "torch", "torch_profiler_dir": "/traces"})
    server.llm.config = msgspec.structs.replace(config, observability=traced)
    assert ask(server.url, "/start_profile", b"").json == {"is_profiling": True}
    again = ask(server.url, "/start_profile", b"")
    assert (again.status, again.error["code"]) == (409, "profile_failed")
    assert ask(server.url, "/stop_profile", b"").json == {"is_profiling": False}
