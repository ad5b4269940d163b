"""Models that read images: what transformers computes, with the same bits whatever runs beside a request."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.config.checkpoint import Checkpoint
from octavo.config.media.images import image_settings
from octavo.core.outputs import RequestOutput
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError
from octavo.models.loader import LoadedModel
from octavo.multimodal.image_prompts import ImagePrompts
from octavo.worker.prompt_encodings import kept_encodings_bytes
from tests.fakes.hearing import make_hearing_checkpoint
from tests.fakes.rank_threads import llm_of_ranks
from tests.fakes.vision import image, load_vision_oracle, make_vision_checkpoint
from tests.fakes.vision_families import FAMILIES
from tests.fakes.vision_sizes import END, IMAGE, START

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, ignore_eos=True)
PROMPTS: list[Any] = [
    {"prompt": "w1 <image> w2 w3", "multi_modal_data": {"image": image(0)}},
    {"prompt": "w1 <image> w2 <image> w7", "multi_modal_data": {"image": [image(1, 70, 90), image(0)]}},
    {"prompt": "<image> w5", "multi_modal_data": {"image": [image(2, 40, 40)]}},
    "w1 w2 w3",
]


TOKENS = {"gemma3": START, "minicpmv4_6": START}
"""What stands for vectors, where it is another token than `IMAGE`."""
WIDEST = {"gemma3": 16, "gemma4": 70, "molmo2": 64, "paligemma": 40, "deepseek_ocr": 40, "deepseek_ocr2": 144}
"""The most tokens that a step computes together."""
MANY_BLOCKS = ("deepseek_ocr2", "glm5", "lfm", "minicpm", "nemotron", "qwen3_5")
"""Families with states, which take blocks of their own, and one with large images."""
LEVELS = {"granite4_vision": 5, "mllama": 0, "qwen3_vl": 3}
"""Vectors that are kept for each token of an image, where that is not one."""
WHOLE = (
    *("blip_2", "ernie4_5_vl", "gemma3", "gemma4", "llava", "mllama", "molmo2", "paligemma", "phi4_multimodal"),
    "qwen3_vl",
)
"""Families whose ranks are compared with one rank."""
ONE_IMAGE = ("blip_2", "molmo2")
"""Families whose prompts have one image."""
QUICK = ("gemma3", "mllama", "paligemma", "qwen3_vl")
"""Families that are run in every way each time: one for each way in which images enter a model. Of the others, which
share their parts, some ways are run with -m long."""


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, make_vision_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=() if each in QUICK else pytest.mark.long) for each in sorted(FAMILIES)],
)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A checkpoint, and the bits of `PROMPTS`."""
    path = make_vision_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    return path, bits(generate(path, PROMPTS))


def generate(path: Path, prompts: list[Any], params: SamplingParams = PARAMS, **args: Any) -> list[RequestOutput]:
    llm = LLM(str(path), **{"dtype": "float32", "num_gpu_blocks_override": 64, "max_num_seqs": 4, **args})
    try:
        return llm.generate(marked(path, prompts), params)
    finally:
        llm.close()


def marked(path: Path, prompts: list[Any]) -> list[Any]:
    """Return prompts with the word that stands for an image in a model where <image> is what begins one."""
    words = {"minicpm": "<start>", "llama4": "<|image|>", "molmo2": "<|image|>"}
    word = next((word for name, word in words.items() if path.name.startswith(name)), "<image>")
    if path.name.startswith(ONE_IMAGE):
        prompts = [first_image(each) for each in prompts]
    return [
        {**each, "prompt": each["prompt"].replace("<image>", word)} if isinstance(each, dict) else each
        for each in prompts
    ]


def first_image(prompt: Any) -> Any:
    """Return a prompt with the first of its images alone, for a model that reads no more."""
    given = prompt["multi_modal_data"]["image"] if isinstance(prompt, dict) else None
    if not isinstance(given, list):
        return prompt
    text, *rest = prompt["prompt"].split("<image>")
    return {"prompt": "<image>".join((text, "".join(rest))), "multi_modal_data": {"image": given[:1]}}


