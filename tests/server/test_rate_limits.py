"""Keys use no more than their limits, and learn when they may go on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from octavo.config.server_args import ServerArgs
from octavo.errors import ConfigError
from octavo.server.errors import ApiError
from octavo.server.key_file import read_callers
from octavo.server.rate_limits import Meter, RateLimits
from tests.server.conftest import Served
from tests.server.raw import Answer, ask, connect

Start = Callable[..., Served]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def begin(meter: Meter) -> ApiError | None:
    """Begin and end a request."""
    try:
        with meter.request():
            return None
    except ApiError as error:
        return error


def headers(meter: Meter) -> dict[str, str]:
    return {name.decode().removeprefix("x-ratelimit-"): value.decode() for name, value in meter.headers()}


def test_requests_of_a_minute_may_come_at_once_and_the_next_ones_evenly() -> None:
    clock = Clock()
    meter = Meter("alice", RateLimits(requests_per_minute=6), clock)
    assert [begin(meter) for _ in range(6)] == [None] * 6
    refused = begin(meter)
    assert refused is not None
    assert (refused.status, refused.code, refused.headers) == (429, "rate_limit_exceeded", {"Retry-After": "10"})
    assert "the API key alice has used its requests; its limit is 6 (requests_per_minute in" in str(refused)
    assert headers(meter) == {"limit-requests": "6", "remaining-requests": "0", "reset-requests": "60s"}
    clock.now += 10
    assert [begin(meter) is None for _ in range(2)] == [True, False]
    clock.now += 3600
    assert headers(meter) == {"limit-requests": "6", "remaining-requests": "6", "reset-requests": "0s"}


def test_tokens_beyond_the_limit_are_waited_for() -> None:
    clock = Clock()
    meter = Meter("alice", RateLimits(tokens_per_minute=600), clock)
    assert begin(meter) is None
    meter.spend(650)
    refused = begin(meter)
    assert refused is not None
    assert refused.headers == {"Retry-After": "6"}
    assert headers(meter)["remaining-tokens"] == "0"
    clock.now += 6
    assert begin(meter) is None


def test_requests_at_once_are_limited_and_refused_ones_count_for_nothing() -> None:
    meter = Meter("alice", RateLimits(requests_per_minute=3, max_parallel_requests=2), Clock())
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(meter.request())
        assert begin(meter) is not None
    assert [begin(meter) is None for _ in range(2)] == [True, False]


def test_new_limits_keep_what_was_used_of_those_that_stay() -> None:
    meter = Meter("alice", RateLimits(requests_per_minute=2, tokens_per_minute=10), Clock())
    assert begin(meter) is None
    meter.spend(3)
    meter.set_limits(RateLimits(requests_per_minute=2, tokens_per_minute=20))
    assert headers(meter)["remaining-requests"] == "1"
    assert headers(meter)["remaining-tokens"] == "20"


def test_limits_hold_for_the_key_over_http(start_server: Start, tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(
        "- {name: a, key: a-key, requests_per_minute: 2, tokens_per_minute: 1000, max_parallel_requests: 1}\n"
        "- {name: a, key: a-new, requests_per_minute: 2, tokens_per_minute: 1000, max_parallel_requests: 1}\n"
        "- {name: b, key: b-key}\n"
    )
    server = start_server(api_key_file=str(tmp_path / "keys.yaml"))

    def complete(key: str) -> Answer:
        return ask(server.url, "/v1/completions", {"prompt": "abc", "max_tokens": 5}, headers={"x-api-key": key})

    first = complete("a-key")
    assert (first.status, first.headers["x-ratelimit-remaining-requests"]) == (200, "1")
    assert ask(server.url, "/v1/models", headers={"x-api-key": "a-key"}).status == 200
    with connect(server.url) as connection:
        server.llm.hold_after = 1
        fields = {"Content-Type": "application/json", "x-api-key": "a-new"}
        connection.request("POST", "/v1/completions", '{"prompt": "abc", "stream": true}', fields)
        with connection.getresponse() as stream:
            # 4 tokens of the first prompt and 5 of its output are used
            assert 985 < int(stream.headers["x-ratelimit-remaining-tokens"]) <= 992
            assert "max_parallel_requests" in complete("a-key").error["message"]
        server.llm.hold_after = 10**9
    refused = complete("a-key")
    assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
    assert 0 < int(refused.headers["retry-after"]) <= 30
    other = complete("b-key")
    assert other.status == 200
    assert not [name for name in other.headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many", "true"])
def test_limit_is_a_whole_number(tmp_path: Path, value: str) -> None:
    (tmp_path / "keys.yaml").write_text(f"- {{name: a, key: a-key, requests_per_minute: {value}}}")
    with pytest.raises(ConfigError, match="requests_per_minute must be a whole number from 1 to"):
        read_callers(ServerArgs(api_key_file=str(tmp_path / "keys.yaml")))
    (tmp_path / "keys.yaml").write_text("- {name: a, key: x, tokens_per_minute: 1}\n- {name: a, key: y}")
    with pytest.raises(ConfigError, match="give the keys of a name the same"):
        read_callers(ServerArgs(api_key_file=str(tmp_path / "keys.yaml")))
