"""MiniMax-M3: the release's config, the names of both layouts, and what the choice of blocks changes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.attention.backend import cache_layout
from octavo.config.released.minimax import minimax_settings
from octavo.config.section import Section
from octavo.core.model_shape import Indexed
from octavo.devices.reference.attention import ReferenceBackend
from octavo.errors import CheckpointError
from octavo.multimodal.image_writer import Context
from octavo.multimodal.image_writers import IMAGE_WRITERS
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import edit_config, make_checkpoint
from tests.fakes.vision import image, make_vision_checkpoint
from tests.fakes.vision_sizes import IMAGE
from tests.models.loading import read_config
from tests.models.paged_run import load, logits_of

TOKENS = [3 + 7 * each % 120 for each in range(30)]


def logits(path: Path, tokens: list[int] = TOKENS) -> torch.Tensor:
    return logits_of(load(path), tokens)


def text_config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    return config["text_config"]


def as_released(text: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a text model as the release has it: kinds of layers as numbers, rotation on one level."""
    sparse = {
        "use_sparse_attention": True,
        "sparse_index_dim": text.pop("index_head_dim"),
        "sparse_num_index_heads": text.pop("index_n_heads"),
        "sparse_topk_blocks": text.pop("index_topk_blocks"),
        "sparse_block_size": text.pop("index_block_size"),
        "sparse_local_block": text.pop("index_local_blocks"),
        "sparse_disable_index_value": [0, 1, 1],
        "sparse_score_type": "max",
        "sparse_init_block": 0,
        "sparse_attention_freq": [0, 1, 1],
    }
    for name in ("layer_types", "mlp_layer_types", "rope_parameters", "model_type"):
        del text[name]
    return text | {
        "sparse_attention_config": sparse,
        "moe_layer_freq": [0, 1, 1],
        "rope_theta": 10_000.0,
        "rotary_dim": 8,
        "partial_rotary_factor": 0.5,
        "hidden_act": "swigluoai",
        "swiglu_beta": 1.0,
        "use_gemma_norm": True,
        "attention_output_gate": False,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "num_mtp_modules": 7,
        "num_nextn_predict_layers": 1,
    }


def test_the_config_of_the_release_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint("minimax_m3_vl", tmp_path)
    expected = logits(path)
    edit_config(path, text_config=as_released(text_config(path)))
    with caplog.at_level(logging.INFO):
        assert torch.equal(logits(path), expected)
    assert "multi_modal_projector (4 tensors), patch_merge_mlp (4 tensors), vision_tower" in caplog.text


def test_the_text_model_has_the_names_of_transformers_class(tmp_path: Path) -> None:
    """Experts are stacked there, halves of gated MLPs lie in one tensor, and the indexer is a module of its own."""
    path = make_checkpoint("minimax_m3_vl", tmp_path)
    expected, stored, made = logits(path), load_file(path / "model.safetensors"), {}
    for name, tensor in stored.items():
        if not name.startswith("language_model."):
            continue
        name = name.removeprefix("language_model.")
        for released, own in (
            (".block_sparse_moe.e_score", ".mlp.gate.e_score"),
            (".block_sparse_moe.", ".mlp."),
            (".self_attn.index_", ".self_attn.indexer."),
        ):
            name = name.replace(released, own)
        made[name] = tensor
    for layer in range(3):
        start = f"model.layers.{layer}.mlp."
        for mlp in (start,) if layer == 0 else (f"{start}shared_experts.",):
            halves = [made.pop(f"{mlp}{each}_proj.weight") for each in ("gate", "up")]
            made[f"{mlp}gate_up_proj.weight"] = torch.cat(halves)
        if layer:
            w1, w2, w3 = (
                torch.stack([made.pop(f"{start}experts.{expert}.w{number}.weight") for expert in range(6)])
                for number in (1, 2, 3)
            )
            made |= {f"{start}experts.gate_up_proj": torch.cat((w1, w3), 1), f"{start}experts.down_proj": w2}
    save_file(made, path / "model.safetensors", metadata={"format": "pt"})
    text = {**text_config(path), "architectures": ["MiniMaxM3VLForCausalLM"]}
    edit_config(path, remove=("text_config", "vision_config"), **text)
    assert torch.equal(logits(path), expected)


