"""Videos as callers give them: frames and when they were taken, within limits of time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from octavo.errors import InvalidRequest
from octavo.multimodal.images import decoded

MOST_FRAMES: Final = 128
"""Most frames that are read of one video."""
MOST_VIDEO_PIXELS: Final = 1 << 26
"""Most pixels of all frames of one video together."""
_FRAMES_PER_SECOND: Final = 24.0
"""Assumed for a video without metadata."""
_LAST_INDEX: Final = 10**9
"""Largest place of a frame in the original."""
_KEYS: Final = frozenset({"fps", "frames_indices", "total_num_frames", "duration"})


class Video(NamedTuple):
    """Frames, RGB images of Pillow of one size; `fps` frames of the original are taken per second, and `indices` are
    the places of the frames among those. is_timed: the caller gives `fps`."""

    frames: list[Any]
    fps: float
    indices: list[int]
    is_timed: bool = True

    def times(self, together: int) -> list[tuple[float, float]]:
        """Return the seconds of the first and of the last of each so many frames; the last frame is repeated."""
        places = [*self.indices, *self.indices[-1:] * (-len(self.indices) % together)]
        groups = [places[start : start + together] for start in range(0, len(places), together)]
        return [(each[0] / self.fps, each[-1] / self.fps) for each in groups]

    @property
    def sampled_fps(self) -> float:
        """Frames per second of those that are given."""
        return len(self.indices) / (self.indices[-1] + 1) * self.fps


def decoded_video(given: Any) -> Video:
    """Return a video. given: frames, each as images are given, or uint8 [frames, height, width, 3]; or these with their
    metadata: fps, and frames_indices where frames of the original are left out. Raises InvalidRequest."""
    given, metadata = _parts(given)
    count = len(given)
    if not 0 < count <= MOST_FRAMES:
        raise _refused(f"has {count} frames, must have 1 to {MOST_FRAMES}; leave some out, and tell frames_indices")
    shape = getattr(given, "shape", None)
    if shape is not None and len(shape) == 4 and shape[0] * shape[1] * shape[2] > MOST_VIDEO_PIXELS:
        raise _too_large()
    frames: list[Any] = []
    for each in given:
        frame = decoded(each)
        if frames and frame.size != frames[0].size:
            sizes = " and ".join(f"{width} x {height}" for width, height in (frames[0].size, frame.size))
            raise _refused(f"has frames of {sizes} pixels; give frames of one size")
        if frame.width * frame.height * count > MOST_VIDEO_PIXELS:
            raise _too_large()
        frames.append(frame)
    fps, indices = metadata.get("fps", _FRAMES_PER_SECOND), metadata.get("frames_indices")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0.001 <= fps <= 1000:
        raise _refused(f"has fps={str(fps)[:100]}, expected a number from 0.001 to 1000")
    try:
        indices = list(range(count)) if indices is None else [int(each) for each in indices]
    except (TypeError, ValueError, OverflowError):
        indices = []
    is_rising = all(first < second for first, second in pairwise(indices))
    if len(indices) != count or indices[0] < 0 or not is_rising or indices[-1] > _LAST_INDEX:
        raise _refused(
            f"has {count} frames and frames_indices that are not {count} rising numbers from 0 to {_LAST_INDEX:,}"
        )
    return Video(frames, float(fps), indices, "fps" in metadata)


def _parts(given: Any) -> tuple[Any, Mapping[str, Any]]:
    metadata: Any = {}
    if isinstance(given, Mapping):
        given, metadata = given.get("frames", ()), {name: each for name, each in given.items() if name != "frames"}
    elif isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        given, metadata = given
    if unknown := metadata.keys() - _KEYS:
        names, known = (", ".join(sorted(map(str, each))) for each in (unknown, _KEYS))
        raise _refused(f"has {names} in its metadata; known are {known}")
    if (not isinstance(given, Sequence) and not hasattr(given, "shape")) or isinstance(given, str | bytes):
        raise _refused(f"is {type(given).__name__}; give its frames, decoded")
    return given, metadata


def _too_large() -> InvalidRequest:
    return _refused(f"has frames of more than {MOST_VIDEO_PIXELS:,} pixels together; give fewer or smaller ones")


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"a video of the prompt {reason}", field="multi_modal_data")
