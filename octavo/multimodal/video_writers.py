"""How families of models that read videos write one into a prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from octavo.config.section import Section
from octavo.multimodal.image_writer import Arrays, Context
from octavo.multimodal.processors.stamped_frames import check_font, stamped
from octavo.multimodal.videos import Video


class WrittenVideo(NamedTuple):
    """A video as it is written into a prompt."""

    tokens: list[int]
    """The tokens of the prompt."""
    arrays: Arrays
    """The arrays that the encoder reads."""
    grid: tuple[int, int] | None = None
    """Rows and columns of each span."""
    times: tuple[int, ...] = ()
    """Positions in time of the parts of a span, where positions follow from them."""
    replaces: tuple[int, int] | None = None
    """The tokens before and after the marker: `tokens` has them, too, so those of the prompt are left out."""


ImageArrays = Callable[..., Arrays]
"""Makes arrays of images by the family's image processor, with its options."""


class VideoWriter(NamedTuple):
    """How a family writes a video into a prompt."""

    marker: tuple[str, ...]
    """Keys of config.json: the first one present has the id that stands for a whole video in a prompt."""
    token: tuple[str, ...]
    """Keys of config.json: the first one present has the id that stands for one vector of a video."""
    write: Callable[[Context, int, Mapping[str, Any], ImageArrays, Video], WrittenVideo]
    """Returns the written video; the settings are those of videos."""
    check: Callable[[Section, Path], str | None] = lambda settings, path: None
    """Returns what a checkpoint's folder with these settings lacks to read videos, None for nothing. Raises
    CheckpointError or UnsupportedModel for settings that no video is read with."""


class _Sizes(NamedTuple):
    """Pixels of a patch's side, patches that become one vector in each direction, frames of a patch."""

    patch: int
    merge: int
    together: int

    @classmethod
    def of(cls, context: Context) -> _Sizes:
        vision = context.config.section("vision_config") or context.config
        patch, merge = vision.positive("patch_size", 14), vision.positive("spatial_merge_size", 2)
        return cls(patch, merge, vision.positive("temporal_patch_size", 2))

    @property
    def step(self) -> int:
        """Pixels that height and width are multiples of."""
        return self.patch * self.merge


def _qwen_arrays(sizes: _Sizes, images: ImageArrays, video: Video, height: int, width: int) -> Arrays:
    """Resize frames, and make patches of several frames each."""
    scaled = [each.resize((width, height), 3) for each in video.frames]  # bicubic
    return _patches(sizes, images, scaled, 3, do_resize=False)


def _patches(sizes: _Sizes, images: ImageArrays, frames: list[Any], num_parts: int, **options: Any) -> Arrays:
    """Make patches of several frames each, of which the last is repeated to fill the last of them.

    num_parts: parts of a patch, each with all its frames: its channels, or the whole patch. options: of the processor.
    """
    frames = frames + frames[-1:] * (-len(frames) % sizes.together)
    made = images(*frames, **options)
    # [frames, patches, parts, frames of a patch, numbers]: each frame is in all places of its patches
    numbers = 3 * sizes.patch**2 // num_parts
    pixels = made["pixel_values"].reshape(len(frames), -1, num_parts, sizes.together, numbers)
    groups = pixels.reshape(-1, sizes.together, *pixels.shape[1:])
    merged = np.stack([groups[:, place, :, :, place] for place in range(sizes.together)], 3)
    _, rows, columns = (int(each) for each in made["image_grid_thw"][0])
    grid = np.array([[len(groups), rows, columns]], dtype=np.int64)
    return {"pixel_values_videos": merged.reshape(-1, made["pixel_values"].shape[-1]), "video_grid_thw": grid}


def _limits(settings: Mapping[str, Any], least: int, most: int) -> tuple[int, int]:
    """Return the fewest and most pixels by the settings, which have them in a size or by themselves."""
    size = settings.get("size") or {}
    found = (
        settings.get("min_pixels") or size.get("shortest_edge"),
        settings.get("max_pixels") or size.get("longest_edge"),
    )
    return int(found[0] or least), int(found[1] or most)


def _fitted(height: int, width: int, step: int, frames: tuple[int, int], limits: tuple[int, int]) -> tuple[int, int]:
    """Return height and width, multiples of `step`, of frames that have so many pixels together.

    frames: how many there are, and how many count where the sizes are rounded.
    """
    if min(height, width) < step:
        scale = max(step / height, step / width)
        height, width = int(height * scale), int(width * scale)
    rounded = max(step, round(height / step) * step), max(step, round(width / step) * step)
    pixels, (least, most) = frames[1] * rounded[0] * rounded[1], limits
    if least <= pixels <= most:
        return rounded
    bound, cut = (most, math.floor) if pixels > most else (least, math.ceil)
    ratio = math.sqrt(bound / (frames[0] * height * width))
    return max(step, cut(height * ratio / step) * step), max(step, cut(width * ratio / step) * step)


