"""Whisper in the whole engine: sounds in vLLM's forms, the texts of transformers, and `==` for any schedule."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.core.media import MediaInput
from octavo.core.outputs import RequestOutput
from octavo.core.prompt import Prompt
from octavo.multimodal.processors.log_mel import LogMel
from octavo.server.speech.transcription import Transcriber
from tests.conformance.runtimes import LEVELS
from tests.e2e.test_families import check_schedules
from tests.fakes.rank_threads import llm_of_ranks
from tests.fakes.whisper import EN, END, FIRST_STAMP, PROMPT, RATE, START, TRANSCRIBE, make_whisper, tone


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper(tmp_path_factory.mktemp("whisper"))


def heard(pitch: float, ids: list[int] = PROMPT, seconds: float = 0.8) -> dict[str, Any]:
    return {"prompt_token_ids": ids, "multi_modal_data": {"audio": (tone(seconds, pitch), RATE)}}


def requests() -> list[tuple[dict[str, Any], SamplingParams]]:
    ways: list[tuple[float, int, dict[str, Any]]] = [
        (440.0, 60, {"temperature": 0.0}),
        (440.0, 50, {"seed": 1, "n": 2}),
        (300.0, 45, {"seed": 2, "top_p": 0.9}),
        (300.0, 40, {"n": 2, "best_of": 2, "use_beam_search": True}),
        (520.0, 50, {"temperature": 0.0}),
    ]
    return [
        (
            heard(pitch, [*([70 + i for i in range(20)] if number % 2 else []), *PROMPT]),
            SamplingParams(max_tokens=most, logprobs=1, ignore_eos=True, **way),
        )
        for number, (pitch, most, way) in enumerate(ways)
    ]


@pytest.mark.skipif(not LEVELS, reason="exact by construction are the compiled kernels, absent here")
def test_any_schedule_gives_the_bits_of_a_lonely_run(path: Path) -> None:
    expected = check_schedules(path, requests(), 12)
    assert expected[0][0].token_ids[:9] != expected[4][0].token_ids[:9]


@pytest.mark.skipif(not LEVELS, reason="exact by construction are the compiled kernels, absent here")
def test_two_ranks_give_the_bits_of_one(path: Path) -> None:
    """The rules of speech bar tokens of the whole vocabulary, so that a rank's share of it decides nothing."""
    ways: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 1, "top_k": 5}, {"seed": 2, "logprobs": 1}]
    asked = [SamplingParams(max_tokens=20, ignore_eos=True, **way) for way in ways]
    prompts: Any = [heard(pitch) for pitch in (440.0, 300.0, 520.0)]
    with LLM(str(path), dtype="bfloat16") as llm:
        expected = [each.outputs for each in llm.generate(prompts, asked, use_tqdm=False)]
    with llm_of_ranks(path, 2, dtype="bfloat16") as llm:
        assert [each.outputs for each in llm.generate(prompts, asked, use_tqdm=False)] == expected


@pytest.mark.parametrize("timestamps", [False, True])
def test_greedy_text_is_that_of_transformers(timestamps: bool, path: Path) -> None:
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle = WhisperForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
        samples = tone(0.8)
        extracted = WhisperFeatureExtractor(feature_size=8, chunk_length=1)(samples, sampling_rate=RATE)
        wanted = oracle.generate(
            input_features=torch.tensor(np.array(extracted["input_features"])), language="en", task="transcribe",
            return_timestamps=timestamps, max_new_tokens=40,
        )[0].tolist()  # fmt: skip
    prompt = [START, EN, TRANSCRIBE] if timestamps else PROMPT
    with LLM(str(path), dtype="float32") as llm:
        [output] = llm.generate(heard(440.0, prompt), SamplingParams(temperature=0.0, max_tokens=40), use_tqdm=False)
        texts = {"prompt": "", "multi_modal_data": {"audio": samples}}
        text = "<|startoftranscript|><|en|><|transcribe|>" + ("" if timestamps else "<|notimestamps|>")
        [again] = llm.generate(
            {"encoder_prompt": texts, "decoder_prompt": text}, SamplingParams(temperature=0.0, max_tokens=40)
        )
    found = output.outputs[0].token_ids
    assert again.outputs[0].token_ids == found
    if not timestamps:
        assert found == wanted
        return
    # transformers seeks to the last timestamp and goes on there
    heard_once = found[: found.index(END)]
    assert FIRST_STAMP <= heard_once[0] <= FIRST_STAMP + 20
    assert wanted[: len(heard_once)] == heard_once


def test_prompts_without_a_sound_and_with_too_much_are_refused(path: Path) -> None:
    with LLM(str(path), dtype="float32") as llm:
        errors = [
            llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)[0].error
            for prompt in (
                "x",
                {"prompt": "x", "multi_modal_data": {"image": 1}},
                heard(440.0, seconds=1.2),
                {"prompt": "x", "multi_modal_data": {"audio": (np.array([0.0, np.nan]), RATE)}},
            )
        ]
    assert [each.message.partition(";")[0] if each else None for each in errors] == [
        "multi_modal_data has nothing, expected audio: this model writes down one sound with each prompt",
        "multi_modal_data has image, expected audio: this model writes down one sound with each prompt",
        "multi_modal_data.audio lasts 1.2 s or more, expected at most 1 s",
        "multi_modal_data.audio: sample 1 is nan, expected a number near [-1, 1]",
    ]


@pytest.mark.parametrize(("pitch", "seconds"), [(300.0, 3.3), (700.0, 1.7)])
def test_windows_of_a_long_sound_are_those_of_transformers(pitch: float, seconds: float, path: Path) -> None:
    from transformers import WhisperForConditionalGeneration

    sound, settings = tone(seconds, pitch), LogMel(100, 50, feature_size=8)
    features, num_frames = settings.features(sound), round(seconds * 100)
    with LLM(str(path), dtype="float32") as llm:

        async def ask(prompt: list[int], media: MediaInput, params: SamplingParams) -> RequestOutput:
            return llm.generate(Prompt(token_ids=prompt, media=(media,)), params, use_tqdm=False)[0]

        speech = llm.config.model.speech
        assert speech is not None
        heard = Transcriber(
            speech, settings, features, num_frames, ask, lambda ids: "x" * bool(ids), 96, "transcribe", language="en",
            timestamps=True, temperatures=(0.0,),
        )  # fmt: skip

        async def run() -> list[tuple[float, float, list[int]]]:
            return [(each.start, each.end, each.tokens) async for window in heard.segments() for each in window]

        found = asyncio.run(run())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle: Any = WhisperForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
        given = torch.from_numpy(features[None, :, :num_frames])
        wanted = oracle.generate(
            input_features=given, attention_mask=torch.ones(1, num_frames), language="en", task="transcribe",
            return_timestamps=True, return_segments=True, max_new_tokens=48, condition_on_prev_tokens=False,
        )["segments"][0]  # fmt: skip
    expected = [
        (round(float(each["start"]), 2), round(float(each["end"]), 2), [i for i in each["tokens"].tolist() if i < END])
        for each in wanted
    ]
    assert found == [each for each in expected if each[2]]
    assert len(found) > 3
