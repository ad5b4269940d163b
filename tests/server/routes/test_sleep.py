"""`/sleep`, `/wake_up`, `/is_sleeping` and `/update_weights_from_disk`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.server.conftest import Served
from tests.server.raw import ask

WEIGHTS = "/update_weights_from_disk"


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
    assert ask(sleepy.url, "/wake_up?tags=weights&tags=kv_cache", b"").json == {"is_sleeping": False}
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
        ("/sleep?level=1&mode=keep", b"", 400, "mode", "unknown_parameter"),
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
