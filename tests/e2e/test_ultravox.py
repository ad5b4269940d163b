"""Ultravox: an encoder of sounds in one folder, and the text model that it is made for in another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.sounds import sound_section
from octavo.devices.reference.attention import ReferenceBackend
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.models.loader import LoadedModel
from octavo.multimodal.placeholders import Words
from octavo.multimodal.sound_prompts import SoundPrompts
from octavo.ops.registry import bind
from tests.e2e.test_images import bits, generate
from tests.fakes.checkpoints import edit_config, edit_tensors, make_checkpoint
from tests.fakes.vision import write_tokenizer
from tests.fakes.whisper import RATE, tone

SIZES: dict[str, Any] = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}
SIZES |= {"num_mel_bins": 16, "max_source_positions": 100, "vocab_size": 8, "pad_token_id": 0, "model_type": "whisper"}
SOUND = tone(3.37, 440.0)
"""More than a window of 2 s."""
MARK = "<|fim_pad|>"
PROMPTS: list[Any] = [
    {"prompt": "w1 <|audio|> w2", "multi_modal_data": {"audio": (SOUND, RATE)}},
    {"prompt": "<|audio|> w2 <|audio|>", "multi_modal_data": {"audio": [(tone(0.4), RATE), (tone(1.3, 300.0), RATE)]}},
    "w1 w2 w3",
]


def make_ultravox(folder: Path, *, is_between: bool = True, num_layers: int = 0) -> Path:
    """Write a random model of parts in three folders to `folder`; return that of the projector."""
    import transformers as tf
    from transformers.models.whisper.modeling_whisper import WhisperEncoder, WhisperEncoderLayer

    text, path = make_checkpoint("llama", folder / "text"), folder / "ultravox"
    path.mkdir()
    shapes = {"ln_pre": (128,), "linear_1": (48, 128), "linear_2": (32, 24)}
    shapes |= {"ln_mid": (24,)} if is_between else {"ln_post": (32,)}
    stored = {f"multi_modal_projector.{name}.weight": torch.empty(shape) for name, shape in shapes.items()}
    if num_layers:
        shapes = {
            "ln_pre.weight": (128,),
            "linear_in.weight": (32, 128),
            "linear_in.bias": (32,),
            "ln_post.weight": (32,),
        }
        shapes |= {"embed_positions.weight": (100, 32), "linear_out.weight": (32, 32), "linear_out.bias": (32,)}
        layer = WhisperEncoderLayer(tf.WhisperConfig(**SIZES)).state_dict()
        shapes |= {f"layers.{i}.{name}": tuple(x.shape) for i in range(num_layers) for name, x in layer.items()}
        stored = {f"multi_modal_projector.{name}": torch.empty(shape) for name, shape in shapes.items()}
    encoder = WhisperEncoder(tf.WhisperConfig(**SIZES)).state_dict()
    stored |= {f"audio_tower.{name}": each for name, each in encoder.items()}
    generator = torch.Generator().manual_seed(3)
    made = {name: torch.randn(each.shape, generator=generator) * 0.2 for name, each in stored.items()}
    save_file(made, path / "model.safetensors")
    config = {"architectures": ["UltravoxModel"], "model_type": "ultravox", "hidden_size": 48, "stack_factor": 4}
    config |= {"audio_config": SIZES, "text_model_id": str(text), "projector_ln_mid": is_between}
    config |= {"num_projector_layers": num_layers}
    (path / "config.json").write_text(json.dumps({**config, "audio_model_id": None, "audio_token_index": 99}))
    write_tokenizer(path)
    file = str(path / "tokenizer.json")
    backend = Tokenizer.from_file(file)
    backend.add_special_tokens([MARK])
    backend.save(file)
    return path


def heard(path: Path, features: torch.Tensor, *, is_between: bool, num_layers: int = 0) -> torch.Tensor:
    """What the encoder makes of a window in plain torch."""
    w = load_file(path / "model.safetensors")

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (32,), w[f"{name}.weight"], w[f"{name}.bias"])

    for place, stride in ((1, 1), (2, 2)):
        name = f"audio_tower.conv{place}"
        features = F.gelu(F.conv1d(features, w[f"{name}.weight"], w[f"{name}.bias"], padding=1, stride=stride))
    x = features.T
    x = x + w["audio_tower.embed_positions.weight"][: len(x)]

    def attended(layer: str, x: torch.Tensor) -> torch.Tensor:
        y = norm(f"{layer}.self_attn_layer_norm", x)
        q, k, v = (linear(f"{layer}.self_attn.{one}_proj", y).view(-1, 2, 16).transpose(0, 1) for one in "qkv")
        seen = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(-1, 32)
        x = x + linear(f"{layer}.self_attn.out_proj", seen)
        return x + linear(f"{layer}.fc2", F.gelu(linear(f"{layer}.fc1", norm(f"{layer}.final_layer_norm", x))))

    for layer in range(2):
        x = attended(f"audio_tower.layers.{layer}", x)
    x = norm("audio_tower.layer_norm", x)
    x = torch.cat((x, torch.zeros(-len(x) % 4, 32))).view(-1, 128)
    name = "multi_modal_projector"
    x = F.rms_norm(x, (128,), w[f"{name}.ln_pre.weight"], 1e-6)
    if num_layers:
        x = linear(f"{name}.linear_in", x)
        x = x + w[f"{name}.embed_positions.weight"][: len(x)]
        for layer in range(num_layers):
            x = attended(f"{name}.layers.{layer}", x)
        return linear(f"{name}.linear_out", F.rms_norm(x, (32,), w[f"{name}.ln_post.weight"], 1e-6))
    x = linear(f"{name}.linear_1", x)
    x = F.silu(x[:, 24:]) * x[:, :24]
    if is_between:
        return linear(f"{name}.linear_2", F.rms_norm(x, (24,), w[f"{name}.ln_mid.weight"], 1e-6))
    return F.rms_norm(linear(f"{name}.linear_2", x), (32,), w[f"{name}.ln_post.weight"], 1e-6)


@pytest.mark.parametrize(
    ("is_between", "num_layers"), [(True, 0), pytest.param(False, 0, marks=pytest.mark.long), (False, 2)]
)
def test_windows_become_what_the_formula_says(tmp_path: Path, is_between: bool, num_layers: int) -> None:
    path = make_ultravox(tmp_path, is_between=is_between, num_layers=num_layers)
    checkpoint = Checkpoint.open(path)
    section = sound_section(checkpoint)
    assert section is not None
    tokens = {MARK: [5], "\ufdd0": [0]}
    prompts = SoundPrompts(checkpoint, section, lambda text: tokens.get(text, [0]), {"audio": 1}, 512, 512)
    written, media = prompts.expand([7, 5, 8], {"audio": (SOUND, RATE)})
    assert [each.num_embeddings for each in media] == [25, 18]  # of 200 frames and of 137
    assert written == [7, *[5] * 43, 8]
    model: Any = LoadedModel.open(checkpoint, Mesh.single(), torch.float32).load(bind(), ReferenceBackend())
    for each in media:
        array = each.arrays["input_features"]
        features = torch.frombuffer(bytearray(array.data), dtype=torch.float32).view(array.shape)
        with torch.inference_mode():
            expected = heard(path, features, is_between=is_between, num_layers=num_layers)
            found = model.encode("audio", {"input_features": features})
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_spectrogram_is_that_of_the_whole_sound(tmp_path: Path) -> None:
    import transformers as tf

    checkpoint = Checkpoint.open(make_ultravox(tmp_path))
    section = sound_section(checkpoint)
    assert section is not None
    tokens = {MARK: [5]}
    prompts = SoundPrompts(checkpoint, section, lambda text: tokens.get(text, [0]), {"audio": 1}, 512, 512)
    _, media = prompts.expand([5], {"audio": (SOUND, RATE)})
    found = [torch.frombuffer(bytearray(each.arrays["input_features"].data), dtype=torch.float32) for each in media]
    extractor = tf.WhisperFeatureExtractor(feature_size=16)
    made = extractor(SOUND, sampling_rate=RATE, padding="longest", pad_to_multiple_of=160, return_tensors="pt")
    together = torch.cat([each.view(16, -1) for each in found], 1)
    torch.testing.assert_close(together, made["input_features"][0], rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("num_layers", [0, 2])
def test_the_same_bits_in_any_schedule_and_the_text_models_own_without_sounds(tmp_path: Path, num_layers: int) -> None:
    path = make_ultravox(tmp_path, num_layers=num_layers)
    expected = generate(path, PROMPTS)
    assert all(each.error is None for each in expected)
    cut = generate(path, PROMPTS * 2, num_gpu_blocks_override=10, max_num_batched_tokens=19)
    assert bits(cut) == bits(expected) * 2
    assert bits(generate(tmp_path / "text", PROMPTS[2:], tokenizer=str(path))) == bits(expected[2:])


@pytest.mark.long
def test_an_encoder_in_a_folder_of_its_own(tmp_path: Path) -> None:
    path = make_ultravox(tmp_path)
    expected, own = generate(path, PROMPTS), load_file(path / "model.safetensors")
    moved = {name: each for name, each in own.items() if name.startswith("audio_tower.")}
    whisper = tmp_path / "whisper"
    whisper.mkdir()
    named = {name.replace("audio_tower.", "model.encoder."): each for name, each in moved.items()}
    save_file({**named, "model.decoder.layer_norm.weight": torch.ones(3)}, whisper / "model.safetensors")
    (whisper / "config.json").write_text(json.dumps({**SIZES, "architectures": ["WhisperForConditionalGeneration"]}))
    edit_tensors(path, remove=tuple(moved))
    edit_config(path, remove=("audio_config",), audio_model_id=str(whisper))
    assert all(each.error is None for each in expected)
    assert bits(generate(path, PROMPTS)) == bits(expected)


def test_a_part_in_no_folder_is_refused_with_the_remedy(tmp_path: Path) -> None:
    values = {"architectures": ["UltravoxModel"], "model_type": "ultravox", "text_model_id": "meta-llama/Llama-3.1-8B"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    said = 'text_model_id is meta-llama/Llama-3.1-8B, .* set hf_overrides={"text_model_id": "PATH OF THE FOLDER"}'
    with pytest.raises(UnsupportedModel, match=said):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="text_model_id is 3, expected a string"):
        Checkpoint.open(tmp_path, {"text_model_id": 3})
    text = make_checkpoint("llama", tmp_path / "text")
    assert Checkpoint.open(tmp_path, {"text_model_id": str(text)}).text_model_type == "llama"
    edit_config(text, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnsupportedModel, match="quantization_config .* does not join weights of several formats"):
        Checkpoint.open(tmp_path, {"text_model_id": str(text)})


@pytest.mark.parametrize(("key", "value"), [("audio_latency_block_size", 100), ("projector_act", "gelu")])
def test_other_projectors_are_refused(key: str, value: object, tmp_path: Path) -> None:
    path = make_ultravox(tmp_path)
    edit_config(path, **{key: value})
    with pytest.raises(UnsupportedModel, match=key):
        sound_section(Checkpoint.open(path))


@pytest.mark.parametrize(("count", "said"), [(-1, "at least 0"), (1025, "1,024")])
def test_counts_of_projector_layers_that_cannot_be_are_refused(count: int, said: str, tmp_path: Path) -> None:
    path = make_ultravox(tmp_path)
    edit_config(path, num_projector_layers=count)
    with pytest.raises(CheckpointError, match=f"num_projector_layers is {count}, expected .*{said}"):
        sound_section(Checkpoint.open(path))


def test_a_tokenizer_without_a_token_that_texts_lack_is_refused() -> None:
    words = Words("<|audio|>", "<one>", others=("<other>",))
    with pytest.raises(CheckpointError, match="the tokenizer has no token <one> or <other>"):
        words.ids(lambda text: [3])
    assert words.ids(lambda text: [4 if text == "<other>" else 3]) == [4, 4]
