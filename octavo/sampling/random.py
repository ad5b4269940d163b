"""Random draws without state: a counter-based generator keyed by who draws, and where.

A draw is an exponential race: token `t` with probability `p_t` arrives after `E_t / p_t`, where the `E_t` are
independent standard exponentials; the first to arrive is a sample of `p`. `E_t` is a hash of the token id and a key. So
a draw depends only on its own probabilities and its own key, not on the batch, earlier draws or the device. This module
is the reference of that stream for every device.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_PACK = struct.Struct("<qqqq").pack
_UNPACK = struct.Struct("<II").unpack

# lowbias32: xorshift-multiply with the lowest known avalanche bias for this form (Chris Wellons, "Prospecting for hash
# functions", 2018)
_MULTIPLIER_1 = np.uint32(0x7FEB352D)
_MULTIPLIER_2 = np.uint32(0x846CA68B)
_SHIFT_1 = np.uint32(16)
_SHIFT_2 = np.uint32(15)

# float32 rounds the 256 largest hashes up to 1.0, whose exponential would be infinite and could lose every race
_LARGEST = np.float32(1.0 - 2.0**-24)


def draw_key(seed: int, index: int, position: int) -> tuple[int, int]:
    """Return the two 32-bit keys of one draw.

    `index` is the sequence's index in its group, `position` that of the drawn token in its sequence.
    """
    key: tuple[int, int] = _UNPACK(packed_draw_key(seed, index, position))
    return key


def packed_draw_key(seed: int, index: int, position: int) -> bytes:
    """Return `draw_key` as eight bytes, little-endian."""
    # the last number would be another for draws of another kind at the same position
    return blake2b(_PACK(seed, index, position, 0), digest_size=8).digest()


def hash_tokens(
    token_ids: NDArray[np.uint32], key_1: NDArray[np.uint32], key_2: NDArray[np.uint32]
) -> NDArray[np.uint32]:
    """Return 32 random bits per token id under two keys; the arguments broadcast."""
    hashed = token_ids ^ key_1
    scratch = np.empty_like(hashed)
    _mix(hashed, scratch)
    np.add(hashed, key_2, out=hashed)
    _mix(hashed, scratch)
    return hashed


def exponentials(
    token_ids: NDArray[np.uint32], key_1: NDArray[np.uint32], key_2: NDArray[np.uint32]
) -> NDArray[np.float32]:
    """Return a standard exponential per token id under two keys, float32 and positive; the arguments broadcast."""
    hashed = hash_tokens(token_ids, key_1, key_2)
    values = hashed.astype(np.float32)
    # v lies in (0, 1) and is finest near 0, where the small values are that win races
    np.add(values, np.float32(0.5), out=values)
    np.multiply(values, np.float32(2.0**-32), out=values)
    np.minimum(values, _LARGEST, out=values)
    np.negative(values, out=values)
    np.log1p(values, out=values)
    return np.negative(values, out=values)


def race(probabilities: NDArray[np.float32], keys: NDArray[np.uint32], *, sparse: bool) -> NDArray[np.int64]:
    """Draw one token for each row of `probabilities`, float32 [draws, vocab], with `keys`, uint32 [draws, 2].

    Rows need not sum to 1; a token with probability 0 is never drawn. sparse: most entries are 0, which changes the
    time taken, never the result. Returns token ids [draws].
    """
    vocab_size = probabilities.shape[1]
    if not sparse:
        token_ids = np.arange(vocab_size, dtype=np.uint32)
        scores = exponentials(token_ids, keys[:, :1], keys[:, 1:])
        np.divide(probabilities, scores, out=scores)
        return _argmax(scores)
    flat = np.flatnonzero(probabilities)
    rows, token_ids64 = np.divmod(flat, vocab_size)
    noise = exponentials(token_ids64.astype(np.uint32), keys[rows, 0], keys[rows, 1])
    scores = np.zeros_like(probabilities)
    scores.reshape(-1)[flat] = probabilities.reshape(-1)[flat] / noise
    return _argmax(scores)


def race_among(
    token_ids: NDArray[np.int64], weights: NDArray[np.float32], keys: NDArray[np.uint32]
) -> NDArray[np.int64]:
    """Draw as `race` does, among listed tokens only: `token_ids` and `weights` are [draws, listed]."""
    noise = exponentials(token_ids.astype(np.uint32), keys[:, :1], keys[:, 1:])
    winners: NDArray[np.int64] = np.take_along_axis(token_ids, _argmax(weights / noise)[:, None], axis=1)[:, 0]
    return winners


def _argmax(scores: NDArray[np.float32]) -> NDArray[np.int64]:
    winners: NDArray[np.int64] = scores.argmax(axis=1)
    return winners


def _mix(hashed: NDArray[np.uint32], scratch: NDArray[np.uint32]) -> None:
    """Apply one round of lowbias32 in place."""
    np.right_shift(hashed, _SHIFT_1, out=scratch)
    np.bitwise_xor(hashed, scratch, out=hashed)
    np.multiply(hashed, _MULTIPLIER_1, out=hashed)
    np.right_shift(hashed, _SHIFT_2, out=scratch)
    np.bitwise_xor(hashed, scratch, out=hashed)
    np.multiply(hashed, _MULTIPLIER_2, out=hashed)
    np.right_shift(hashed, _SHIFT_1, out=scratch)
    np.bitwise_xor(hashed, scratch, out=hashed)
