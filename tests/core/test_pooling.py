"""Vectors are compared by the cosine of their angle."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np

from octavo.core.pooling import cosine


def test_a_cosine_of_sparse_vectors_makes_no_objects_of_their_zeros() -> None:
    generator = np.random.default_rng(0)
    one, other = np.zeros((2, 1 << 18), np.float32)
    one[:300], other[200:500] = generator.random((2, 300), np.float32)
    shared = [float(a) * float(b) for a, b in zip(one[200:300], other[200:300], strict=True)]
    expected = math.fsum(shared) / (math.hypot(*one.tolist()) * math.hypot(*other.tolist()))
    tracemalloc.start()
    assert cosine(one, other) == expected
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    tracemalloc.stop()
    assert cosine(one, np.zeros_like(one)) == 0.0
