from __future__ import annotations

import numpy as np
import pytest

from octavo.sampling.random import draw_key, exponentials, hash_tokens, race

PINNED_KEY = (2396569881, 172702778)
PINNED_HASHES = [455452945, 1489470696, 2716248768]


def keys_of(count: int, seed: int = 0) -> np.ndarray:
    return np.array([draw_key(seed, 0, position) for position in range(count)], dtype=np.uint32)


def test_the_stream_is_pinned() -> None:
    # other devices reproduce these numbers; a change here changes what every seed draws
    first, second = draw_key(42, 0, 7)
    hashed = hash_tokens(np.array([0, 1, 151_935], dtype=np.uint32), np.uint32(first), np.uint32(second))
    assert (first, second) == PINNED_KEY
    assert hashed.tolist() == PINNED_HASHES


def test_hash_agrees_with_plain_integers() -> None:
    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ (x >> 16)

    first, second = draw_key(1, 2, 3)
    expected = [mix((mix(token ^ first) + second) % 2**32) for token in range(37)]
    assert hash_tokens(np.arange(37, dtype=np.uint32), np.uint32(first), np.uint32(second)).tolist() == expected


@pytest.mark.parametrize("other", [(8, 0, 7), (7, 1, 7), (7, 0, 8)])
def test_every_part_of_the_key_matters(other: tuple[int, int, int]) -> None:
    assert draw_key(7, 0, 7) != draw_key(*other)


def test_negative_and_largest_seeds_have_keys() -> None:
    assert draw_key(-(2**63), 0, 0) != draw_key(2**63 - 1, 0, 0)


def test_exponentials_are_positive_finite_and_exponential() -> None:
    keys = keys_of(64)
    values = exponentials(np.arange(4096, dtype=np.uint32), keys[:, :1], keys[:, 1:])
    assert values.dtype == np.float32
    assert values.min() > 0
    assert np.isfinite(values).all()
    # Kolmogorov-Smirnov against 1 - exp(-x): sqrt(n) D stays below 1.95 with probability 0.999
    ordered = np.sort(values.reshape(-1).astype(np.float64))
    uniform = -np.expm1(-ordered)
    count = len(uniform)
    distance = np.abs(uniform - (np.arange(count) + 0.5) / count).max()
    assert distance * count**0.5 < 1.95


def test_largest_hash_stays_finite() -> None:
    hashes = np.array([0, 2**32 - 1, 2**32 - 128], dtype=np.uint32)
    values = np.minimum((hashes.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32), np.float32(1 - 2**-24))
    assert np.isfinite(np.log1p(-values)).all()


@pytest.mark.parametrize("sparse", [False, True])
def test_draws_follow_the_distribution(sparse: bool) -> None:
    probabilities = np.array([0.5, 0.25, 0.125, 0.0, 0.0625, 0.0625], dtype=np.float32)
    count = 20_000
    drawn = race(np.tile(probabilities, (count, 1)), keys_of(count), sparse=sparse)
    observed = np.bincount(drawn, minlength=6)
    expected = probabilities * count
    assert observed[3] == 0
    possible = expected > 0
    chi_square = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 18.47  # 4 degrees of freedom, 0.999


def test_successive_positions_are_independent() -> None:
    count = 20_000
    drawn = race(np.full((count, 4), 0.25, dtype=np.float32), keys_of(count), sparse=False)
    pairs = np.bincount(drawn[:-1] * 4 + drawn[1:], minlength=16)
    expected = (count - 1) / 16
    assert ((pairs - expected) ** 2 / expected).sum() < 37.7  # 15 degrees of freedom, 0.999


@pytest.mark.parametrize("vocab_size", [1, 17, 1000, 32_003])
def test_a_draw_is_the_same_alone_in_a_batch_and_sparse(vocab_size: int) -> None:
    generator = np.random.default_rng(vocab_size)
    probabilities = generator.random((9, vocab_size), dtype=np.float32) ** 20
    keys = keys_of(9)
    together = race(probabilities, keys, sparse=False)
    alone = [int(race(probabilities[i : i + 1], keys[i : i + 1], sparse=False)[0]) for i in range(9)]
    assert together.tolist() == alone
    assert race(probabilities, keys, sparse=True).tolist() == alone


def test_noise_of_a_token_does_not_depend_on_its_neighbours() -> None:
    keys = keys_of(3)
    token_ids = np.arange(1003, dtype=np.uint32)
    together = exponentials(token_ids, keys[:, :1], keys[:, 1:])
    for start in (0, 1, 5, 500):
        piece = exponentials(token_ids[start : start + 19], keys[1, 0], keys[1, 1])
        assert (piece == together[1, start : start + 19]).all()
