"""Finds the pauses in speech at which a sound that still arrives may be cut."""

from __future__ import annotations

from typing import Final

import numpy as np

LEAST_S: Final = 5.0
"""Seconds of a piece before it is cut."""
TIRED_S: Final = 25.0
"""Seconds from which on a shorter pause is enough."""
MOST_S: Final = 30.0
"""Seconds after which a piece is cut in any case."""
_PAUSE_S, _SHORT_PAUSE_S = 0.4, 0.1
_QUIET: Final = 0.1
"""Loudness up to which a part is quiet, relative to the loudest part of a piece."""
_PART_S: Final = 0.1
"""Seconds of a part, whose loudness is measured as a whole."""


class Pauses:
    """Follows the samples of a sound: of one channel, of 16 bits, the lower byte first; `rate` in a second."""

    def __init__(self, rate: int) -> None:
        self.part_bytes = 2 * round(_PART_S * rate)
        """Bytes to add at once."""
        self._second = 2 * rate
        self._num_bytes = self._num_quiet = 0
        self._loudest = 0.0

    def add(self, samples: bytes) -> bool:
        """Return whether the sound is cut behind these samples, with which a piece then ends."""
        self._num_bytes += len(samples)
        heard = np.frombuffer(samples, "<i2").astype(np.float32)
        loudness = float(np.sqrt(np.mean(heard * heard))) if len(heard) else 0.0
        self._loudest = max(self._loudest, loudness)
        self._num_quiet = self._num_quiet + len(samples) if loudness < _QUIET * self._loudest else 0
        length_s, quiet_s = self._num_bytes / self._second, self._num_quiet / self._second
        is_cut = length_s >= LEAST_S and quiet_s >= (_PAUSE_S if length_s < TIRED_S else _SHORT_PAUSE_S)
        if is_cut or length_s >= MOST_S:
            self._num_bytes = self._num_quiet = 0
            self._loudest = 0.0
            return True
        return False
