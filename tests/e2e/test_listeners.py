"""Models that read samples through caches: what transformers computes, `==` for any schedule, how they are asked."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.config.media import media_families
from octavo.errors import CheckpointError, InvalidRequest, UnsupportedModel
from octavo.models import whisper
from octavo.server.schema.audio import TranscriptionRequest
from octavo.server.speech.speech_prompts import Asked, style_of
from tests.conformance.runtimes import LEVELS
from tests.e2e.test_families import check_schedules
from tests.e2e.test_images import assert_agrees
from tests.fakes.checkpoints import edit_config
from tests.fakes.families import WITH_ENCODERS
from tests.fakes.listeners import FAMILIES, make_listener
from tests.fakes.rank_threads import llm_of_ranks
from tests.fakes.whisper import RATE, tone

pytestmark = pytest.mark.slow

SECONDS = (0.31, 1.2)


@pytest.fixture(scope="module", params=[pytest.param("cohere_asr", marks=pytest.mark.long), "moonshine"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_listener(request.param, tmp_path_factory.mktemp(request.param))


def heard(seconds: float, pitch: float, ids: list[int]) -> dict[str, Any]:
    return {"prompt_token_ids": ids, "multi_modal_data": {"audio": (tone(seconds, pitch), RATE)}}


def read(family: str, samples: Any) -> dict[str, torch.Tensor]:
    """What transformers' extractor makes of a sound."""
    import transformers

    if family == "moonshine":
        return {"input_values": torch.from_numpy(samples)[None]}
    made = transformers.CohereAsrFeatureExtractor(feature_size=16)(samples, sampling_rate=RATE, return_tensors="pt")
    return {name: made[name] for name in ("input_features", "attention_mask")}


def test_logprobs_are_those_of_transformers(path: Path) -> None:
    import transformers

    family = next(each for each in FAMILIES if path.name.startswith(each))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make = getattr(transformers, WITH_ENCODERS[family][1])
        oracle = make.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    params = SamplingParams(temperature=0.0, max_tokens=9, logprobs=3, ignore_eos=True)
    with LLM(str(path), dtype="float32", num_gpu_blocks_override=300) as llm:
        outputs = llm.generate([heard(each, 440.0, [1, 7, 30]) for each in SECONDS], params, use_tqdm=False)
    for seconds, output in zip(SECONDS, outputs, strict=True):
        assert output.error is None, output.error
        drawn = list(output.outputs[0].token_ids)
        with torch.inference_mode():
            ids = torch.tensor([[1, 7, 30, *drawn]])
            logits = oracle(decoder_input_ids=ids, **read(family, tone(seconds, 440.0))).logits[0]
        assert_agrees(output, drawn, logits)


@pytest.mark.long
@pytest.mark.skipif(not LEVELS, reason="exact by construction are the compiled kernels, absent here")
def test_any_schedule_gives_the_bits_of_a_lonely_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for family in media_families.FAMILIES:
        if family.listener is not None:
            short = family.listener._replace(seconds=1.5)  # sounds of which scarce blocks have room for one
            monkeypatch.setattr(whisper, "COHERE" if family.listener is whisper.COHERE else "MOONSHINE", short)
            (architecture,) = family.architectures
            monkeypatch.setitem(media_families.BY_ARCHITECTURE, architecture, family._replace(listener=short))
    ways: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 1, "n": 2}, {"seed": 2, "top_p": 0.9}]
    requests = [
        (
            heard(0.3 + number / 10, 300.0, [*range(70, 90), 1]),
            SamplingParams(max_tokens=20, logprobs=1, ignore_eos=True, **way),
        )
        for number, way in enumerate(ways * 2)
    ]
    expected = check_schedules(path, requests, 14)
    assert expected[0][0].token_ids != expected[3][0].token_ids


@pytest.mark.long
@pytest.mark.skipif(not LEVELS, reason="exact by construction are the compiled kernels, absent here")
def test_two_ranks_give_the_bits_of_one(path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1, ignore_eos=True)
    prompts: Any = [heard(each, 300.0, [1, 7]) for each in SECONDS]
    with LLM(str(path), dtype="bfloat16", num_gpu_blocks_override=300) as llm:
        expected = [each.outputs for each in llm.generate(prompts, params, use_tqdm=False)]
    with llm_of_ranks(path, 2, dtype="bfloat16", num_gpu_blocks_override=300) as llm:
        assert [each.outputs for each in llm.generate(prompts, params, use_tqdm=False)] == expected


@pytest.mark.parametrize(
    ("family", "key", "value", "message"),
    [
        ("moonshine", "encoder_num_hidden_layers", 10**6, "at most 1024"),
        ("moonshine", "decoder_num_key_value_heads", 1, "expected 2"),
        ("moonshine", "decoder_start_token_id", 300, "a token of the vocabulary"),
        pytest.param("cohere_asr", "num_key_value_heads", 2, "expected 4", marks=pytest.mark.long),
        pytest.param("cohere_asr", "encoder_config", {"subsampling_factor": 4}, "expected 8", marks=pytest.mark.long),
    ],
)
def test_a_config_that_is_not_computed_is_refused(
    family: str, key: str, value: Any, message: str, tmp_path: Path
) -> None:
    path = make_listener(family, tmp_path)
    edit_config(path, **{key: value})
    with (
        pytest.raises((CheckpointError, UnsupportedModel), match=message),
        LLM(str(path), num_gpu_blocks_override=99) as llm,
    ):
        assert llm.engine.input.media.hearing is None, "read when the first sound comes"


def test_a_model_is_asked_for_what_is_said(path: Path) -> None:
    with LLM(str(path), dtype="float32", num_gpu_blocks_override=300) as llm:
        tools = llm.engine.input
        style = style_of(tools)
        assert style is not None
        sound = (tone(0.5), RATE)
        prompt = style.prompt(tools, Asked(TranscriptionRequest(), "transcribe", sound))
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert output.error is None, output.error
        assert len(output.outputs[0].token_ids) == 3
        with pytest.raises(InvalidRequest, match="prompt is set"):
            style.prompt(tools, Asked(TranscriptionRequest(prompt="x"), "transcribe", sound))
        with pytest.raises(InvalidRequest, match="^language is"):
            style.prompt(tools, Asked(TranscriptionRequest(language="xx"), "transcribe", sound))
        (short,) = llm.generate([heard(0.05, 440.0, [1])], SamplingParams(max_tokens=1), use_tqdm=False)
        assert "multi_modal_data.audio lasts 0.050 s, expected at least 0.1 s" in str(short.error)
        part = {"type": "audio", "audio": (tone(0.05), RATE)}
        for parts, place in (([part], "messages[0].content[1] lasts 0.050 s"), ([], "messages has nothing, expected")):
            chat = [{"role": "user", "content": [{"type": "text", "text": "x"}, *parts]}]
            (output,) = llm.chat(chat, SamplingParams(max_tokens=1), use_tqdm=False, chat_template="x")
            assert place in str(output.error)