def bits(outputs: list[RequestOutput]) -> list[Any]:
    return [[(each.token_ids, each.logprobs) for each in output.outputs] for output in outputs]


def assert_agrees(output: RequestOutput, drawn: list[int], logits: torch.Tensor) -> None:
    """The greedy tokens and their log-probabilities are those of transformers' logits, [tokens, vocabulary]."""
    wanted = logits[len(output.prompt_token_ids) - 1 : -1].log_softmax(-1)
    assert wanted.argmax(-1).tolist() == drawn != []
    for row, found in zip(wanted, output.outputs[0].logprobs or [], strict=False):
        for token_id, each in found.items():
            assert abs(each.logprob - float(row[token_id])) <= 1e-5 * max(1.0, float(logits.abs().max()))


@pytest.fixture(scope="module")
def expected(checkpoint: tuple[str, Path]) -> list[RequestOutput]:
    return generate(checkpoint[1], PROMPTS)


def test_logprobs_are_those_of_transformers(checkpoint: tuple[str, Path], expected: list[RequestOutput]) -> None:
    family, path = checkpoint
    oracle = load_vision_oracle(path, FAMILIES[family][1])
    checkpoint_of_it = Checkpoint.open(path)
    settings = image_settings(checkpoint_of_it)
    assert settings is not None
    processor = ImagePrompts(checkpoint_of_it, settings, lambda _: [], {"image": 16})
    for prompt, output in zip(marked(path, PROMPTS[:3]), expected, strict=False):
        given = prompt["multi_modal_data"]["image"]
        arrays = processor.arrays(*(given if isinstance(given, list) else [given]))
        inputs: dict[str, Any] = {
            name: torch.from_numpy(arrays[name]) for name in processor.writer.reads if name in arrays
        }
        drawn = list(output.outputs[0].token_ids)
        token = TOKENS.get(family, IMAGE)
        standing = {token, *processor.writer.others(checkpoint_of_it.stored)}  # for vectors of an image there
        drawn = drawn[: next((place for place, each in enumerate(drawn) if each in standing), None)]
        ids = [*output.prompt_token_ids, *drawn]
        if "image_grid_thw" in inputs or "image_position_ids" in inputs:
            inputs["mm_token_type_ids"] = (torch.tensor([ids]) == token).int()
        if family == "deepseek_ocr":
            inputs |= {each: inputs[each].tolist() for each in ("num_local_patches", "patches_grid")}
        if family == "ernie4_5_vl":  # what is drawn is text, whatever it is
            is_prompt = torch.arange(len(ids)) < len(output.prompt_token_ids)
            of_images = torch.isin(torch.tensor(ids), torch.tensor([IMAGE, START, END]))
            inputs["moe_mm_token_type_ids"] = (of_images & is_prompt).int()[None]
        if family == "molmo2":
            of_images = torch.isin(torch.tensor(ids), torch.tensor([IMAGE, START, END, 10, 11]))
            is_prompt = torch.arange(len(ids)) < len(output.prompt_token_ids)
            inputs["mm_token_type_ids"] = (of_images & is_prompt).int()[None]
        if family == "paligemma":
            inputs["token_type_ids"] = (torch.arange(len(ids)) >= len(output.prompt_token_ids)).int()[None]
        if family == "gemma3":  # under its older name
            inputs["token_type_ids"] = (torch.tensor([ids]) == token).int()
        if family == "mllama":
            inputs["cross_attention_mask"] = cross_mask(ids, arrays["num_tiles"].reshape(-1).tolist())
        with torch.inference_mode():
            logits = oracle(input_ids=torch.tensor([ids]), **inputs).logits[0]
        assert_agrees(output, drawn, logits)


