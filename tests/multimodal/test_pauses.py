"""Where sounds are cut while they come."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.multimodal.pauses import LEAST_S, MOST_S, TIRED_S, Pauses

RATE = 16_000


def cuts(*parts: tuple[float, float], most: int = 1 << 30) -> list[float]:
    """The seconds behind which a sound of parts is cut, each of which lasts so long and is so loud."""
    pauses, found, at = Pauses(RATE), [], 0
    noise = np.random.RandomState(0).uniform(-1, 1, RATE * 100)
    whole = np.concatenate([noise[: round(seconds * RATE)] * loudness for seconds, loudness in parts])
    samples = (whole * 30_000).astype("<i2").tobytes()
    for start in range(0, len(samples), pauses.part_bytes):
        part = samples[start : start + pauses.part_bytes]
        at += len(part)
        if pauses.add(part):
            found.append(round(at / (2 * RATE), 1))
    return found


def test_a_pause_behind_some_seconds_cuts() -> None:
    assert cuts((1, 1), (1, 0), (3.5, 1), (1, 0.01), (6, 1), (1, 0)) == [5.9, 12.9]
    assert cuts((LEAST_S - 0.1, 1), (0.3, 0), (2, 1)) == []


def test_noise_alone_is_no_pause() -> None:
    assert cuts((20, 0.01)) == cuts((20, 0.0)) == cuts((20, 0.5)) == []
    assert cuts((2, 0.01), (4, 1), (1, 0.01)) == [6.4]


def test_speech_without_pauses_is_cut_at_the_shortest_one() -> None:
    assert cuts((10, 1), (0.2, 0), (TIRED_S - 10, 1), (0.1, 0), (3, 1)) == [TIRED_S + 0.3]
    assert cuts((MOST_S + 2, 1)) == [MOST_S]


@pytest.mark.parametrize("rate", [8_000, 24_000, 44_100])
def test_parts_are_whole_samples_of_a_tenth_of_a_second(rate: int) -> None:
    assert Pauses(rate).part_bytes == 2 * rate // 10
    assert not Pauses(rate).add(b"")
