"""Releases with an encoder of another family give what that family's give."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.image_fits import num_queries
from octavo.config.media.images import image_settings
from octavo.config.released import ovis as released_ovis
from octavo.config.section import Section
from octavo.devices.reference.attention import ReferenceBackend
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.models.loader import LoadedModel
from octavo.multimodal.image_prompts import ImagePrompts
from octavo.multimodal.processors.phi3v_images import Phi3VImages
from octavo.multimodal.processors.step_images import StepImages
from octavo.ops.registry import bind
from tests.e2e.test_images import PARAMS, PROMPTS, assert_agrees, bits, generate
from tests.fakes.checkpoints import edit_config, make_checkpoint
from tests.fakes.rank_threads import llm_of_ranks
from tests.fakes.vision import image, load_vision_oracle, make_vision_checkpoint, write_tokenizer
from tests.fakes.vision_sizes import IMAGE, PIXELS, SIDE, TOWER, VIDEO, Settings, tf

pytestmark = pytest.mark.slow

PADDLE = "PaddleOCRVLForConditionalGeneration"
VISION = {**TOWER, "image_size": 98, "hidden_act": "gelu_pytorch_tanh"}


@pytest.mark.long
def test_intern_s1_is_internvl_by_another_name(tmp_path: Path) -> None:
    path = make_vision_checkpoint("internvl", tmp_path)
    expected = bits(generate(path, PROMPTS))
    vision = json.loads((path / "config.json").read_text())["vision_config"]
    names = {"architectures": ["InternS1ForConditionalGeneration"], "model_type": "interns1"}
    edit_config(path, **names, vision_config={**vision, "model_type": "interns1_vision"})
    assert bits(generate(path, PROMPTS)) == expected


def test_intern_s2_is_qwen_3_5() -> None:
    text = {"model_type": "interns2_text", "hidden_size": 32}
    config = {"architectures": ["InternS2PreviewForConditionalGeneration"], "text_config": text, "vision_config": {}}
    found = Checkpoint(Path("intern"), config)
    assert (found.architecture, found.text_model_type) == ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe")


def as_keye(path: Path, family: str = "Keye") -> Path:
    """Make a checkpoint of PaddleOCR-VL one of Keye-VL, whose text model is Qwen3."""
    text = make_checkpoint("qwen3", path.parent / "text", num_hidden_layers=1)
    tensors = load_file(path / "model.safetensors")
    found = {name: each for name, each in tensors.items() if name.startswith(("mlp_AR.", "visual."))}
    if family == "KeyeVL1_5":
        for each in ("weight", "bias"):
            found[f"mlp_AR.pre_norm.{each}"] = found[f"mlp_AR.pre_norm.{each}"].repeat(4)
    save_file({**load_file(text / "model.safetensors"), **found}, path / "model.safetensors")
    config, own = (json.loads((each / "config.json").read_text()) for each in (text, path))
    rope = {"rope_type": "default", "type": "default", "mrope_section": [4, 2, 2]}
    ids = {name: own[name] for name in ("image_token_id", "video_token_id", "vision_config")}
    names = {"architectures": [f"{family}ForConditionalGeneration"], "model_type": family}
    del config["rope_parameters"]
    written = {**config, **ids, **names, "rope_scaling": rope, "rope_theta": 1e4, "vocab_size": config["vocab_size"]}
    (path / "config.json").write_text(json.dumps(written))
    settings = json.loads((path / "preprocessor_config.json").read_text())
    settings["image_processor_type"] = "SiglipImageProcessor"
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    return path


def encoded(path: Path) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return what octavo's encoder makes of an image, and what it is given."""
    checkpoint = Checkpoint.open(path)
    settings = image_settings(checkpoint)
    assert settings is not None
    prompts = ImagePrompts(checkpoint, settings, lambda _: [40], {"image": 1})
    made = prompts.arrays(image(0))
    arrays = {name: torch.from_numpy(made[name]) for name in prompts.writer.reads}
    model: Any = LoadedModel.open(checkpoint, Mesh.single(), torch.float32).load(bind(), ReferenceBackend())
    with torch.inference_mode():
        return model.encode("image", arrays), arrays