def cross_mask(ids: list[int], num_tiles: list[int]) -> torch.Tensor:
    """Return which tokens see which tiles of images, as transformers writes it."""
    from transformers.models.mllama import processing_mllama as of_mllama

    seen = of_mllama.get_cross_attention_token_mask(ids, IMAGE)
    dense = of_mllama.convert_sparse_cross_attention_mask_to_dense([seen], [num_tiles], 4, len(ids))
    return torch.from_numpy(dense)


@pytest.mark.parametrize(
    "checkpoint",
    [
        pytest.param(each, marks=[pytest.mark.long] * (not each.startswith((*QUICK, *WIDEST, *LEVELS, *MANY_BLOCKS))))
        for each in sorted(FAMILIES)
    ],
    indirect=True,
)
def test_a_cut_within_images_changes_no_bit(checkpoint: tuple[str, Path], expected: list[RequestOutput]) -> None:
    family, path = checkpoint
    cut = bits(generate(path, PROMPTS * 2, max_num_batched_tokens=WIDEST.get(family, 4) + 1))
    assert cut == bits(expected) * 2


@pytest.mark.parametrize(
    "args",
    [
        {"max_num_seqs": 1},
        {"num_gpu_blocks_override": 9, "max_num_batched_tokens": 19},
        {"num_gpu_blocks_override": 9, "preemption_mode": "swap"},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_the_same_bits_in_any_schedule(whole: tuple[Path, list[Any]], args: dict[str, Any]) -> None:
    if "max_num_batched_tokens" in args:
        widest = next((tokens for family, tokens in WIDEST.items() if whole[0].name.startswith(family)), 0)
        args = {**args, "max_num_batched_tokens": max(19, widest + 5)}
    if whole[0].name.startswith("deepseek_ocr2") and "num_gpu_blocks_override" in args:
        args = {**args, "num_gpu_blocks_override": 40}  # an image takes several times 144 tokens
    assert bits(generate(whole[0], PROMPTS * 2, **args)) == whole[1] * 2


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[pytest.mark.long] * (each != "gemma4")) for each in WHOLE]
)
def test_two_ranks_give_the_bits_of_one(family: str, tmp_path: Path) -> None:
    path = make_vision_checkpoint(family, tmp_path)
    one = bits(generate(path, PROMPTS * 2))
    if family == "qwen3_vl":  # whose ranks get the images in another process
        assert bits(generate(path, PROMPTS * 2, tensor_parallel_size=2)) == one
        return
    with llm_of_ranks(path, 2, dtype="float32", num_gpu_blocks_override=64, max_num_seqs=4) as llm:
        assert bits(llm.generate(marked(path, PROMPTS * 2), PARAMS)) == one


def test_the_bits_do_not_depend_on_the_number_of_threads(whole: tuple[Path, list[Any]]) -> None:
    assert bits(generate(whole[0], PROMPTS, threads=2)) == whole[1]  # of one thread


def test_several_outputs_of_one_image_are_those_of_it_alone(whole: tuple[Path, list[Any]]) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=9, logprobs=1, ignore_eos=True)
    few = 48 if whole[0].name.startswith(MANY_BLOCKS) else 16
    together = generate(whole[0], PROMPTS, params, num_gpu_blocks_override=few)
    with LLM(str(whole[0]), dtype="float32", num_gpu_blocks_override=64, enable_prefix_caching=False) as llm:
        alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in marked(whole[0], PROMPTS)]
    assert bits(together) == bits(alone)


def test_the_same_image_hits_the_prefix_cache_and_another_does_not(whole: tuple[Path, list[Any]]) -> None:
    def prompt(seed: int) -> Any:
        words = " ".join(f"w{number}" for number in range(40))
        return {"prompt": f"w1 <image> {words}", "multi_modal_data": {"image": image(seed)}}

    llm = LLM(str(whole[0]), dtype="float32", num_gpu_blocks_override=64)
    try:
        first, again, other = (llm.generate(marked(whole[0], [prompt(seed)]), PARAMS)[0] for seed in (0, 0, 1))
    finally:
        llm.close()
    assert again.num_cached_tokens >= (
        32 if any(each in whole[0].name for each in ("glm5", "lfm3", "mllama", "qwen3_5")) else 41
    )  # states are kept at some places, and one prompt has fewer tokens
    assert other.num_cached_tokens < 16
    assert bits([again]) == bits([first]) != bits([other])


