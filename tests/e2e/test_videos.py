"""Models that read videos: what transformers computes, with the same bits whatever runs beside a request."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ImageFont

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.images import image_settings
from octavo.core.outputs import RequestOutput
from octavo.errors import CheckpointError, InvalidRequest, UnsupportedModel
from octavo.multimodal.image_prompts import ImagePrompts
from octavo.multimodal.processors.stamped_frames import stamped, time_in_words
from tests.e2e.test_images import assert_agrees, bits, generate
from tests.fakes.vision import image, load_vision_oracle, make_vision_checkpoint
from tests.fakes.vision_families import FAMILIES
from tests.fakes.vision_sizes import END, IMAGE, SPECIALS, START, VIDEO

pytestmark = pytest.mark.slow

BEGIN, BEHIND = (SPECIALS.index(each) for each in ("<img>", "</img>"))
"""Around images of GLM."""
FRAMES = [image(seed, 112, 56) for seed in range(5)]
VIDEOS: list[Any] = [(FRAMES, {"fps": 8}), [*FRAMES[:2]]]
"""Where a video is longer than its sides, transformers 5 goes on behind the sides; octavo behind the end, as releases
before it and vLLM do, and as transformers itself does for the tokens that it generates."""
PROMPTS: list[Any] = [
    {"prompt": "w1 <start> <video> <end> w2 w3", "multi_modal_data": {"video": VIDEOS[0]}},
    {
        "prompt": "w1 <start> <image> <end> w2 <start> <video> <end> w4 <start> <video> <end> w7",
        "multi_modal_data": {"image": image(9), "video": VIDEOS},
    },
    "w1 w2 w3",
]


SETTINGS: dict[str, Any] = {
    "ernie4_5_vl": {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 8}},
    "minimax_m3": {"vision_segment_max_frames": 2},
    "muse_glimmer": {"max_video_frame_tokens": 4},
}
"""Of videos: small frames, few parts that are read at once, and few tokens of a frame."""


@pytest.fixture(
    scope="module",
    params=[
        *("ernie4_5_vl", "glm4v", "minimax_m3", "muse_glimmer", "qwen2_5_vl", "qwen3_vl"),
        pytest.param("qwen3_5", marks=pytest.mark.long),
    ],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, made(request.param, tmp_path_factory.mktemp(request.param))


def made(family: str, path: Path) -> Path:
    return with_videos(family, make_vision_checkpoint(family, path))


def with_videos(family: str, path: Path) -> Path:
    """Write what a checkpoint needs to read videos beside what it has for images."""
    if family in SETTINGS:
        (path / "video_preprocessor_config.json").write_text(json.dumps(SETTINGS[family]))
    if family == "ernie4_5_vl":
        write_font(path)
    return path


def write_font(path: Path) -> None:
    """Write the font that Pillow has within itself under the name that the release has."""
    (path / "Roboto-Regular.ttf").write_bytes(ImageFont.load_default(10).path.getvalue())  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def expected(checkpoint: tuple[str, Path]) -> list[RequestOutput]:
    return generate(checkpoint[1], PROMPTS, num_gpu_blocks_override=128)


def prompts_of(path: Path) -> ImagePrompts:
    opened = Checkpoint.open(path)
    settings = image_settings(opened)
    assert settings is not None
    return ImagePrompts(opened, settings, lambda _: [], {"image": 16, "video": 2})


def arrays_of(path: Path, prompt: Any) -> dict[str, torch.Tensor]:
    """Return what the encoder reads, in one array for all images and all videos."""
    given = prompt["multi_modal_data"]
    videos = given["video"] if isinstance(given["video"], list) else [given["video"]]
    markers = [IMAGE] * ("image" in given) + [VIDEO] * len(videos)
    _, media = prompts_of(path).expand(markers, given)
    found: dict[str, list[torch.Tensor]] = {}
    for each in media:
        for name, array in each.arrays.items():
            values = torch.from_numpy(np.frombuffer(array.data, array.dtype).reshape(array.shape).copy())
            found.setdefault(name, []).append(values)
    return {name: torch.cat(values) for name, values in found.items()}


def test_logprobs_are_those_of_transformers(checkpoint: tuple[str, Path], expected: list[RequestOutput]) -> None:
    family, path = checkpoint
    oracle = load_vision_oracle(path, FAMILIES[family][1])
    # transformers' GLM, whose videos consist of tokens of images, takes no images beside them
    for prompt, output in zip(PROMPTS[: 1 if family == "glm4v" else 2], expected, strict=False):
        drawn = list(output.outputs[0].token_ids)
        ids = torch.tensor([[*output.prompt_token_ids, *drawn]])
        kinds = (ids == IMAGE).int() * (2 if family == "glm4v" else 1) + 2 * (ids == VIDEO).int()
        kinds[:, len(output.prompt_token_ids) :] = 0
        seconds = [2 / 8, 2 / 24] if family == "qwen2_5_vl" else None
        more = {} if seconds is None else {"second_per_grid_ts": torch.tensor(seconds)}
        if family == "ernie4_5_vl":  # whose experts of images compute the tokens around one, too
            around = torch.nn.functional.max_pool1d(kinds[None].float(), 3, 1, 1)[0].int()
            more["moe_mm_token_type_ids"] = around
        with torch.inference_mode():
            logits = oracle(input_ids=ids, mm_token_type_ids=kinds, **arrays_of(path, prompt), **more).logits[0]
        assert_agrees(output, drawn, logits)


def test_frames_are_patches_in_pairs(checkpoint: tuple[str, Path]) -> None:
    """Of two frames each patch has the pixels of both, channel by channel, in the order of transformers."""
    family, path = checkpoint
    whole = arrays_of(path, PROMPTS[0])
    if family == "ernie4_5_vl":  # whose vectors are of two patches
        frames, rows, columns = whole["video_grid_thw"][0].tolist()
        patches = whole["pixel_values_videos"].view(frames, rows * columns, -1)
        assert (frames, torch.equal(patches[4], patches[5])) == (6, True)
        return
    counts, (_, rows, columns) = whole["video_grid_thw"][:, 0].tolist(), whole["video_grid_thw"][0].tolist()
    assert (counts, len(whole["pixel_values_videos"])) == (
        [2, 1] if family == "minimax_m3" else [3],
        3 * rows * columns,
    )
    channels = 1 if family == "muse_glimmer" else 3  # whose patches have one frame behind the other
    patches = whole["pixel_values_videos"].view(3, rows * columns, channels, 2, -1)
    assert torch.equal(patches[2, :, :, 0], patches[2, :, :, 1])  # the last frame is repeated
    assert not torch.equal(patches[0, :, :, 0], patches[0, :, :, 1])


@pytest.mark.parametrize(
    ("family", "fps", "texts", "written"),
    [
        ("qwen3_vl", 8, ["<0.1 seconds>", "<0.3 seconds>", "<0.5 seconds>"], [*[99, START, VIDEO, END] * 3]),
        (
            *("minimax_m3", 4),
            ["]<]start of image[>[", "]<]end of image[>[", *(f"]<]{each} seconds[>[" for each in (0.0, 0.5, 1.0))],
            [START, *[99, VIDEO] * 3, 99, END],
        ),
        (
            *("muse_glimmer", 4),
            [
                "<|vid_start|>",
                "<|vid_frame_separator|>",
                "<|vid_end|>",
                *(f"Time: {each}s" for each in (0.0, 0.5, 1.0)),
            ],
            [START, *[99, VIDEO] * 3, 99, END],
        ),
        ("glm4v", 1.5, ["0", "1", "2"], [START, *[BEGIN, IMAGE, BEHIND, 99] * 3, END]),
        *(
            (
                *(family, 1.5),
                [f"{seconds} seconds" for seconds in (0.0, 1.3, 2.7)],
                [START, *[BEGIN, IMAGE, BEHIND, 99] * 3, END],
            )
            for family in ("glm46v", "glm_ocr")
        ),
    ],
)
def test_timestamps_stand_beside_the_frames_of_a_video_where_the_family_writes_them(
    family: str, fps: float, texts: list[str], written: list[int], tmp_path: Path
) -> None:
    path = made(family, tmp_path)
    seen: list[str] = []
    prompts = prompts_of(path)
    prompts._context = prompts._context._replace(encode=lambda text: seen.append(text) or [99])  # type: ignore[func-returns-value]
    tokens, (video,) = prompts.expand([50, START, VIDEO, END, 51], {"video": (FRAMES, {"fps": fps})})
    assert seen == texts
    assert [token for token, _ in groupby(tokens)] == [50, *written, 51]
    assert len(video.spans) == 3


@pytest.mark.parametrize(
    "args",
    [
        pytest.param({"max_num_batched_tokens": 5}, marks=pytest.mark.long),
        {"num_gpu_blocks_override": 12, "max_num_batched_tokens": 19},
    ],
    ids=str,
)
def test_the_same_bits_in_any_schedule(
    checkpoint: tuple[str, Path], expected: list[RequestOutput], args: dict[str, Any]
) -> None:
    found = bits(generate(checkpoint[1], PROMPTS * 2, **{"num_gpu_blocks_override": 128, **args}))
    assert found == bits(expected) * 2


def test_more_videos_than_a_prompt_may_have_and_models_without_videos_are_refused(
    checkpoint: tuple[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match="has 0 placeholders for videos, but 1 video came"):
        prompts_of(checkpoint[1]).expand([1], {"video": VIDEOS[0]})
    with pytest.raises(InvalidRequest, match="the prompt has 3 videos, must have at most 2"):
        prompts_of(checkpoint[1]).expand([VIDEO] * 3, {"video": VIDEOS[:1] * 3})
    assert prompts_of(make_vision_checkpoint("llava", tmp_path)).kinds == {"image"}


@pytest.mark.parametrize(
    ("family", "settings", "said"),
    [
        ("minimax_m3", {"vision_segment_max_frames": 0}, "vision_segment_max_frames is 0"),
        ("muse_glimmer", {"max_video_frame_tokens": -1}, "max_video_frame_tokens is -1"),
        ("muse_glimmer", {"frame_timestamp_format": "{timestamp}"}, r'expected "Time: \{timestamp:.1f\}s"'),
    ],
)
def test_settings_with_which_no_video_is_read_are_refused_when_the_model_is_loaded(
    family: str, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = make_vision_checkpoint(family, tmp_path)
    (path / "video_preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises((CheckpointError, UnsupportedModel), match=said):
        generate(path, ["w1"])


def test_the_time_is_drawn_on_frames_in_the_font_of_the_checkpoint(tmp_path: Path) -> None:
    assert [time_in_words(each) for each in (0.0, 61.25, 3725.5)] == [
        *("time: 00:00:00.00", "time: 00:01:01.25", "time: 01:02:05.50")
    ]
    path = made("ernie4_5_vl", tmp_path)
    frames = [image(7, 280, 140)] * 3
    first, second, third = (np.asarray(each) for each in stamped(frames, [0.0, 0.0, 0.5], path / "Roboto-Regular.ttf"))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, third)
    changed = np.argwhere((first != np.asarray(frames[0])).any(2)).max(0)
    assert changed[0] <= 20  # a line of letters of 14 pixels in the corner above
    assert 60 <= changed[1] <= 200
    drawn = arrays_of(path, PROMPTS[0])
    (path / "video_preprocessor_config.json").write_text(
        json.dumps(SETTINGS["ernie4_5_vl"] | {"draw_on_frames": False})
    )
    plain = arrays_of(path, PROMPTS[0])
    assert torch.equal(drawn["video_grid_thw"], plain["video_grid_thw"])
    assert not torch.equal(drawn["pixel_values_videos"], plain["pixel_values_videos"])


def test_without_the_font_and_with_a_damaged_one(tmp_path: Path) -> None:
    path = made("ernie4_5_vl", tmp_path)
    small = {"prompt": "<video>", "multi_modal_data": {"video": [image(1, 9, 40)]}}
    refused, text = generate(path, [small, PROMPTS[2]])
    assert refused.error is not None
    assert "frames of 9 x 40 pixels, each side must have at least 10" in refused.error.message
    font = bytearray((path / "Roboto-Regular.ttf").read_bytes())
    entry = font.index(b"glyf")  # its outlines are read when they are drawn
    start, size = (int.from_bytes(font[entry + at : entry + at + 4], "big") for at in (8, 12))
    font[start : start + size] = b"\x7f" * size
    for damaged in (b"no font", bytes(font)):
        (path / "Roboto-Regular.ttf").write_bytes(damaged)
        with pytest.raises(CheckpointError, match="is no font"):
            generate(path, PROMPTS[2:])
    (path / "Roboto-Regular.ttf").unlink()
    refused, again = generate(path, [PROMPTS[0], PROMPTS[2]])
    assert refused.error is not None
    assert "this model reads text and images" in refused.error.message
    assert bits([again]) == bits([text])


def test_a_video_that_lasts_longer_than_the_context_is_refused_and_harms_nobody(tmp_path: Path) -> None:
    """Its few tokens would stand at positions for which no turn is computed."""
    path = make_vision_checkpoint("qwen2_5_vl", tmp_path)
    prompts: list[Any] = [
        {"prompt": "w1 <start> <video> <end> w2 w3", "multi_modal_data": {"video": (FRAMES, {"fps": fps})}}
        for fps in (8, 0.001, 0.1)
    ]
    length = 400
    found = generate(path, prompts, num_gpu_blocks_override=128, max_model_len=length)
    assert [output.error is None for output in found] == [True, False, True]
    error = found[1].error
    assert error is not None
    assert "the prompt has 29 tokens and its videos last" in error.message
    assert "maximum context length is 400" in error.message
    (completion,) = found[2].outputs
    assert len(completion.token_ids) == len(found[0].outputs[0].token_ids)
