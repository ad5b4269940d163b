from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.devices.token_store import DeviceTokenStore, HostTokenStore, TokenStore


@pytest.fixture(params=["host", "cuda"])
def store(request: pytest.FixtureRequest) -> TokenStore:
    return HostTokenStore(1, 4) if request.param == "host" else DeviceTokenStore(torch.device("cpu"))


def gathered(store: TokenStore, *places: tuple[int, int]) -> list[int]:
    out = torch.zeros(len(places), dtype=torch.int64)
    lines, positions = np.array(places).T
    store.gather(lines, positions, out)
    return out.tolist()


def test_tokens_are_gathered_from_their_places(store: TokenStore) -> None:
    store.write(0, 0, [5, 6, 7])
    store.write(3, 0, list(range(100)))
    store.write(0, 1, [8])
    assert gathered(store, (3, 99), (0, 1), (0, 2), (0, 0)) == [99, 8, 7, 5]


def test_what_a_step_draws_the_next_one_gathers(store: TokenStore) -> None:
    store.write(0, 0, [1, 2, 3])
    store.write(1, 0, [4])
    for number in range(10):
        positions = [3 + number, 1 + number]
        store.append([0, 1], positions, [10 + number, 20 + number])
        assert gathered(store, (0, 3 + number), (1, 1 + number)) == [10 + number, 20 + number]
    assert store.read(1, 11).tolist() == [4, *range(20, 30)]


def test_lines_are_on_the_device_as_they_are_now(store: TokenStore) -> None:
    store.write(0, 0, [1, 2, 3])
    store.write(1, 2, range(70))
    store.append([0], [3], [4])
    assert store.on_device()[0, :4].tolist() == [1, 2, 3, 4]
    assert store.on_device()[1, 2:72].tolist() == [*range(70)]


def test_a_copied_line_goes_on_alone(store: TokenStore) -> None:
    store.write(0, 0, [1, 2, 3])
    store.copy(0, 5, 2)
    store.append([0, 5], [3, 2], [7, 9])
    assert store.read(0, 4).tolist() == [1, 2, 3, 7]
    assert store.read(5, 3).tolist() == [1, 2, 9]