@pytest.mark.parametrize("device", ["auto", "reference"])
def test_a_prompt_that_hits_the_cache_within_an_image_gives_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, device: str
) -> None:
    path = make_vision_checkpoint("gemma3", tmp_path_factory.mktemp("gemma3"))
    words = ["w1", "w1 w2 w3 w4 w5", "w1 w2 w3 w4 w5 w6 w7 w8 w9"]
    prompts: list[Any] = [
        {"prompt": f"{each} <image>", "multi_modal_data": {"image": image(4, 60, 60)}} for each in words
    ]
    llm = LLM(str(path), dtype="float32", num_gpu_blocks_override=64, device=device)
    try:
        first, again = llm.generate(prompts, PARAMS), llm.generate(prompts, PARAMS)
    finally:
        llm.close()
    assert min(each.num_cached_tokens for each in again) >= 16  # of images that begin before that, and end behind it
    assert bits(first) == bits(again)
    args = {"max_num_batched_tokens": 19, "enable_prefix_caching": False}
    assert bits(generate(path, prompts, device=device, **args)) == bits(first)


def test_prompts_that_see_all_of_themselves_share_nothing_with_longer_ones(tmp_path: Path) -> None:
    path, words = make_vision_checkpoint("paligemma", tmp_path), " ".join(f"w{number}" for number in range(30))
    texts = [f"<image> {words}", f"<image> {words} w1", words, f"{words} w1"]
    prompts: list[Any] = [
        {"prompt": each, "multi_modal_data": {"image": [image(0)] * each.count("<image>")}} for each in texts
    ]
    with LLM(str(path), dtype="float32", num_gpu_blocks_override=64) as llm:
        after_others = [llm.generate(prompt, PARAMS)[0] for prompt in prompts]
    assert [each.num_cached_tokens for each in after_others] == [0] * 4
    assert bits(after_others) == bits(generate(path, prompts, enable_prefix_caching=False))
    [without] = generate(path, prompts[3:], limit_mm_per_prompt={"image": 0})
    assert bits([without]) == bits(after_others[3:])


def test_a_prompt_that_sees_all_of_itself_fits_a_step_or_is_refused(tmp_path: Path) -> None:
    args: Any = {"max_num_batched_tokens": 41, "max_num_seqs": 4, "enable_prompt_embeds": True}
    path, long = make_vision_checkpoint("paligemma", tmp_path), "w1 " * 60
    with LLM(str(path), dtype="float32", num_gpu_blocks_override=64, **args) as llm:
        for given in ({"prompt_embeds": torch.zeros(42, 32)}, long):
            (refused,) = llm.generate([given], PARAMS)
            assert refused.error is not None
            assert "a step has at most 41; shorten it" in refused.error.message
        assert llm.generate([{"prompt_embeds": torch.ones(41, 32)}], PARAMS)[0].outputs


def test_neighbours_are_seen_together_and_others_hide_those_before_them(tmp_path: Path) -> None:
    path = make_vision_checkpoint("mllama", tmp_path)
    seen = [image(0), image(1, 70, 90), image(2, 30, 90)]
    prompts: list[Any] = [
        {"prompt": "w1 <image> <image> w2 w3", "multi_modal_data": {"image": seen[:2]}},
        {"prompt": "w1 <image> <image> w2 <image> w3", "multi_modal_data": {"image": seen}},
        {"prompt": "w1 <image> w2 <image> <image> w3", "multi_modal_data": {"image": seen}},
    ]
    oracle = load_vision_oracle(path, "MllamaForConditionalGeneration")
    settings = image_settings(checkpoint := Checkpoint.open(path))
    assert settings is not None
    processor = ImagePrompts(checkpoint, settings, lambda _: [], {"image": 16})
    found = generate(path, prompts)
    assert bits(generate(path, prompts * 2, max_num_batched_tokens=4, num_gpu_blocks_override=16)) == bits(found) * 2
    for prompt, output in zip(prompts, found, strict=True):
        arrays = processor.arrays(*prompt["multi_modal_data"]["image"])
        inputs = {name: torch.from_numpy(arrays[name]) for name in processor.writer.reads}
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        mask = cross_mask(ids, arrays["num_tiles"].reshape(-1).tolist())
        with torch.inference_mode():
            logits = oracle(input_ids=torch.tensor([ids]), cross_attention_mask=mask, **inputs).logits[0]
        first = len(output.prompt_token_ids) - 1
        assert logits[first:-1].argmax(-1).tolist() == ids[first + 1 :]


