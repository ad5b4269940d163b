"""Sounds of MiniCPM-o: Whisper's encoder in which a second sees those before it, and marks around each second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from octavo import LLM
from octavo.config.checkpoint import Checkpoint
from octavo.config.media.sounds import sound_section
from octavo.config.section import Section
from octavo.core.outputs import RequestOutput
from octavo.devices.reference.attention import ReferenceBackend
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError
from octavo.models.loader import LoadedModel
from octavo.multimodal.processors.minicpm_sounds import WORDS, minicpm_window
from octavo.multimodal.sound_prompts import SoundPrompts
from octavo.ops.registry import bind
from tests.e2e.test_images import PARAMS, bits, generate
from tests.fakes.checkpoints import edit_config
from tests.fakes.hearing import extractor
from tests.fakes.vision import image
from tests.fakes.vision_sizes import VIDEO
from tests.fakes.whisper import RATE, tone
from tests.models.test_image_relatives import make_minicpm

pytestmark = pytest.mark.slow

MARK = "(<audio>./</audio>)"
SOUND = tone(3.37, 440.0)
"""More than a window of 2 s, and no whole number of seconds."""
SIZES: dict[str, Any] = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 128}
SIZES |= {"num_mel_bins": 16, "max_source_positions": 100, "vocab_size": 8, "pad_token_id": 0}
PROMPTS: list[Any] = [
    {"prompt": f"w1 {MARK} w2", "multi_modal_data": {"audio": (SOUND, RATE)}},
    {
        "prompt": f"w1 {MARK} w2 (<image>./</image>) w7 {MARK}",
        "multi_modal_data": {"audio": [(tone(0.4), RATE), (tone(1.3, 300.0), RATE)], "image": image(1)},
    },
    "w1 w2 w3",
]


def make_minicpm_o(path: Path, pooled: int = 5) -> Path:
    """Write a random model that hears 2 s at once to `path` and return it."""
    import transformers as tf
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    make_minicpm(path, "4.5", "qwen3")
    tensors, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(3)
    stored = {f"apm.{name}": each for name, each in WhisperEncoder(tf.WhisperConfig(**SIZES)).state_dict().items()}
    for place, width in ((1, 32), (2, 128)):
        stored |= {f"audio_projection_layer.linear{place}.weight": torch.empty(128, width)}
        stored |= {f"audio_projection_layer.linear{place}.bias": torch.empty(128)}
    made = {name: torch.randn(each.shape, generator=generator) * 0.2 for name, each in stored.items()}
    save_file(tensors | made, path / "model.safetensors")
    own = {"audio_config": SIZES, "audio_pool_step": pooled, "audio_chunk_length": 1.0, "init_audio": True}
    edit_config(path, architectures=["MiniCPMO"], model_type="minicpmo", **own)
    settings = json.loads((path / "preprocessor_config.json").read_text())
    sounds = {name: value for name, value in extractor().to_dict().items() if name != "feature_extractor_type"}
    (path / "preprocessor_config.json").write_text(json.dumps({**sounds, **settings}))
    file = str(path / "tokenizer.json")
    backend = Tokenizer.from_file(file)
    backend.add_special_tokens(["<|audio_start|>", "<|audio_end|>"])
    backend.save(file)
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_minicpm_o(tmp_path_factory.mktemp("omni"))


@pytest.fixture(scope="module")
def expected(path: Path) -> list[RequestOutput]:
    return generate(path, PROMPTS)


def heard(path: Path, samples: Any, pooled: int) -> torch.Tensor:
    """What the encoder makes of a window in plain torch, a second at a time."""
    made = extractor()(samples, sampling_rate=RATE, return_attention_mask=True, return_tensors="pt")
    features = made["input_features"][:, :, : int(made["attention_mask"].sum())]
    w = {n.removeprefix("apm."): each for n, each in load_file(path / "model.safetensors").items()}
    x = F.gelu(F.conv1d(features, w["conv1.weight"], w["conv1.bias"], padding=1))
    x = F.gelu(F.conv1d(x, w["conv2.weight"], w["conv2.bias"], padding=1, stride=2))[0].T
    x = x + w["embed_positions.weight"][: len(x)]

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (32,), w[f"{name}.weight"], w[f"{name}.bias"])

    for layer in ("layers.0", "layers.1"):
        y = norm(f"{layer}.self_attn_layer_norm", x)
        q, k, v = (linear(f"{layer}.self_attn.{one}_proj", y).view(-1, 2, 16).transpose(0, 1) for one in "qkv")
        seen = [
            F.scaled_dot_product_attention(q[:, start : start + 50], k[:, : start + 50], v[:, : start + 50])
            for start in range(0, len(x), 50)
        ]
        x = x + linear(f"{layer}.self_attn.out_proj", torch.cat(seen, 1).transpose(0, 1).reshape(-1, 32))
        y = norm(f"{layer}.final_layer_norm", x)
        x = x + linear(f"{layer}.fc2", F.gelu(linear(f"{layer}.fc1", y)))
    x = F.relu(linear("audio_projection_layer.linear1", norm("layer_norm", x)))
    x = linear("audio_projection_layer.linear2", x)
    return F.avg_pool1d(x.T[None], pooled)[0].T


@pytest.mark.parametrize("pooled", [5, 2])
def test_windows_are_encoded_a_second_behind_the_other(tmp_path: Path, pooled: int) -> None:
    path = make_minicpm_o(tmp_path, pooled)
    checkpoint = Checkpoint.open(path)
    section = sound_section(checkpoint)
    assert section is not None
    tokens = {"<|audio_start|>": [1], "<|audio_end|>": [2], "<unk>": [3]}
    prompts = SoundPrompts(checkpoint, section, lambda text: tokens.get(text, [9]), {"audio": 1}, 512, 512)
    written, media = prompts.expand([7, 1, 8], {"audio": (SOUND, RATE)})
    group = 50 // pooled
    last = 69 // pooled - group
    assert written == [7, *[1, *[3] * group, 2] * 3, 1, *[3] * last, 2, 8]
    assert [each.num_embeddings for each in media] == [2 * group, group + last]
    assert media[0].spans == ((2, group), (4 + group, group))
    model: Any = LoadedModel.open(checkpoint, Mesh.single(), torch.float32).load(bind(), ReferenceBackend())
    for each, start in zip(media, (0, 2 * RATE), strict=True):
        (array,) = each.arrays.values()
        features = torch.frombuffer(bytearray(array.data), dtype=torch.float32).view(array.shape)
        with torch.inference_mode():
            found = model.encode("audio", {"input_features": features})
        wanted = heard(path, SOUND[start : start + 2 * RATE], pooled)
        assert len(found) == each.num_embeddings
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_texts_that_stand_for_sounds_become_marks(path: Path, expected: list[RequestOutput]) -> None:
    backend = Tokenizer.from_file(str(path / "tokenizer.json"))
    begin, end, unknown = (backend.token_to_id(each) for each in ("<|audio_start|>", "<|audio_end|>", "<unk>"))
    ids = list(expected[0].prompt_token_ids)
    assert ids.count(begin) == ids.count(end) == 4
    assert ids.count(unknown) == 10 + 10 + 10 + 3
    assert expected[1].prompt_token_ids.count(begin) == 1 + 2
    assert all(each.error is None for each in expected)
    assert VIDEO in expected[1].prompt_token_ids


@pytest.mark.parametrize(
    "args",
    [
        {"num_gpu_blocks_override": 10, "max_num_batched_tokens": 19},
        pytest.param({"enable_prefix_caching": False, "max_num_seqs": 1, "threads": 1}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_same_bits_in_any_schedule(path: Path, expected: list[RequestOutput], args: dict[str, Any]) -> None:
    assert bits(generate(path, PROMPTS * 2, **args)) == bits(expected) * 2


def test_a_sound_of_a_message_and_one_that_is_too_short(path: Path) -> None:
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    llm = LLM(str(path), dtype="float32", num_gpu_blocks_override=64, chat_template=template)
    with llm:
        content = [{"type": "audio", "audio": (SOUND, RATE)}, {"type": "text", "text": "w5"}]
        (chatted,) = llm.chat([{"role": "user", "content": content}], PARAMS)
        assert chatted.error is None
        assert sum(1 for each in chatted.prompt_token_ids if each == chatted.prompt_token_ids[0]) == 4
        (refused,) = llm.generate([{"prompt": MARK, "multi_modal_data": {"audio": (tone(0.05), RATE)}}], PARAMS)
        assert "lasts 0.050 s, expected at least 0.1 s" in str(refused.error)


def test_a_tokenizer_without_marks_is_refused_where_sounds_are_read(tmp_path: Path) -> None:
    path = make_minicpm_o(tmp_path)
    text = (path / "tokenizer.json").read_text()
    (path / "tokenizer.json").write_text(text.replace("<|audio_start|>", "<|begin audio|>"))
    encode = {"<unk>": [3]}
    with pytest.raises(CheckpointError, match=r"no token <\|audio_start\|>, .* set limit_mm_per_prompt audio=0"):
        WORDS.ids(lambda word: encode.get(word, [9, 9]))
    with pytest.raises(CheckpointError, match="no token"):
        generate(path, PROMPTS[2:])
    (text_alone,) = generate(path, PROMPTS[2:], limit_mm_per_prompt={"audio": 0})
    assert text_alone.error is None


@pytest.mark.long
def test_a_release_without_sounds_reads_images(tmp_path: Path) -> None:
    path = make_minicpm_o(tmp_path)
    edit_config(path, init_audio=False)
    refused, text = generate(path, [PROMPTS[0], PROMPTS[2]])
    assert "this model reads text and images" in str(refused.error)
    assert text.error is None


@pytest.mark.parametrize(
    ("changes", "sizes", "said"),
    [
        ({"audio_pool_step": 3}, {}, "audio_pool_step is 3, expected a divisor of 50"),
        ({"audio_chunk_length": 0.001}, {}, r"audio_chunk_length is 0.001, expected seconds from 0.02"),
        ({}, {"max_source_positions": 60}, "max_source_positions is 60, expected a multiple of 50"),
        ({}, {"encoder_ffn_dim": 64}, "encoder_ffn_dim is 64, expected four times d_model, which is 32"),
    ],
)
def test_sizes_of_another_encoder_are_refused(
    path: Path, changes: dict[str, Any], sizes: dict[str, Any], said: str
) -> None:
    values = json.loads((path / "config.json").read_text()) | changes
    values["audio_config"] |= sizes
    with pytest.raises(CheckpointError, match=said):
        minicpm_window(sound_section(Checkpoint(path, values)) or Section({}, "a"))
