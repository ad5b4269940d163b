"""Models that read sounds in the place of tokens: what transformers computes, and `==` for any schedule."""

from __future__ import annotations

import base64
import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM
from octavo.core.outputs import RequestOutput
from octavo.errors import CheckpointError
from tests.e2e.test_images import PARAMS, assert_agrees, bits, generate
from tests.fakes.hearing import AUDIO, FAMILIES, extractor, make_hearing_checkpoint
from tests.fakes.vision import load_vision_oracle
from tests.fakes.whisper import tone

pytestmark = pytest.mark.slow

RATE = 16_000
SHORT = tone(0.4, 520.0)


MOST_S = {
    "audioflamingo3": 20,
    "fun_asr_nano": 120,
    "glmasr": 40,
    "moss_transcribe_diarize": 40,
    "musicflamingo": 20,
    "granite_speech": 51,
    "granite_speech_plus": 51,
    "qwen2_audio": 2,
    "qwen3_asr": 39,
    "voxtral": 40,
}
"""Of one window, or of the windows that fit into 512 tokens."""


def family_of(path: Path) -> str:
    return max((each for each in FAMILIES if path.name.startswith(each)), key=len)


def prompts_of(path: Path) -> list[Any]:
    longest = tone(min(4.5, MOST_S[family_of(path)]), 300.0)
    return [
        {"prompt": "w1 <start> <image> <end> w2", "multi_modal_data": {"audio": (tone(1.3, 440.0), RATE)}},
        {"prompt": "<image> w2 <image> w7", "multi_modal_data": {"audio": [(longest, RATE), (SHORT, RATE)]}},
        "w1 w2 w3",
    ]


LONG = ("fun_asr_nano", "moss_transcribe_diarize", "musicflamingo")


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=pytest.mark.long) if each in LONG else each for each in sorted(FAMILIES)],
)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hearing_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def expected(path: Path) -> list[RequestOutput]:
    return generate(path, prompts_of(path))


def heard(family: str, sounds: list[Any]) -> dict[str, torch.Tensor]:
    """What transformers' processor makes of sounds."""
    if family == "voxtral":
        options = {"padding": True, "pad_to_multiple_of": 2 * RATE, "truncation": False, "return_tensors": "pt"}
        each = [extractor()(sound, sampling_rate=RATE, **options)["input_features"] for sound in sounds]
        return {"input_features": torch.cat([one.reshape(16, -1, 200).transpose(0, 1) for one in each])}
    if family.startswith("granite_speech"):
        return {"input_features": torchaudio_features(sounds[0])}
    if family in ("audioflamingo3", "glmasr", "musicflamingo"):
        parts = [sound[start : start + 2 * RATE] for sound in sounds for start in range(0, len(sound), 2 * RATE)]
        made = extractor()(parts, sampling_rate=RATE, return_attention_mask=True, return_tensors="pt")
        return {"input_features": made["input_features"], "input_features_mask": made["attention_mask"]}
    if family == "moss_transcribe_diarize":
        made = FAMILIES[family][0]()[1](sounds, sampling_rate=RATE, return_tensors="pt")
        return {**made}
    if family == "fun_asr_nano":
        each = [kaldi_features(sound) for sound in sounds]
        return {
            "input_features": torch.nn.utils.rnn.pad_sequence(each, batch_first=True),
            "input_features_mask": torch.nn.utils.rnn.pad_sequence(
                [torch.ones(len(one), dtype=torch.int64) for one in each], batch_first=True
            ),
        }
    if family == "qwen3_asr":
        make, longest = FAMILIES[family][0]()[1], 500
        options = {"sampling_rate": RATE, "padding": True, "return_attention_mask": True}
        each = [make(sound, **options) for sound in sounds]
        features, mask = (
            torch.cat([torch.nn.functional.pad(one[name], (0, longest - one[name].shape[-1])) for one in each])
            for name in ("input_features", "attention_mask")
        )
        return {"input_features": features, "input_features_mask": mask}
    made = extractor()(
        sounds, sampling_rate=RATE, return_attention_mask=True, padding="max_length", return_tensors="pt"
    )
    return {"input_features": made["input_features"], "feature_attention_mask": made["attention_mask"]}