def test_the_choice_counts_from_the_first_block_on_that_is_not_chosen(tmp_path: Path) -> None:
    chosen = logits(make_checkpoint("minimax_m3_vl", tmp_path / "chosen"))
    whole = logits(make_checkpoint("minimax_m3_vl", tmp_path / "whole", index_topk_blocks=20))
    assert torch.equal(chosen[:12], whole[:12])
    assert all(not torch.equal(*pair) for pair in zip(chosen[12:], whole[12:], strict=True))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("index_head_dim", 8),
        ("index_n_heads", 4),
        ("index_local_blocks", 4),
        ("layer_types", ["full_attention", "sliding_attention", "minimax_m3_sparse"]),
        ("sparse_init_block", 1),
        ("sparse_score_type", "mean"),
        ("attention_output_gate", True),
        ("swiglu_beta", 0.5),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(name: str, value: Any, tmp_path: Path) -> None:
    path = make_checkpoint("minimax_m3_vl", tmp_path)
    edit_config(path, text_config={**text_config(path), name: value})
    with pytest.raises(CheckpointError, match=name):
        read_config(path)


def test_an_image_is_read_by_the_config_of_the_release(tmp_path: Path) -> None:
    path = make_vision_checkpoint("minimax_m3", tmp_path)
    prompt: Any = {"prompt_token_ids": [20, 21, IMAGE, 30], "multi_modal_data": {"image": image(3, 120, 90)}}

    def outputs() -> Any:
        with LLM(str(path), dtype="float32", max_model_len=200) as llm:
            [made] = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=5, logprobs=1))
            return made.prompt_token_ids, made.outputs

    expected, config = outputs(), json.loads((path / "config.json").read_text())
    vision = {name: value for name, value in config["vision_config"].items() if name != "rope_parameters"}
    vision |= {"model_type": "clip_vision_model", "position_embedding_type": "rope", "rope_mode": "3d"}
    vision |= {"rope_theta": 10_000.0, "projection_dim": 6144, "vision_segment_max_frames": 4}
    text = as_released(config["text_config"]) | {"architectures": ["MiniMaxM3SparseForCausalLM"]}
    edit_config(path, text_config=text, vision_config=vision, image_seq_length=576)
    assert outputs() == expected


@pytest.mark.parametrize("size", [None, [672, 672]], ids=["unstated", "as released"])
def test_images_have_the_sizes_of_the_family(size: list[int] | None) -> None:
    settings = minimax_settings(Section({"image_processor_type": "MiniMaxM3VLImageProcessor", "size": size}, "a"))
    assert settings["image_processor_type"] == "Qwen2VLImageProcessor"
    assert settings["size"] == {"shortest_edge": 3136, "longest_edge": 451_584}
    assert minimax_settings(Section({"size": {"shortest_edge": 784}}, "a"))["size"] == {"shortest_edge": 784}


def test_an_image_stands_between_its_marks() -> None:
    marks = {"]<]start of image[>[": [7], "]<]end of image[>[": [8]}
    context = Context(Section({"vision_config": {"spatial_merge_size": 2}}, "config.json"), {}, marks.__getitem__)
    arrays = {"image_grid_thw": np.array([[1, 4, 6]])}
    assert IMAGE_WRITERS["minimax"].tokens(context, 5, arrays) == [7, *[5] * 6, 8]


def test_chosen_keys_are_not_in_the_codes_of_a_quantised_cache() -> None:
    for dtype, expected in ((torch.float32, torch.float32), (torch.int8, torch.bfloat16)):
        layout = cache_layout(ReferenceBackend(dtype), Indexed(2, 16, 8, 12), 5, 16)
        assert layout.shape == (1, 5, 16 * (2 * 2 * 16 + 8))
        assert layout.dtype == expected


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_text_is_generated_with_a_quantised_cache(device: str, tmp_path: Path) -> None:
    path = write_byte_tokenizer(make_checkpoint("minimax_m3_vl", tmp_path, vocab_size=300))
    with LLM(str(path), device=device, kv_cache_dtype="int8", max_model_len=96, block_size=16) as llm:
        both = llm.generate([TOKENS, TOKENS[:5]], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        alone = [
            llm.generate(each, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))[0]
            for each in (TOKENS, TOKENS[:5])
        ]
    assert [each.outputs[0].token_ids for each in both] == [each.outputs[0].token_ids for each in alone]