def _qwen2(
    context: Context, token: int, settings: Mapping[str, Any], images: ImageArrays, video: Video
) -> WrittenVideo:
    """Return all vectors in one span; their positions in time are seconds times a number of the config."""
    sizes, frame = _Sizes.of(context), video.frames[0]
    limits = _limits(settings, 128 * sizes.step**2, 768 * sizes.step**2)
    height, width = _fitted(frame.height, frame.width, sizes.step, (1, 1), limits)
    arrays = _qwen_arrays(sizes, images, video, height, width)
    count, rows, columns = (int(each) for each in arrays["video_grid_thw"][0])
    grid = rows // sizes.merge, columns // sizes.merge
    vision, interval, per_second = context.config.section("vision_config") or context.config, 1.0, 1
    model_type = context.config.values.get("model_type")
    if model_type == "qwen2_5_vl":
        interval = vision.positive("tokens_per_second", 4) * sizes.together / video.sampled_fps
    elif model_type in _FRAMES_PER_SECOND:
        per_second = context.config.positive("position_id_per_seconds", 25)
        interval = sizes.together / (video.sampled_fps if video.is_timed else _FRAMES_PER_SECOND[model_type])
    # parts of a position, which transformers' Qwen3-Omni computes with, are left out, as vLLM does
    times = tuple(int(np.float32(each) * np.float32(interval) * np.float32(per_second)) for each in range(count))
    return WrittenVideo([token] * (count * grid[0] * grid[1]), arrays, grid, times)


def _qwen3(
    context: Context, token: int, settings: Mapping[str, Any], images: ImageArrays, video: Video
) -> WrittenVideo:
    """Return a span for each two frames, after their time in words."""
    arrays, grid = _timed(context, _limits(settings, 128 * 1024, 768 * 1024), images, video)
    begin, end = (context.config.positive(f"vision_{name}_token_id") for name in ("start", "end"))
    vectors = [begin, *[token] * (grid[0] * grid[1]), end]
    written: list[int] = []
    for first, last in video.times(_Sizes.of(context).together):
        written += [*context.encode(f"<{(first + last) / 2:.1f} seconds>"), *vectors]
    return WrittenVideo(written, arrays, grid, replaces=(begin, end))


def _glm(
    context: Context,
    token: int,
    settings: Mapping[str, Any],
    images: ImageArrays,
    video: Video,
    *,
    stamp: Callable[[float], str] = lambda seconds: str(int(seconds)),
) -> WrittenVideo:
    """Return a span for each two frames, written as an image, then the seconds of the first one, as `stamp` writes
    them: whole ones unless given."""
    arrays, grid = _timed(context, _limits(settings, 112 * 112, 28 * 28 * 2 * 30000), images, video)
    begin, end = (context.config.positive(f"image_{name}_token_id") for name in ("start", "end"))
    vectors = [begin, *[token] * (grid[0] * grid[1]), end]
    written: list[int] = []
    for first, _ in video.times(_Sizes.of(context).together):
        written += [*vectors, *context.encode(stamp(first))]
    return WrittenVideo(written, arrays, grid)


