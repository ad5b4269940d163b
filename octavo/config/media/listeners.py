"""Models that read whole sounds through caches, as Whisper does, from samples: how many vectors a sound becomes."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Final, NamedTuple

from octavo.config.section import Section

RATE: Final = 16_000
"""Samples per second."""


class Listener(NamedTuple):
    """seconds: how long a sound may be. num_vectors: returns the vectors that an encoder makes of so many samples."""

    seconds: float
    num_vectors: Callable[[int], int]

    @property
    def most_vectors(self) -> int:
        """Vectors of the longest sound."""
        return self.num_vectors(int(self.seconds * RATE))


def _convolved(length: int, kernel_and_stride: tuple[int, int]) -> int:
    kernel, stride = kernel_and_stride
    return (length - kernel) // stride + 1


def _moonshine(num_samples: int) -> int:
    return reduce(_convolved, ((127, 64), (7, 3), (3, 2)), num_samples)


def num_parakeet_vectors(num_samples: int) -> int:
    """Return the vectors that Parakeet's encoder makes of so many samples."""
    # a frame for each 160 samples, padded on both sides before each convolution
    return reduce(lambda length, _: (length - 1) // 2 + 1, range(3), num_samples // 160)


def expect_parakeet(section: Section) -> None:
    """Raise UnsupportedModel for an encoder of Parakeet's that joins another number of frames."""
    section.expect_all(subsampling_factor=8, subsampling_conv_kernel_size=3, subsampling_conv_stride=2)


COHERE: Final = Listener(35.0, num_parakeet_vectors)
MOONSHINE: Final = Listener(30.0, _moonshine)
