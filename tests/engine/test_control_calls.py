"""Results of calls to several cores, and the pins that a new core gets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from octavo.core.messages import SchedulerStats
from octavo.engine.control_calls import LastingCalls, Replies, merged
from octavo.errors import ConfigError, RequestFailed
from tests.fakes.core import engine_config


@pytest.mark.parametrize(
    ("method", "results", "expected"),
    [
        ("reset_prefix_cache", [True, False], False),
        ("unpin_prefix", [True, False], True),
        (
            "pin_prefix",
            [{"num_tokens": 8, "num_cached_tokens": 8}, {"num_tokens": 8, "num_cached_tokens": 0}],
            {"num_tokens": 8, "num_cached_tokens": 0},
        ),
        (
            "decisions",
            [[{"time": 2.0}], [{"time": 1.0}, {"time": 3.0}]],
            [{"time": 1.0, "replica": 1}, {"time": 2.0, "replica": 0}, {"time": 3.0, "replica": 1}],
        ),
        (
            "timelines",
            [[{"events": [(0.0, "queued"), (2.0, "finished")]}], [{"events": [(1.0, "aborted")]}]],
            [
                {"events": [(1.0, "aborted")], "replica": 1},
                {"events": [(0.0, "queued"), (2.0, "finished")], "replica": 0},
            ],
        ),
        ("is_sleeping", [False, True], True),
        ("is_paused", [False, True], True),
        ("pause", [False, True], False),
        ("pause_is_complete", [True, True], True),
        ("time_steps", [None, None], None),
        ("get_weight_version", ["7", "7"], "7"),
    ],
)
def test_results_of_replicas_become_one(method: str, results: list[Any], expected: Any) -> None:
    assert merged(method, list(enumerate(results))) == expected


def test_different_weight_versions_are_an_error() -> None:
    with pytest.raises(RequestFailed, match="'7' of replica 0, 'default' of replica 1"):
        merged("get_weight_version", [(0, "7"), (1, "default")])


def test_a_core_that_starts_gets_the_label_of_the_weights() -> None:
    lasting = LastingCalls()
    lasting.note("set_weight_version", ("1",), None)
    lasting.note("update_weights", ("/2",), None)
    with lasting.begun("set_weight_version", ("2",)):
        assert calls(lasting) == [("update_weights", ["/2"]), ("set_weight_version", ["2"])]
    assert calls(lasting)[1] == ("set_weight_version", ["1"]), "the call has failed"


def test_states_add_up() -> None:
    states = [SchedulerStats(num_running=number, num_steps=10 * number) for number in (1, 2)]
    found = merged("stats", list(enumerate(map(msgspec.to_builtins, states))))
    assert msgspec.convert(found, SchedulerStats) == states[0] + states[1]
    assert (found["num_running"], found["num_steps"], found["num_ready"]) == (3, 30, 2)


def test_pins_last_until_they_end_or_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pins = LastingCalls()
    for token_ids, ttl_s in (([1, 2], 10.0), ([3], 100.0), ([4], 100.0)):
        pins.note("pin_prefix", (token_ids, ttl_s, "salt", None), {})
    pins.note("unpin_prefix", ([4], "salt", None), True)
    pins.note("unpin_prefix", ([3], None, None), False)
    now = 130.0
    assert calls(pins) == [("pin_prefix", [[3], 70.0, "salt", None])]
    pins.note("reset_prefix_cache", (), False)
    assert calls(pins)
    pins.note("reset_prefix_cache", (), True)
    assert not calls(pins)


def calls(lasting: LastingCalls, number: int = 0) -> list[tuple[str, list[Any]]]:
    return [(each.method, each.arguments) for each in lasting.calls(number)]


def test_a_core_that_starts_during_calls_gets_what_the_last_of_them_sets() -> None:
    lasting, config = LastingCalls(), engine_config()
    with lasting.begun("update_weights", ("/1",)):
        with lasting.begun("sleep", ()):
            assert calls(lasting) == [("update_weights", ["/1"]), ("sleep", [])]
            with lasting.begun("update_weights", ("/2",)):
                assert calls(lasting) == [("update_weights", ["/2"])]
        lasting.note("sleep", (), None)
        lasting.note("update_weights", ("/2",), None)
    assert calls(lasting) == [("update_weights", ["/2"])], "the first one has failed"
    assert lasting.started(1, config).model.path == "/2"
    assert (calls(lasting, 1), calls(lasting, 0)) == ([], [("update_weights", ["/2"])])
    lasting.note("update_weights", ("/2",), None)
    assert calls(lasting, 1) == [("update_weights", ["/2"])], "the files may have changed since"
    with lasting.begun("wake_up", ()), lasting.begun("sleep", ()):
        assert ("sleep", []) in calls(lasting)
    assert ("sleep", []) not in calls(lasting)


@pytest.mark.anyio
async def test_a_core_that_starts_while_all_go_back_to_their_weights_goes_back_too() -> None:
    lasting, sent = LastingCalls(), []

    async def call(method: str, arguments: Sequence[Any]) -> Replies:
        sent.append((method, list(arguments)))
        if len(sent) > 2:  # another core becomes ready behind the call that goes back, and does not get it
            assert calls(lasting)[: len(sent) - 2] == sent[2:]
        return [(0, ConfigError("a file is broken") if sent[1:] == [("update_weights", ["/2"])] else None)]

    lasting.note("update_weights", ("/1",), None)
    lasting.note("sleep", (), None)
    replies = await lasting.make(call, "update_weights", ("/2",), num_replicas=2)
    assert sent[1:] == [("update_weights", ["/2"]), ("update_weights", ["/1"]), ("sleep", [])]
    assert "all replicas go on with the weights that they had" in str(replies[0][1]), "one of two was ready"


def test_a_core_that_starts_gets_the_pause_that_is_on() -> None:
    lasting = LastingCalls()
    pin = ("pin_prefix", ([1], 1e6, None, None))
    lasting.note(*pin, {})
    with lasting.begun("pause", ("keep", False)):
        assert calls(lasting)[0] == ("pause", ["keep", False])
        with lasting.begun("resume", ()):
            assert [each for each, _ in calls(lasting)] == ["pin_prefix"]
    lasting.note("pause", ("wait", False), False)
    assert [each for each, _ in calls(lasting)] == ["pause", "pin_prefix"]
    lasting.note("pause", ("abort", True), False)
    assert calls(lasting) == [("pause", ["abort", True])], "it forgets pins"
    with lasting.begun("update_weights", ("/1",)):
        assert [each for each, _ in calls(lasting)] == ["update_weights", "pause"]
    for method in ("resume", "wake_up", "sleep"):
        lasting.note("pause", ("keep", False), True)
        lasting.note(method, (), None)
        assert "pause" not in [each for each, _ in calls(lasting)]