def _minimax(
    context: Context, token: int, settings: Mapping[str, Any], images: ImageArrays, video: Video
) -> WrittenVideo:
    """Return a span for each two frames, written as an image, after its seconds where they are known. The encoder reads
    a few spans at once."""
    sizes, frame = _Sizes.of(context), video.frames[0]
    limits = _limits({**settings, "size": None}, 4 * 28 * 28, 768 * 28 * 28)
    height, width = _fitted(frame.height, frame.width, sizes.step, (1, 1), limits)
    arrays = _qwen_arrays(sizes, images, video, height, width)
    count, rows, columns = (int(each) for each in arrays["video_grid_thw"][0])
    most = settings.get("vision_segment_max_frames", 4) or count
    parts = [(min(most, count - start), rows, columns) for start in range(0, count, most)]
    begin, end = (context.encode(f"]<]{each} of image[>[") for each in ("start", "end"))
    vectors = [*begin, *[token] * (rows * columns // sizes.merge**2), *end]
    written: list[int] = []
    for first, _ in video.times(sizes.together):
        written += [*(context.encode(f"]<]{first:.1f} seconds[>[") if video.is_timed else ()), *vectors]
    return WrittenVideo(written, {**arrays, "video_grid_thw": np.array(parts, np.int64)})


def _muse(context: Context, token: int, settings: Mapping[str, Any], images: ImageArrays, video: Video) -> WrittenVideo:
    """Return a span for each two frames, after their time in words, with a token between two spans."""
    vision = context.config.section("vision_config") or context.config
    merge = vision.positive("merge_size", 2)
    sizes = _Sizes(vision.positive("patch_size", 14), merge, vision.positive("patch_temporal", 2))
    most = int(settings.get("max_video_frame_tokens") or 144)
    arrays = _patches(sizes, images, video.frames, 1, max_image_tokens=most)
    _, rows, columns = (int(each) for each in arrays["video_grid_thw"][0])
    begin, between, end = (context.encode(f"<|vid_{each}|>") for each in ("start", "frame_separator", "end"))
    groups = [
        [*context.encode(f"Time: {first:.1f}s"), *[token] * (rows * columns // merge**2)]
        for first, _ in video.times(sizes.together)
    ]
    spans = [part for group in groups for part in (group, between)][:-1]
    return WrittenVideo([*begin, *(each for part in spans for each in part), *end], arrays)


def _ernie(
    context: Context, token: int, settings: Mapping[str, Any], images: ImageArrays, video: Video
) -> WrittenVideo:
    """Return all vectors in one span, each of two frames, on which their time is drawn."""
    frame, frames = video.frames[0], video.frames
    if settings.get("draw_on_frames", True):
        frames = stamped(frames, [place / video.fps for place in video.indices], context.path / _font(settings))
    frames = [*frames, *frames[-1:] * (len(frames) % _ERNIE_TOGETHER)]
    sizes = _Sizes.of(context)
    limits = _limits({"size": settings.get("size")}, 299 * 28 * 28, 1196 * 28 * 28)
    height, width = _fitted(frame.height, frame.width, sizes.step, (1, 1), limits)
    made = images(*(each.resize((width, height), 3) for each in frames), do_resize=False)  # bicubic
    _, rows, columns = (int(each) for each in made["image_grid_thw"][0])
    arrays = {
        "pixel_values_videos": made["pixel_values"],
        "video_grid_thw": np.array([[len(frames), rows, columns]], np.int64),
    }
    grid, count = (rows // sizes.merge, columns // sizes.merge), len(frames) // _ERNIE_TOGETHER
    return WrittenVideo([token] * (count * grid[0] * grid[1]), arrays, grid, tuple(range(count)))


def _font(settings: Mapping[str, Any]) -> str:
    return Path(str(settings.get("font") or "Roboto-Regular.ttf")).name


def _check_ernie(settings: Section, path: Path) -> str | None:
    if settings.values.get("temporal_patch_size", _ERNIE_TOGETHER) != _ERNIE_TOGETHER:  # the settings of images
        return "there is no video_preprocessor_config.json"
    for name in ("shortest_edge", "longest_edge"):
        (settings.section("size") or settings).optional_positive(name)
    if not settings.bool("draw_on_frames", True):
        return None
    file = path / _font(settings.values)
    if not file.is_file():
        return f"there is no {file.name}, the font in which the time is drawn on frames; put it into the folder"
    check_font(file)
    return None


def _check_minimax(settings: Section, path: Path) -> None:
    for name in ("min_pixels", "max_pixels", "vision_segment_max_frames"):
        settings.optional_positive(name)


def _check_muse(settings: Section, path: Path) -> None:
    settings.optional_positive("max_video_frame_tokens")
    words = "Time: {timestamp:.1f}s"
    settings.expect("frame_timestamp_format", words, default=words)


def _timed(
    context: Context, limits: tuple[int, int], images: ImageArrays, video: Video
) -> tuple[Arrays, tuple[int, int]]:
    """Return the arrays of a video whose frames have so many pixels together, and rows and columns of its spans."""
    sizes, frame, count = _Sizes.of(context), video.frames[0], len(video.frames)
    frames = count, max(1, round(count / sizes.together)) * sizes.together
    height, width = _fitted(frame.height, frame.width, sizes.step, frames, limits)
    arrays = _qwen_arrays(sizes, images, video, height, width)
    _, rows, columns = (int(each) for each in arrays["video_grid_thw"][0])
    return arrays, (rows // sizes.merge, columns // sizes.merge)


_ERNIE_TOGETHER: Final = 2
"""Number of frames that become vectors together."""
_FRAMES_PER_SECOND: Final = {"qwen2_5_omni_thinker": 2.0, "qwen3_omni_moe_thinker": 1.0}
"""Assumed frames per second by `model_type`, where a video states none, as in transformers' processors."""
_VIDEO: Final = ("video_token_id", "video_token_index")
_GLM: Final = VideoWriter(_VIDEO, ("image_token_id",), _glm)

VIDEO_WRITERS: Final[Mapping[str, VideoWriter]] = {
    "ernie": VideoWriter(_VIDEO, _VIDEO, _ernie, _check_ernie),
    "glm": _GLM,
    "glm46": _GLM._replace(write=partial(_glm, stamp="{:.1f} seconds".format)),
    "minimax": VideoWriter(_VIDEO, _VIDEO, _minimax, _check_minimax),
    "muse": VideoWriter(_VIDEO, _VIDEO, _muse, _check_muse),
    "qwen2": VideoWriter(_VIDEO, _VIDEO, _qwen2),
    "qwen3": VideoWriter(_VIDEO, _VIDEO, _qwen3),
}
"""The writers by `videos` of a `MediaFamily`."""