def test_images_apart_are_not_taken_from_the_cache_of_neighbours(tmp_path: Path) -> None:
    """Their encodings stand in other places of the same blocks."""
    path, seen = make_vision_checkpoint("mllama", tmp_path), [image(1), image(2)]
    texts = ["w1 <image> w2 <image> w3", "w1 <image> <image> w2 w3"]
    prompts: list[Any] = [{"prompt": each, "multi_modal_data": {"image": seen}} for each in texts]
    expected = [bits(generate(path, [each])) for each in prompts]
    with LLM(str(path), dtype="float32", num_gpu_blocks_override=64, max_num_seqs=4) as llm:
        assert [bits(llm.generate([each], PARAMS)) for each in prompts + prompts] == expected * 2


def test_more_images_than_caches_have_room_for_are_refused(tmp_path: Path) -> None:
    path = make_vision_checkpoint("mllama", tmp_path)
    given = {"prompt": "<image> " * 5, "multi_modal_data": {"image": [image(0)] * 5}}
    [refused] = generate(path, [given])
    assert refused.error is not None
    assert refused.error.message == "the prompt has 5 images, must have at most 4 (this model has room for no more)"


def test_text_alone_needs_no_layers_that_read_images(tmp_path: Path) -> None:
    path = make_vision_checkpoint("mllama", tmp_path)
    assert bits(generate(path, PROMPTS[3:], limit_mm_per_prompt={"image": 0})) == bits(generate(path, PROMPTS[3:]))


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"text_config": {"cross_attention_layers": [1, 4]}}, "cross_attention_layers is "),
        ({"vision_config": {"vision_output_dim": 64}}, "vision_output_dim is 64, expected hidden_size times 3"),
        ({"vision_config": {"intermediate_layers_indices": [0, 3]}}, "expected layers of the encoder, which has 3"),
        ({"vision_config": {"max_num_tiles": 3, "supported_aspect_ratios": [[1, 1]]}}, "max_image_tiles is "),
        ({"vision_config": {"supported_aspect_ratios": [[1, 1]]}}, "supported_aspect_ratios is "),
    ],
)
def test_layers_and_tiles_that_do_not_fit_are_refused(change: dict[str, Any], wrong: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_vision_checkpoint("mllama", tmp_path), overrides=change)
    with pytest.raises(CheckpointError, match=wrong):
        LoadedModel.open(checkpoint, Mesh.single(), torch.float32)