def kaldi_features(sound: Any) -> torch.Tensor:
    """What Fun-ASR-Nano's feature extractor makes of a sound with torchaudio, [vectors, frames beside each other]."""
    from transformers.audio_utils import mel_filter_bank

    frames = torch.from_numpy(sound).double().unfold(0, 400, 160)
    frames = frames - frames.mean(1, keepdim=True)
    frames = frames - 0.97 * torch.cat([frames[:, :1], frames[:, :-1]], 1)
    spectrum = torch.fft.rfft(frames * torch.hamming_window(400, periodic=False, dtype=torch.float64), 512)
    options: dict[str, Any] = {"triangularize_in_mel_space": True, "mel_scale": "kaldi"}
    bank = mel_filter_bank(257, 16, 20.0, 8000.0, RATE, **options)
    mel = (spectrum.abs().pow(2) @ torch.from_numpy(bank).double()).clip(min=torch.finfo(torch.float32).eps).log()
    padded = torch.cat([mel[:1].expand(2, -1), mel, mel[-1:].expand(9, -1)])
    windows = padded.unfold(0, 5, 6)[: -(-len(mel) // 6)].transpose(1, 2)
    return windows.reshape(len(windows), -1).float()


def torchaudio_features(sound: Any) -> torch.Tensor:
    """What Granite's feature extractor makes of a sound with torchaudio, [1, pairs of frames, bands of both]."""
    from transformers.audio_utils import mel_filter_bank

    window = torch.hann_window(400)
    spectrum = torch.stft(torch.from_numpy(sound), 512, 160, 400, window, pad_mode="reflect", return_complex=True)
    bank = mel_filter_bank(257, 16, 0.0, 8000.0, RATE, norm=None, mel_scale="htk")
    mel = (spectrum.abs().pow(2).T @ torch.from_numpy(bank).float()).clip(min=1e-10).log10()
    mel = torch.maximum(mel, mel.max() - 8.0) / 4 + 1
    return mel[: len(mel) // 2 * 2].reshape(1, -1, 32)


def test_logprobs_are_those_of_transformers(path: Path, expected: list[RequestOutput]) -> None:
    family = family_of(path)
    oracle = load_vision_oracle(path, FAMILIES[family][1])
    num_prompts = (
        1 if family.startswith("granite_speech") else 2
    )  # whose encoder sees the silence behind shorter sounds
    for prompt, output in zip(prompts_of(path)[:num_prompts], expected, strict=False):
        given = prompt["multi_modal_data"]["audio"]
        sounds = [each for each, _ in (given if isinstance(given, list) else [given])]
        inputs = heard(family, sounds)
        drawn = list(output.outputs[0].token_ids)
        drawn = drawn[: drawn.index(AUDIO)] if AUDIO in drawn else drawn  # which would stand for a sound there
        ids = torch.tensor([[*output.prompt_token_ids, *drawn]])
        with torch.inference_mode():
            logits = oracle(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0]
        assert_agrees(output, drawn, logits)


@pytest.mark.parametrize(
    "args",
    [
        pytest.param({"max_num_batched_tokens": 5}, marks=pytest.mark.long),
        {"num_gpu_blocks_override": 10, "max_num_batched_tokens": 19},
        {"num_gpu_blocks_override": 10, "preemption_mode": "swap"},
        pytest.param({"enable_prefix_caching": False, "max_num_seqs": 1, "threads": 1}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_same_bits_in_any_schedule(path: Path, expected: list[RequestOutput], args: dict[str, Any]) -> None:
    assert bits(generate(path, prompts_of(path) * 2, **args)) == bits(expected) * 2


def test_a_sound_of_a_message_is_the_sound_of_the_prompt(path: Path) -> None:
    file = io.BytesIO()
    samples = (SHORT * 32767).round().astype(np.int16)
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, RATE, 0, "NONE", ""))
        out.writeframes(samples.tobytes())
    data = base64.b64encode(file.getvalue()).decode()
    template = (
        "{% for message in messages %}{% for part in message.content %}"
        "{{ '<image>' if part.type == 'audio' else part.text }} {% endfor %}{% endfor %}"
    )
    llm = LLM(str(path), dtype="float32", num_gpu_blocks_override=64, chat_template=template)
    try:
        sound = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
        words = "w5 " * 16
        content = [sound, {"type": "text", "text": words}]
        (chatted,) = llm.chat([{"role": "user", "content": content}], PARAMS)
        prompt = {"prompt": f"<image> {words}", "multi_modal_data": {"audio": (samples / np.float32(32768), RATE)}}
        (plain, again) = (llm.generate([prompt], PARAMS)[0] for _ in range(2))
        assert chatted.prompt_token_ids == plain.prompt_token_ids
        assert bits([chatted]) == bits([plain]) == bits([again])
        assert again.num_cached_tokens > 0
        most = MOST_S[family_of(path)]
        others: list[tuple[Any, str]] = [
            (
                {"audio": (tone(most + 0.5, 1.0), RATE)},
                f"lasts {most + 0.5:.1f} s or more, expected at most {most} s; send it in parts",
            ),
            ({}, "1 placeholder for sounds, but 0 sounds came with it; write one placeholder, <image>, for each sound"),
            ({"image": [1]}, "this model reads text and sounds"),
        ]
        for given, message in others:
            (refused,) = llm.generate([{"prompt": "<image>", "multi_modal_data": given}], PARAMS)
            assert message in str(refused.error), refused.error
    finally:
        llm.close()


def test_limits_of_sounds_are_their_own(path: Path, expected: list[RequestOutput]) -> None:
    assert bits(generate(path, prompts_of(path), limit_mm_per_prompt={"image": 0, "audio": 2})) == bits(expected)
    (refused,) = generate(path, prompts_of(path)[1:2], limit_mm_per_prompt={"audio": 1})
    assert "has 2 sounds, must have at most 1" in str(refused.error)
    refused, text = generate(path, prompts_of(path)[::2], limit_mm_per_prompt={"audio": 0})
    assert "this model reads text alone" in str(refused.error)
    assert bits([text]) == bits(expected[2:])


def test_the_layout_in_which_qwen3_asr_was_released_is_read(tmp_path: Path) -> None:
    path = make_hearing_checkpoint("qwen3_asr", tmp_path / "qwen3_asr")
    expected = bits(generate(path, prompts_of(path)))
    new = {"model.language_model.": "model.", "model.audio_tower.": "audio_tower."}
    new |= {f"model.multi_modal_projector.linear_{place}.": f"audio_tower.proj{place}." for place in (1, 2)}
    tensors, renamed = load_file(path / "model.safetensors"), {}
    for name, tensor in tensors.items():
        start = next((each for each in new if name.startswith(each)), "")
        renamed[f"thinker.{new.get(start, '')}{name.removeprefix(start)}"] = tensor
    assert "thinker.audio_tower.proj2.bias" in renamed
    renamed["thinker.lm_head.weight"] = renamed["thinker.model.embed_tokens.weight"].clone()
    save_file(renamed, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    thinker = {name: config[name] for name in ("audio_config", "text_config", "audio_token_id")}
    thinker["audio_config"]["model_type"] = "qwen3_asr_audio_encoder"
    thinker["text_config"] |= {"model_type": "qwen3_asr_text", "tie_word_embeddings": False}
    whole = {"architectures": config["architectures"], "model_type": "qwen3_asr", "thinker_config": thinker}
    (path / "config.json").write_text(json.dumps(whole))
    assert bits(generate(path, prompts_of(path))) == expected


@pytest.mark.long
def test_a_forced_aligner_has_labels_of_times_in_the_place_of_a_vocabulary(tmp_path: Path) -> None:
    path = make_hearing_checkpoint("qwen3_asr", tmp_path / "qwen3_asr")
    rows: dict[str, Any] = {"task": "token_embed", "use_activation": False}
    own: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 64}
    prompts = prompts_of(path)
    with LLM(str(path), runner="pooling", pooler_config=rows, **own) as llm:
        hidden = [torch.tensor(output.outputs.data) for output in llm.encode(prompts)]
    head = torch.randn(7, hidden[0].shape[1]) / 4
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": head}, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    names = ["Qwen3ASRForcedAlignerForTokenClassification"]
    (path / "config.json").write_text(json.dumps(config | {"architectures": names, "classify_num": 7}))
    with LLM(str(path), **own) as llm:
        for output, states in zip(llm.encode(prompts), hidden, strict=True):
            want = (states @ head.T).softmax(-1)
            torch.testing.assert_close(torch.tensor(output.outputs.data), want, rtol=1e-4, atol=1e-5)


def test_the_adapter_of_a_checkpoint_is_used_with_sounds_alone(tmp_path: Path) -> None:
    path = make_hearing_checkpoint("granite_speech", tmp_path / "granite_speech")
    plain = generate(path, prompts_of(path))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"has_lora_adapter": True}))
    with pytest.raises(CheckpointError, match=r"has_lora_adapter is true, expected false where adapter_config.json is"):
        generate(path, ["w1"])
    oracle, deltas = load_vision_oracle(path, FAMILIES["granite_speech"][1]), {}
    generator = torch.Generator().manual_seed(1)
    for layer, module in enumerate(oracle.model.language_model.layers):
        name, weight = f"language_model.model.layers.{layer}.self_attn.q_proj", module.self_attn.q_proj.weight
        a, b = (torch.randn(size, generator=generator) for size in ((20, 32), (32, 20)))
        deltas |= {f"base_model.model.{name}.lora_{each}.weight": matrix for each, matrix in (("A", a), ("B", b))}
        with torch.no_grad():
            weight += b @ a * 2
    save_file(deltas, path / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": 20, "lora_alpha": 40, "target_modules": ["q_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(values))
    spoken, _, text = generate(path, prompts_of(path))
    assert bits([text]) == bits(plain[2:])
    ids = torch.tensor([spoken.prompt_token_ids])
    with torch.inference_mode():
        logits = oracle(input_ids=ids, input_features=torchaudio_features(tone(1.3, 440.0))).logits[0, -1]
    (completion,) = spoken.outputs
    for token_id, each in (completion.logprobs or [])[0].items():
        assert abs(each.logprob - float(logits.log_softmax(-1)[token_id])) <= 1e-4
    assert bits([spoken]) != bits(plain[:1])
    (path / "adapter_model.safetensors").write_bytes(b"no adapter")
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        generate(path, ["w1"])