@pytest.mark.parametrize("family", [pytest.param("Keye", marks=pytest.mark.long), "KeyeVL1_5"])
def test_keye_has_the_encoder_of_paddleocr(family: str, tmp_path: Path) -> None:
    path = make_vision_checkpoint("paddleocr_vl", tmp_path / "model")
    oracle = load_vision_oracle(path, "PaddleOCRVLForConditionalGeneration").model
    found, arrays = encoded(as_keye(path, family))
    with torch.inference_mode():
        expected = oracle.get_image_features(**arrays).pooler_output
        if family == "KeyeVL1_5":  # joins neighbours before the norm
            (seen,) = oracle.visual(arrays["pixel_values"][None], arrays["image_grid_thw"]).last_hidden_state[None]
            own, (_, rows, columns) = oracle.projector, arrays["image_grid_thw"][0].tolist()
            blocks = seen.reshape(rows // 2, 2, columns // 2, 2, 32).transpose(1, 2).reshape(-1, 128)
            norm = own.pre_norm
            joined = F.layer_norm(blocks, (128,), norm.weight.repeat(4), norm.bias.repeat(4), 1e-5)
            expected = own.linear_2(F.gelu(own.linear_1(joined)))
    torch.testing.assert_close(found, expected if isinstance(expected, torch.Tensor) else torch.cat(expected))
    if family == "Keye":  # what follows the encoder is the same
        assert bits(generate(path, PROMPTS)) == bits(generate(path, PROMPTS, max_num_batched_tokens=5))


def as_bee(path: Path) -> Any:
    """Make a checkpoint of LLaVA-OneVision one of Bee; return transformers' class with the projection of Bee."""
    oracle = load_vision_oracle(path, "LlavaOnevisionForConditionalGeneration")
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    (name,) = (each.removesuffix("linear_1.weight") for each in tensors if each.endswith("projector.linear_1.weight"))
    shapes = {"linear_1.weight": (128, 32), "linear_1.bias": (128,), "linear_2.weight": (32, 128)}
    own = {key: torch.randn(shape, generator=generator) * 0.2 for key, shape in shapes.items()}
    own |= {f"pre_norm.{key}": torch.rand(32, generator=generator) + 0.5 for key in ("weight", "bias")}
    save_file(tensors | {f"{name}{key}": each for key, each in own.items()}, path / "model.safetensors")
    own["linear_2.bias"] = tensors[f"{name}linear_2.bias"]

    class Projector(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.layer_norm(x, (32,), own["pre_norm.weight"], own["pre_norm.bias"], 1e-6)
            x = F.gelu(F.linear(x, own["linear_1.weight"], own["linear_1.bias"]))
            return F.linear(x, own["linear_2.weight"], own["linear_2.bias"])

    oracle.model.multi_modal_projector = Projector()
    edit_config(path, architectures=["BeeForConditionalGeneration"], model_type="bee")
    settings = json.loads((path / "preprocessor_config.json").read_text())
    settings["image_processor_type"] = "BeeImageProcessor"
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    return oracle


@pytest.mark.long
def test_bee_is_llava_onevision_with_a_norm_before_a_wide_projection(tmp_path: Path) -> None:
    oracle = as_bee(make_vision_checkpoint("llava_onevision", tmp_path))
    seen = [image(3, 1, 1), image(4, 300, 20), image(5, 100, 110)]
    prompts = [*PROMPTS[:3], *({"prompt": "<image> w5", "multi_modal_data": {"image": each}} for each in seen)]
    args: dict[str, Any] = {"num_gpu_blocks_override": 256}
    whole = generate(tmp_path, prompts, **args)
    settings = image_settings(checkpoint := Checkpoint.open(tmp_path))
    assert settings is not None
    processor = ImagePrompts(checkpoint, settings, lambda _: [], {"image": 16})
    for prompt, output in zip(prompts, whole, strict=True):
        given = prompt["multi_modal_data"]["image"]
        arrays = processor.arrays(*(given if isinstance(given, list) else [given]))
        inputs = {name: torch.from_numpy(arrays[name]) for name in processor.writer.reads}
        assert output.prompt_token_ids is not None
        drawn = list(output.outputs[0].token_ids)
        with torch.inference_mode():
            ids = torch.tensor([[*output.prompt_token_ids, *drawn]])
            assert_agrees(output, drawn, oracle(input_ids=ids, **inputs).logits[0])
    assert bits(generate(tmp_path, prompts * 2, max_num_batched_tokens=5, **args)) == bits(whole) * 2
    with llm_of_ranks(tmp_path, 2, dtype="float32", max_num_seqs=4, **args) as llm:
        assert bits(llm.generate(prompts * 2, PARAMS)) == bits(whole) * 2


@pytest.mark.long
def test_opencua_is_qwen_with_positions_in_line(tmp_path: Path) -> None:
    path = make_vision_checkpoint("qwen2_5_vl", tmp_path)
    config = json.loads((path / "config.json").read_text())
    text = {name: each for name, each in config["text_config"].items() if name != "rope_parameters"}
    text |= {"model_type": "qwen2", "rope_theta": 1e4}
    oracle = load_vision_oracle(path, "Qwen2_5_VLForConditionalGeneration").model
    (path / "config.json").unlink()
    names = {"architectures": ["OpenCUAForConditionalGeneration"], "model_type": "opencua"}
    written = {**names, "text_config": text, "vision_config": config["vision_config"]}
    written["media_placeholder_token_id"] = config["image_token_id"]
    (path / "config.json").write_text(json.dumps(written))
    tensors = load_file(path / "model.safetensors")
    renamed = {re.sub(r"^(?:model\.)?visual\.", "vision_tower.", name): each for name, each in tensors.items()}
    save_file(
        {re.sub(r"^model\.(language_model\.)?", "language_model.model.", n): t for n, t in renamed.items()},
        path / "model.safetensors",
    )
    found, arrays = encoded(path)
    with torch.inference_mode():
        expected = oracle.get_image_features(**arrays).pooler_output
    torch.testing.assert_close(found, torch.cat(list(expected)))
    assert bits(generate(path, PROMPTS)) == bits(generate(path, PROMPTS, max_num_batched_tokens=5))


def make_phi3v(path: Path) -> Path:
    """Write a random model with the text model of Phi-3, by the names of Phi-3-vision."""
    text = make_checkpoint("phi3", path / "text", num_hidden_layers=1)
    config = json.loads((text / "config.json").read_text())
    width, generator = config["hidden_size"], torch.Generator().manual_seed(0)
    tower = tf.CLIPVisionModel(tf.CLIPVisionConfig(**TOWER))
    stored = {
        "glb_GN": torch.empty(1, 1, 128),
        "sub_GN": torch.empty(1, 1, 1, 128),
        "img_projection.0.weight": torch.empty(width, 128),
        "img_projection.0.bias": torch.empty(width),
        "img_projection.2.weight": torch.empty(width, width),
        "img_projection.2.bias": torch.empty(width),
        **{f"img_processor.vision_model.{name}": each for name, each in tower.state_dict().items()},
    }
    made = {
        f"model.vision_embed_tokens.{name}": torch.randn(each.shape, generator=generator) * 0.2
        for name, each in stored.items()
        if not name.endswith("position_ids")
    }
    tensors = load_file(text / "model.safetensors")
    made["model.vision_embed_tokens.wte.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, **made}, path / "model.safetensors")
    embed = {"embedding_cls": "image", "hd_transform_order": "sub_glb", "projection_cls": "mlp"}
    embed |= {"use_hd_transform": True, "with_learnable_separator": True}
    own = {"architectures": ["Phi3VForCausalLM"], "model_type": "phi3_v", "embd_layer": embed, "image_token_id": IMAGE}
    own |= {"img_processor": {"image_dim_out": 32, "name": "clip_vision_model", "num_img_tokens": 4}}
    vision = {**TOWER, "hidden_act": "quick_gelu"}
    (path / "config.json").write_text(json.dumps({**config, **own, "vision_config": vision}))
    Settings("Phi3VImageProcessor", num_crops=4).save_pretrained(path)
    write_tokenizer(path)
    return path


def test_phi_3_vision_joins_neighbours_of_clip(tmp_path: Path) -> None:
    path = make_phi3v(tmp_path)
    found, arrays = encoded(path)
    tensors = {
        name.removeprefix("model.vision_embed_tokens."): each
        for name, each in load_file(path / "model.safetensors").items()
    }
    tower = tf.CLIPVisionModel(tf.CLIPVisionConfig(**TOWER)).eval()
    start = "img_processor.vision_model."
    tower.load_state_dict({name.removeprefix(start): each for name, each in tensors.items() if name.startswith(start)})
    pixels, (height, width) = arrays["pixel_values"][0], arrays["image_sizes"][0].tolist()
    assert (height, width, len(pixels)) == (112, 112, 5)  # 84 x 56 pixels become two tiles by two
    with torch.inference_mode():
        seen = tower(pixels, output_hidden_states=True).hidden_states[-2][:, 1:].view(5, 2, 2, 2, 2, 32)
        rows = []
        for tiles in (((1, 2), (3, 4)), ((0,),)):
            for row in tiles:
                for line in range(2):
                    rows += [seen[tile, line, :, place].reshape(-1) for tile in row for place in range(2)]
                    rows.append(tensors["sub_GN"].view(-1))
            rows.append(tensors["glb_GN"].view(-1))
        x = torch.stack(rows[:-1])
        x = F.gelu(F.linear(x, tensors["img_projection.0.weight"], tensors["img_projection.0.bias"]))
        expected = F.linear(x, tensors["img_projection.2.weight"], tensors["img_projection.2.bias"])
    torch.testing.assert_close(found, expected)
    whole = bits(generate(path, PROMPTS))
    assert bits(generate(path, PROMPTS, max_num_batched_tokens=5)) == whole
    numbered = [{**each, "prompt": each["prompt"].replace("<image>", "<|image_1|>", 1)} for each in PROMPTS[:3]]
    numbered[1]["prompt"] = numbered[1]["prompt"].replace("<image>", "<|image_2|>")
    assert bits(generate(path, numbered)) == whole[:3]


@pytest.mark.parametrize("size", [(84, 56), (40, 90), (300, 20), (50, 50)])
def test_pixels_of_phi_3_vision_are_those_of_the_release(size: tuple[int, int], tmp_path: Path) -> None:
    settings = {"image_processor_type": "Phi3VImageProcessor", "num_crops": 4, "image_mean": [0.5] * 3}
    section = Section({**settings, "image_std": [0.5] * 3}, "settings")
    given = image(0, *size)
    found = Phi3VImages(section, Section({"vision_config": TOWER}, "config.json"))([given], "np")
    lying = given.transpose(Image.Transpose.TRANSPOSE) if given.width < given.height else given
    ratio, scale = lying.width / lying.height, 1
    while scale * math.ceil(scale / ratio) <= 4:
        scale += 1
    width = (scale - 1) * 56
    scaled = lying.resize((width, int(width / ratio)), Image.Resampling.BILINEAR)
    height = math.ceil(scaled.height / 56) * 56
    filled = Image.new("RGB", (width, height), (255, 255, 255))
    filled.paste(scaled, (0, (height - scaled.height) // 2))
    filled = filled.transpose(Image.Transpose.TRANSPOSE) if given.width < given.height else filled
    whole = torch.from_numpy(np.asarray(filled).copy()).permute(2, 0, 1)[None] / 255 * 2 - 1
    small = F.interpolate(whole, (56, 56), mode="bicubic")
    corners = [(top, left) for top in range(0, filled.height, 56) for left in range(0, filled.width, 56)]
    expected = torch.cat([small, *(whole[:, :, top : top + 56, left : left + 56] for top, left in corners)])
    assert found["image_sizes"].tolist() == [[filled.height, filled.width]]
    torch.testing.assert_close(torch.from_numpy(found["pixel_values"][0]), expected, atol=1e-5, rtol=0)


def idefics2_tower() -> Any:
    from transformers.models.idefics2 import configuration_idefics2, modeling_idefics2

    config = configuration_idefics2.Idefics2VisionConfig(**VISION)
    return modeling_idefics2.Idefics2VisionTransformer(config).eval()


def make_minicpm(path: Path, version: str, family: str) -> Path:
    """Write a random model with a text model of a family, by the names of MiniCPM-V."""
    text = make_checkpoint(family, path / "text", num_hidden_layers=1, hidden_size=128)
    config = json.loads((text / "config.json").read_text())
    tower = idefics2_tower()
    width, generator = 128, torch.Generator().manual_seed(0)
    stored = {f"vpm.{name}": each for name, each in tower.state_dict().items()}
    shapes = {"query": (4, width), "proj": (width, width), "kv_proj.weight": (width, 32)}
    shapes |= {"attn.in_proj_weight": (3 * width, width), "attn.in_proj_bias": (3 * width,)}
    shapes |= {"attn.out_proj.weight": (width, width), "attn.out_proj.bias": (width,)}
    shapes |= {f"ln_{name}.{part}": (width,) for name in ("q", "kv", "post") for part in ("weight", "bias")}
    stored |= {f"resampler.{name}": torch.empty(shape) for name, shape in shapes.items()}
    made = {name: torch.randn(each.shape, generator=generator) * 0.2 for name, each in stored.items()}
    made |= {f"llm.{name}": each for name, each in load_file(text / "model.safetensors").items()}
    save_file(made, path / "model.safetensors")
    own = {"architectures": ["MiniCPMV"], "model_type": "minicpmv", "version": version, "query_num": 4}
    own |= {"slice_mode": True, "image_token_id": VIDEO}  # <unk> is all that the tokenizer does not know
    (path / "config.json").write_text(json.dumps({**config, **own, "vision_config": VISION}))
    settings = {"patch_size": 14, "max_slice_nums": 4, "scale_resolution": 56, "use_image_id": True}
    (path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "MiniCPMVImageProcessor", **settings})
    )
    write_tokenizer(path)
    return path


@pytest.mark.parametrize(
    ("version", "family"),
    [(2.6, "qwen2"), *(pytest.param(*each, marks=pytest.mark.long) for each in ((4.0, "llama"), (4.5, "qwen3")))],
)
def test_minicpm_v_resamples_slices(version: str, family: str, tmp_path: Path) -> None:
    path = make_minicpm(tmp_path, version, family)
    found, arrays = encoded(path)
    sizes = arrays["target_sizes"].tolist()
    assert len(found) == 4 * len(sizes) == 12  # the whole image and two slices
    tensors = load_file(path / "model.safetensors")
    part = {name.removeprefix("resampler."): each for name, each in tensors.items()}
    tower = idefics2_tower()
    tower.load_state_dict({n.removeprefix("vpm."): each for n, each in tensors.items() if n.startswith("vpm.")})
    attention = torch.nn.MultiheadAttention(128, 1)
    attention.load_state_dict({n.removeprefix("attn."): each for n, each in part.items() if n.startswith("attn.")})
    expected = []
    with torch.inference_mode():
        for pixels, (rows, columns) in zip(arrays["pixel_values"], sizes, strict=True):
            seen = tower(pixels[None, :, : rows * 14, : columns * 14]).last_hidden_state[0]
            norms = {name: (part[f"ln_{name}.weight"], part[f"ln_{name}.bias"], 1e-6) for name in ("q", "kv", "post")}
            x = F.layer_norm(F.linear(seen, part["kv_proj.weight"]), (128,), *norms["kv"])
            rates = [10_000 ** -(each / 32) for each in range(32)]
            places = [
                [turn(place * rate) for place in (column, row) for turn in (math.sin, math.cos) for rate in rates]
                for row in range(rows)
                for column in range(columns)
            ]
            queries = F.layer_norm(part["query"], (128,), *norms["q"])
            made = attention(queries, x + torch.tensor(places), x, need_weights=False)[0]
            expected.append(F.layer_norm(made, (128,), *norms["post"]) @ part["proj"])
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-4, rtol=1e-4)
    prompts = [
        {**each, "prompt": each["prompt"].replace("<image>", "(<image>./</image>)")} if isinstance(each, dict) else each
        for each in PROMPTS
    ]
    whole = generate(path, prompts)
    assert bits(generate(path, prompts, max_num_batched_tokens=5)) == bits(whole)
    assert whole[0].prompt_token_ids is not None
    assert whole[0].prompt_token_ids.count(VIDEO) == 12


def test_sizes_of_images_that_aria_has_no_queries_for_are_refused() -> None:
    config = Section({"vision_config": {"patch_size": 14}}, "config.json")
    assert [num_queries(config, side) for side in (490, 980)] == [128, 256]
    stated = Section(
        {"vision_config": {"patch_size": 14}, "projector_patch_to_query_dict": {"1225": 64}}, "config.json"
    )
    assert num_queries(stated, 490) == 64
    with pytest.raises(CheckpointError, match="expected a number of queries for 4,900 patches"):
        num_queries(stated, 980)


def make_ovis(path: Path) -> Path:
    """Make a checkpoint of PaddleOCR-VL one of Ovis 2.5, whose text model is Qwen3."""
    path = make_vision_checkpoint("paddleocr_vl", path)
    text = make_checkpoint("qwen3", path / "text", num_hidden_layers=1)
    config = json.loads((text / "config.json").read_text())
    generator = torch.Generator().manual_seed(0)
    found = {
        f"visual_tokenizer.vit.{name.removeprefix('visual.')}": each
        for name, each in load_file(path / "model.safetensors").items()
        if name.startswith("visual.")
    }
    found |= {f"llm.{name}": each for name, each in load_file(text / "model.safetensors").items()}
    shapes = {"head.0.weight": (12, 128), "head.1.weight": (12,), "head.1.bias": (12,)}
    found |= {f"visual_tokenizer.{name}": torch.randn(each, generator=generator) for name, each in shapes.items()}
    found["vte.weight"] = torch.randn(16, config["hidden_size"], generator=generator)
    save_file(found, path / "model.safetensors")
    stated = json.loads((path / "config.json").read_text())["vision_config"]
    vision = {name: stated[name] for name in TOWER}
    vision |= {"hidden_stride": 2, "temporal_patch_size": 1, "use_rope": True, "preserve_original_pe": True}
    vision |= {"fullatt_block_indexes": None, "num_patches": -1, "model_type": "siglip2_navit", "window_size": 112}
    own = {"architectures": ["Ovis2_5"], "model_type": "ovis2_5", "visual_vocab_size": 16, "image_token_id": IMAGE}
    (path / "config.json").write_text(json.dumps({**own, "llm_config": config, "vit_config": vision}))
    settings = {"size": {"height": 512, "width": 512}, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (path / "preprocessor_config.json").write_text(
        json.dumps({**settings, "image_processor_type": "SiglipImageProcessor"})
    )
    return path


def test_ovis_2_5_reads_shares_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(released_ovis, "_PIXELS", PIXELS)
    oracle = load_vision_oracle(make_vision_checkpoint("paddleocr_vl", tmp_path / "other"), PADDLE).model.visual
    path = make_ovis(tmp_path / "model")
    found, arrays = encoded(path)
    tensors = load_file(path / "model.safetensors")
    tower, grid = oracle.vision_model, arrays["image_grid_thw"]
    _, rows, columns = grid[0].tolist()
    with torch.inference_mode():
        table = tower.embeddings.position_embedding.weight.T.view(1, 32, 4, 4)
        places = F.interpolate(table, (rows, columns), mode="bicubic")[0].flatten(1).T
        x = tower.embeddings.patch_embedding(arrays["pixel_values"]).flatten(1) + places
        seen = tower.encoder(inputs_embeds=x, grid_thw=grid).last_hidden_state.view(rows, columns, 32)
        blocks = [
            seen[row : row + 2, column : column + 2].reshape(-1)
            for row in range(0, rows, 2)
            for column in range(0, columns, 2)
        ]
        norm = [tensors[f"visual_tokenizer.head.1.{each}"] for each in ("weight", "bias")]
        made = F.layer_norm(torch.stack(blocks) @ tensors["visual_tokenizer.head.0.weight"].T, (12,), *norm)
        vectors = tensors["vte.weight"]
        expected = torch.cat([vectors[12:13], made.softmax(-1) @ vectors[:12], vectors[13:14]])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.long
def test_images_of_ovis_2_5_have_the_same_bits_in_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(released_ovis, "_PIXELS", PIXELS)
    path = make_ovis(tmp_path)
    assert bits(generate(path, PROMPTS)) == bits(generate(path, PROMPTS, max_num_batched_tokens=5))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architectures": ["MiniCPMV"], "version": 2.5}, "version is 2.5, expected one of 2.6, 4.0, 4.5"),
        ({"architectures": ["MiniCPMV"], "version": 2.6}, "vision_config is missing, expected the sizes"),
        ({"architectures": ["Ovis2_5"], "llm_config": {}}, "vit_config is missing, expected the sizes"),
        (
            {"architectures": ["Ovis2_5"], "llm_config": {"a": 1}, "vit_config": {"fullatt_block_indexes": "1|2"}},
            "vit_config.fullatt_block_indexes is .*, expected null",
        ),
        (
            {"architectures": ["Phi3VForCausalLM"], "embd_layer": {"hd_transform_order": "glb_sub"}},
            "hd_transform_order is .glb_sub., expected .sub_glb.",
        ),
        (
            {"architectures": ["Phi3VForCausalLM"], "img_processor": {"layer_idx": 25}},
            "img_processor.layer_idx is 25, expected a layer of the encoder, which has 24",
        ),
    ],
)
def test_values_that_no_release_has_are_refused_by_name(config: dict[str, Any], said: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModel), match=said):
        Checkpoint(Path("released"), config)