@pytest.mark.parametrize(
    ("family", "file", "change", "said"),
    [
        ("granite4_vision", "config", {"image_grid_pinpoints": None}, "image_grid_pinpoints is .*, expected those of"),
        ("llama4", "config", {"vision_config": {"num_attention_heads": None}}, "the encoder fails with a small image"),
        ("gemma3", "config", {"mm_tokens_per_image": 7}, "mm_tokens_per_image is 7, expected 4, as many"),
        ("qwen2_5_vl", "config", {"image_token_id": 7}, "video_token_id is 7, expected another token than the one"),
        (
            "gemma3",
            "config",
            {"eoi_token_index": 10**9},
            "an image cannot be .*has eoi_token_index 1000000000 .*tokens below",
        ),
        ("paddleocr_vl", "preprocessor_config", {"temporal_patch_size": 2}, "the encoder fails .* but got 6 channels"),
        (
            "lighton_ocr",
            "preprocessor_config",
            {"size": {"longest_edge": None}},
            "size.* is .* refuses the settings of images .*longest_e",
        ),
    ],
)
def test_sizes_with_which_no_image_is_read_are_refused_at_the_start(
    family: str, file: str, change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = make_vision_checkpoint(family, tmp_path) / f"{file}.json"
    values = json.loads(path.read_text())
    for key, value in change.items():
        changed = {**values[key], **value} if isinstance(value, dict) else value
        values[key] = {k: v for k, v in changed.items() if v is not None} if isinstance(value, dict) else changed
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    with pytest.raises(CheckpointError, match=said):
        LLM(str(tmp_path), dtype="float32", num_gpu_blocks_override=64, max_num_seqs=4)


@pytest.mark.parametrize(
    ("family", "file", "key", "said"),
    [
        ("llava", "preprocessor_config", "image_processor_type", "images are not read: neither preprocessor_config"),
        ("qwen2_audio", "config", "audio_config", "sounds are not read: config.json has no audio_config; "),
    ],
)
def test_the_log_says_why_a_model_that_reads_more_reads_text_alone(
    family: str, file: str, key: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make = make_vision_checkpoint if family in FAMILIES else make_hearing_checkpoint
    path = make(family, tmp_path) / f"{file}.json"
    values = json.loads(path.read_text())
    del values[key]
    path.write_text(json.dumps(values))
    for limit, lines in ({"image": 0, "audio": 0}, 0), ({}, 1):
        generate(tmp_path, ["w1"], limit_mm_per_prompt=limit)
        assert sum(said in each for each in caplog.messages) == lines


@pytest.mark.parametrize("library", ["transformers", "PIL"])
def test_without_a_library_images_are_refused_and_text_is_read(
    library: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = make_vision_checkpoint("llava", tmp_path)
    monkeypatch.setitem(sys.modules, library, None)
    if library == "transformers":
        monkeypatch.setattr("octavo.models.registry.library_version", lambda: None)
    with LLM(str(path)) as llm:
        (said,) = [each.message for each in caplog.records if "pip install 'octavo[images]'" in each.message]
        assert "images are refused" in said
        llm.engine.input.media.warm_up()
        text, refused = llm.generate([PROMPTS[-1], PROMPTS[0]])
    assert text.error is None
    assert refused.error is not None
    assert refused.error.code == "missing_library"
    assert "pip install 'octavo[images]'" in refused.error.message


@pytest.mark.parametrize(
    ("family", "key"), [("glm4v", "vision_config.out_hidden_size"), ("paligemma", "projection_dim")]
)
def test_an_encoder_whose_vectors_are_too_wide_is_refused(family: str, key: str, tmp_path: Path) -> None:
    stored = Checkpoint.open(make_vision_checkpoint(family, tmp_path)).stored.values
    section, _, name = key.rpartition(".")
    values = {**stored, section: {**stored[section], name: 128}} if section else {**stored, name: 128}
    with pytest.raises(CheckpointError, match=f"{key} is 128, expected the text model's hidden_size"):
        LoadedModel.open(Checkpoint(tmp_path, values), Mesh.single(), torch.float32)


def test_the_memory_plan_counts_what_is_kept_of_images(whole: tuple[Path, list[Any]]) -> None:
    checkpoint = Checkpoint.open(whole[0])
    opened = LoadedModel.open(checkpoint, Mesh.single(), torch.float32)
    levels = next((each for name, each in LEVELS.items() if whole[0].name.startswith(name)), 1)
    assert kept_encodings_bytes(opened.model, 200, 4) == 200 * checkpoint.positive("hidden_size") * levels * 4
    text = LoadedModel.open(checkpoint, Mesh.single(), torch.float32, reads_images=False)
    assert kept_encodings_bytes(text.model, 200, 4) == 0
