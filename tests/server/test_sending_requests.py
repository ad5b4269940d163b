"""Requests in progress end with a reason, as an ordinary exception."""

from __future__ import annotations

import asyncio

import pytest

from octavo.server.errors import ApiError, ClientDisconnectedError, shutting_down
from octavo.server.sending import OpenRequests

pytestmark = pytest.mark.anyio


class Client:
    """A connection that can go away."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, str]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def generate(requests: OpenRequests, client: Client, seconds: float = 10.0) -> str:
    async with requests.track(client.receive):
        await asyncio.sleep(seconds)
    return "answered"


async def test_request_that_is_left_alone_is_answered() -> None:
    requests = OpenRequests()
    assert await generate(requests, Client(), 0) == "answered"
    assert len(requests) == 0
    assert not requests.started.is_set()


async def test_client_that_goes_away_ends_its_own_request() -> None:
    requests, gone, stays = OpenRequests(), Client(), Client()
    tasks = [asyncio.create_task(generate(requests, client, 0.1)) for client in (gone, stays)]
    await asyncio.sleep(0)
    assert len(requests) == 2
    assert requests.started.is_set()
    gone.gone.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], ClientDisconnectedError)
    assert results[1] == "answered"


async def test_all_requests_end_with_the_reason_given() -> None:
    requests = OpenRequests()
    tasks = [asyncio.create_task(generate(requests, Client())) for _ in range(3)]
    await asyncio.sleep(0)
    requests.end_all(reason := shutting_down())
    assert await asyncio.gather(*tasks, return_exceptions=True) == [reason] * 3


async def test_a_body_that_nobody_reads_and_that_is_too_large_ends_its_request() -> None:
    """Otherwise nothing would notice that its client goes away, and a stream without an end would go on for ever."""

    async def receive() -> dict[str, str]:
        raise ApiError(413, "the body has more than 5 bytes")

    with pytest.raises(ApiError, match="more than 5 bytes"):
        async with OpenRequests().track(receive):
            await asyncio.sleep(10)


async def test_task_goes_on_after_its_request_has_ended() -> None:
    requests, client = OpenRequests(), Client()
    client.gone.set()
    with pytest.raises(ClientDisconnectedError):
        await generate(requests, client)
    await asyncio.sleep(0)


async def test_cancellation_from_elsewhere_stays_one() -> None:
    requests = OpenRequests()
    task = asyncio.create_task(generate(requests, Client()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(requests) == 0