@pytest.mark.parametrize("size", [(84, 56), (50, 50), (300, 20), (57, 90), (400, 320)])
def test_pixels_of_step_3_7_are_those_of_the_release(size: tuple[int, int]) -> None:
    settings = Section({"size": SIDE, "tile_size": 28, "max_image_size": 224}, "settings")
    given = image(0, *size)
    found = StepImages(settings, Section({}, "config.json"))([given], "np")
    if min(size) < 32:
        filled = Image.new("RGB", (max(size), max(size)))
        filled.paste(given, (0, 0))
        given = filled
    scale = min(1.0, 224 / max(given.size))
    given = given.resize((int(given.width * scale), int(given.height * scale)), Image.Resampling.BILINEAR)
    longer, shorter = max(given.size), min(given.size)
    window = (shorter if longer / shorter > 1.5 else 0) if longer < 56 else 28
    expected = []
    if window:
        sides = [window * (each // window + (each % window > 0.2 * window)) for each in given.size]
        scaled = given.resize(tuple(sides), Image.Resampling.BILINEAR)
        corners = [(x, y) for y in range(0, sides[1], window) for x in range(0, sides[0], window)]
        expected = [scaled.crop((x, y, x + window, y + window)) for x, y in corners]
        assert found["grids"].tolist() == [[sides[1] // window, sides[0] // window]]
        tiles = torch.cat([of_release(each, 28) for each in expected])
        torch.testing.assert_close(torch.from_numpy(found["pixel_values_local"]), tiles, atol=1e-4, rtol=0)
    assert found["num_local_patches"].tolist() == [len(expected)]
    torch.testing.assert_close(torch.from_numpy(found["pixel_values"]), of_release(given, 56), atol=1e-4, rtol=0)


def of_release(given: Any, side: int) -> torch.Tensor:
    """Return [1, 3, side, side], normalised before it is scaled."""
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    pixels = torch.from_numpy(np.asarray(given).copy()).permute(2, 0, 1)[None] / 255
    pixels = (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    return F.interpolate(pixels, (side, side), mode="bilinear", antialias=True)


@pytest.mark.long
def test_step_vl_is_step_3_7_with_another_text_model(tmp_path: Path) -> None:
    path = make_vision_checkpoint("step3p7", tmp_path)
    expected, _ = encoded(path)
    text = make_checkpoint("qwen3", tmp_path / "text", num_hidden_layers=1, hidden_size=32)
    config = json.loads((path / "config.json").read_text())
    own = json.loads((text / "config.json").read_text())
    names = {"architectures": ["StepVLForConditionalGeneration"], "model_type": "step_robotics"}
    (path / "config.json").write_text(json.dumps({**config, **names, "text_config": own}))
    tensors = load_file(path / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if "vision_model" in name or "vit_large" in name}
    save_file({**kept, **load_file(text / "model.safetensors")}, path / "model.safetensors")
    found, _ = encoded(path)
    assert torch.equal(found, expected)
    assert bits(generate(path, PROMPTS)) == bits(generate(path, PROMPTS, max_num_batched_tokens=5))
