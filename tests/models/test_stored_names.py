"""Published layouts: prefixes, tensors that text is generated without, and those that must not be skipped."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Axis, Mesh
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.models.loader import LoadedModel
from tests.fakes.checkpoints import (
    edit_config,
    edit_tensors,
    family_config,
    make_checkpoint,
    rename_tensors,
    to_layout_with_images,
)
from tests.fakes.vision import load_vision_oracle, make_vision_checkpoint
from tests.models.paged_run import load, logits_of


def logits(path: Path) -> torch.Tensor:
    return logits_of(load(path), [5, 9, 77, 30])


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model.text_model."])
@pytest.mark.parametrize(
    ("family", "architecture", "model_type"),
    [
        ("exaone4", "Exaone4_5_ForConditionalGeneration", "exaone4_5_text"),
        ("gemma3", "Gemma3ForConditionalGeneration", "gemma3_text"),
        ("gemma3n", "Gemma3nForConditionalGeneration", "gemma3n_text"),
        ("llama4", "Llama4ForConditionalGeneration", "llama4_text"),
        ("mistral", "Mistral3ForConditionalGeneration", "mistral"),
        ("mistral4", "Mistral3ForConditionalGeneration", "mistral4"),
        ("qwen3", "Qwen3VLForConditionalGeneration", "qwen3_vl_text"),
    ],
)
def test_the_text_model_of_one_that_reads_images_is_loaded_alone(
    family: str, architecture: str, model_type: str, prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint(family, tmp_path)
    expected = logits(path)
    to_layout_with_images(path, architecture, prefix, model_type=model_type)
    with caplog.at_level(logging.INFO):
        assert torch.equal(logits(path), expected)
    assert "multi_modal_projector (1 tensors), vision_tower (2 tensors)" in caplog.text
    assert f"skipped what {architecture} generates text without" in caplog.text


def test_gemma_3_as_the_hub_has_it(tmp_path: Path) -> None:
    """Keys that have their usual values are left out, and rotation is described by the older ones."""
    usual = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 6, "layer_types": None}
    rope = {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}}
    path = make_checkpoint("gemma3", tmp_path, **usual, rope_parameters=rope)
    expected = logits(path)
    left_out = ("num_attention_heads", "num_key_value_heads", "layer_types", "max_position_embeddings")
    absent = dict.fromkeys((*left_out, "rope_parameters", "hidden_activation", "rms_norm_eps"))
    scaling = {"factor": 8.0, "rope_type": "linear"}
    name = "Gemma3ForConditionalGeneration"
    to_layout_with_images(path, name, "language_model.model.", **absent, rope_scaling=scaling)
    assert torch.equal(logits(path), expected)


def test_gemma_3n_as_the_hub_has_it(tmp_path: Path) -> None:
    """Rotation is described by the older keys, and the others have their usual values where they are left out."""
    usual = {"num_hidden_layers": 12, "layer_types": None, "activation_sparsity_pattern": None}
    rope = {"full_attention": {"rope_type": "default", "rope_theta": 5e5}, "sliding_attention": {"rope_theta": 3e3}}
    path = make_checkpoint("gemma3n", tmp_path, **usual, num_kv_shared_layers=5, rope_parameters=rope)
    expected = logits(path)
    absent = dict.fromkeys(("num_key_value_heads", "layer_types", "activation_sparsity_pattern", "rope_parameters"))
    absent |= dict.fromkeys(("altup_num_inputs", "altup_active_idx", "altup_correct_scale", "final_logit_softcapping"))
    older = {"rope_theta": 5e5, "rope_local_base_freq": 3e3, "intermediate_size": [56] * 12}
    to_layout_with_images(path, "Gemma3nForConditionalGeneration", **absent, **older)
    assert torch.equal(logits(path), expected)


def test_olmo_hybrid_as_the_hub_has_it(tmp_path: Path) -> None:
    """A convolution for each projection and two names of norms; transformers writes thirds, and these names alone."""
    path = make_checkpoint("olmo_hybrid", tmp_path)
    expected = logits(path)
    tensors, changes = load_file(path / "model.safetensors"), {}
    for layer in (0, 2):
        name = f"model.layers.{layer}.linear_attn.{{}}_conv1d.weight"
        whole = torch.cat([tensors[name.format(each)] for each in "qkv"])
        changes |= {name.format(each): part for each, part in zip("qkv", whole.split([16, 16, 48]), strict=True)}
    written = "model.layers.1.feedforward_layer_norm.weight"
    changes["model.layers.1.post_attention_layernorm.weight"] = tensors[written]
    edit_tensors(path, remove=(written,), **changes)
    assert torch.equal(logits(path), expected)


def test_kimi_linear_as_the_hub_has_it(tmp_path: Path) -> None:
    path = make_checkpoint("kimi_linear", tmp_path)
    expected = logits(path)
    layers = {"full_attn_layers": [2], "kda_layers": [1, 3]}
    sizes = {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4}
    left_out = ("layer_types", "mlp_layer_types", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    edit_config(path, remove=left_out, linear_attn_config=layers | sizes, first_k_dense_replace=1)
    rename_tensors(path, "model.layers.0.block_sparse_moe.", "model.layers.0.mlp.")
    assert torch.equal(logits(path), expected)


def test_internlm_2_as_the_hub_has_it(tmp_path: Path) -> None:
    """Queries, keys and values are one tensor: those of the first head of keys, then those of the next."""
    path = make_checkpoint("llama", tmp_path)
    expected, tensors, changes = logits(path), load_file(path / "model.safetensors"), {}
    for layer in (0, 1):
        start = f"model.layers.{layer}."
        q, k, v = (tensors[f"{start}self_attn.{each}_proj.weight"].view(2, -1, 8, 32) for each in "qkv")
        changes[f"{start}attention.wqkv.weight"] = torch.cat((q, k, v), 1).reshape(64, 32)
        for old, new in (
            *(("self_attn.o_proj", "attention.wo"), ("input_layernorm", "attention_norm")),
            *(("post_attention_layernorm", "ffn_norm"), ("mlp.gate_proj", "feed_forward.w1")),
            *(("mlp.up_proj", "feed_forward.w3"), ("mlp.down_proj", "feed_forward.w2")),
        ):
            changes[f"{start}{new}.weight"] = tensors[f"{start}{old}.weight"]
    changes["model.norm.weight"] = tensors["model.norm.weight"]
    changes["model.tok_embeddings.weight"] = tensors["model.embed_tokens.weight"]
    changes["output.weight"] = tensors["lm_head.weight"]
    edit_config(path, architectures=["InternLM2ForCausalLM"], model_type="internlm2", bias=False)
    edit_tensors(path, remove=tuple(tensors), **changes)
    assert torch.equal(logits(path), expected)


def test_deepseek_moe_and_ling_as_the_hub_has_them(tmp_path: Path) -> None:
    """Both are compared with a mixture whose shared expert has a gate: zeros, which are a half."""
    path = make_checkpoint("qwen2_moe", tmp_path, qkv_bias=False, shared_expert_intermediate_size=48)
    tensors = load_file(path / "model.safetensors")
    gates = [name for name in tensors if "shared_expert_gate" in name]
    edit_tensors(path, **{name: torch.zeros_like(tensors[name]) for name in gates})
    expected, config, changes = logits(path), json.loads((path / "config.json").read_text()), {}
    for name, tensor in tensors.items():
        factor = 0.5 if "shared_expert.down_proj" in name else 1.0
        changes[name.replace(".shared_expert.", ".shared_experts.")] = tensor * factor
    shared = config.pop("shared_expert_intermediate_size") // config["moe_intermediate_size"]
    counts = {"n_routed_experts": config["num_experts"], "n_shared_experts": shared, "num_shared_experts": shared}
    edit_config(path, remove=("shared_expert_intermediate_size",), norm_topk_prob=False, **counts)
    edit_config(path, architectures=["DeepseekForCausalLM"], model_type="deepseek")
    edit_tensors(path, remove=tuple(tensors), **{name: each for name, each in changes.items() if name not in gates})
    assert torch.equal(logits(path), expected)

    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        qkv = [changes.pop(f"{start}self_attn.{each}_proj.weight") for each in "qkv"]
        changes[f"{start}attention.query_key_value.weight"] = torch.cat(qkv)
        changes[f"{start}attention.dense.weight"] = changes.pop(f"{start}self_attn.o_proj.weight")
    changes["model.word_embeddings.weight"] = changes.pop("model.embed_tokens.weight")
    stored = load_file(path / "model.safetensors")
    edit_config(path, architectures=["BailingMoeForCausalLM"], model_type="bailing_moe")
    edit_tensors(path, remove=tuple(stored), **{name: each for name, each in changes.items() if name not in gates})
    assert torch.equal(logits(path), expected)


def test_mimo_v2_flash_as_the_hub_has_it(tmp_path: Path) -> None:
    path = make_checkpoint("mimo_v2_flash", tmp_path, rms_norm_eps=1e-3)
    expected = logits(path)
    released = {
        "hybrid_layer_pattern": [1, 0, 1],
        "moe_layer_freq": [0, 1, 1],
        "layernorm_epsilon": 1e-3,
        "sliding_window_size": 6,
        "partial_rotary_factor": 0.25,
        "rope_theta": 5e5,
        "swa_rope_theta": 100.0,
        "routed_scaling_factor": None,
    }
    left_out = ("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps", "sliding_window")
    edit_config(path, remove=left_out, **released)
    assert torch.equal(logits(path), expected)


def test_minimax_text_01_as_the_hub_has_it(tmp_path: Path) -> None:
    path = make_checkpoint("minimax", tmp_path)
    expected = logits(path)
    left_out = (
        *("layer_types", "linear_attn_alpha_factor", "linear_attn_beta_factor", "full_attn_alpha_factor"),
        *("full_attn_beta_factor", "mlp_alpha_factor", "mlp_beta_factor"),
    )
    released = {
        "architectures": ["MiniMaxText01ForCausalLM"],
        "attn_type_list": [0, 1, 0],
        "layernorm_full_attention_beta": 0.8,
        "layernorm_linear_attention_alpha": 3.5,
        "layernorm_mlp_alpha": 2.5,
        "postnorm": True,
        "rotary_dim": 8,
        "shared_intermediate_size": 0,
    }
    edit_config(path, remove=left_out, **released)
    assert torch.equal(logits(path), expected)


def test_step_3_5_flash_as_the_hub_has_it(tmp_path: Path) -> None:
    """Lists have elements of layers that predict further tokens, and rotations are stated layer by layer."""
    path = make_checkpoint("step3p5", tmp_path)
    expected = logits(path)
    tensors, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    released = {
        "architectures": ["Step3p5ForCausalLM"],
        "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 2},
        "layer_types": kinds,
        "max_seq_len": 256,
        "moe_layers_enum": "1,2",
        "moe_num_experts": 8,
        "moe_top_k": 3,
        "num_attention_groups": 2,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factors": [1.0, 0.5, 1.0, 1.0],
        "rope_theta": [100.0, 5e5, 100.0, 100.0],
        "swiglu_limits": [0.0, 0.0, 0.7, 0.0],
        "swiglu_limits_shared": [1.2, 0.0, 0.9, 0.0],
    }
    left_out = (
        *("max_position_embeddings", "mlp_layer_types", "n_routed_experts", "num_experts_per_tok", "rope_parameters"),
        *("num_key_value_heads", "num_sliding_attention_heads", "per_layer_config", "text_config", "vision_config"),
    )
    edit_config(path, **config["text_config"])
    edit_config(path, remove=left_out, **released)
    vision = [name for name in tensors if name.startswith(("vision_model.", "vit_"))]
    edit_tensors(path, remove=tuple(vision), **{"model.layers.3.eh_proj.weight": torch.ones(3)})
    assert torch.equal(logits(path), expected)


def test_ax_k1_as_the_hub_has_it(tmp_path: Path) -> None:
    """Without corrections, and with a norm of dense layers that is not applied."""
    path = make_checkpoint("axk1", tmp_path)
    tensors = load_file(path / "model.safetensors")
    corrections = [name for name in tensors if name.endswith("correction_bias")]
    edit_tensors(path, **{name: torch.zeros_like(tensors[name]) for name in corrections})
    expected = logits(path)
    edit_tensors(path, remove=tuple(corrections), **{"model.layers.0.post_mlp_layernorm.weight": torch.zeros(32)})
    assert torch.equal(logits(path), expected)


def test_minicpm_3_as_the_hub_has_it(tmp_path: Path) -> None:
    path = make_checkpoint("minicpm3", tmp_path, v_head_dim=8)
    expected = logits(path)
    edit_config(path, remove=("v_head_dim",))
    assert torch.equal(logits(path), expected)


def test_the_text_model_of_minicpm_v_4_7(tmp_path: Path) -> None:
    path, name = make_vision_checkpoint("minicpmv4_6", tmp_path), "MiniCPMV4_7ForConditionalGeneration"
    tower = {**Checkpoint.open(path).stored.values["vision_config"], "model_type": "minicpmv4_7_vision"}
    edit_config(path, architectures=[name], model_type="minicpmv4_7", vision_config=tower)
    tokens = list(range(20, 60))
    expected = load_vision_oracle(path, name)(input_ids=torch.tensor([tokens])).logits[0].detach()
    assert torch.allclose(logits_of(load(path), tokens), expected, rtol=1e-4, atol=1e-4)


def test_orion_as_the_hub_has_it(tmp_path: Path) -> None:
    path = make_checkpoint("stablelm", tmp_path, partial_rotary_factor=1.0, layer_norm_eps=1e-3)
    expected = logits(path)
    left_out = ("partial_rotary_factor", "rope_parameters", "layer_norm_eps")
    orion = {"architectures": ["OrionForCausalLM"], "model_type": "orion", "rms_norm_eps": 1e-3}
    edit_config(path, remove=left_out, **orion)
    assert torch.equal(logits(path), expected)


@pytest.mark.parametrize(
    ("family", "architecture"),
    [("llama", "AquilaForCausalLM"), ("llama", "XverseForCausalLM"), ("mpt", "MPTForCausalLM")],
)
def test_models_under_the_names_of_their_releases_are_the_same(family: str, architecture: str, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path)
    expected = logits(path)
    edit_config(path, architectures=[architecture], **({} if family == "mpt" else {"model_type": "of its own"}))
    assert torch.equal(logits(path), expected)


def test_phi_4_multimodal_as_the_hub_has_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Weights have the names of layers below adapters, whose own tensors are left out, as encoders are."""
    path = make_checkpoint("phi4_multimodal", tmp_path)
    expected, tensors, changes = logits(path), load_file(path / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if "_proj." in name and name.startswith("model.layers."):
            layer = name.removesuffix(".weight")
            changes[f"{layer}.base_layer.weight"] = tensor
            for adapter in ("A.speech", "A.vision", "B.speech", "B.vision"):
                changes[f"{layer}.lora_{adapter}.weight"] = torch.ones(3)
    edit_config(
        path, architectures=["Phi4MMForCausalLM"], model_type="phi4mm", remove=("audio_config", "vision_config")
    )
    edit_tensors(
        path, remove=tuple(each for each in tensors if each.replace(".weight", ".base_layer.weight") in changes)
    )
    edit_tensors(path, **changes)
    with caplog.at_level(logging.INFO):
        assert torch.equal(logits(path), expected)
    assert "skipped what Phi4MMForCausalLM generates text without: embed_tokens_extend (" in caplog.text
    edit_tensors(path, **{"model.layers.0.mlp.up_proj.lora_A.sound.weight": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"lora_A\.sound\.weight is left over"):
        load(path)


def test_layers_of_further_tokens_are_skipped_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint("llama", tmp_path)
    expected = logits(path)
    edit_tensors(path, **{"model.layers.2.eh_proj.weight": torch.ones(3), "mtp.fc.weight": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.eh_proj\.weight is left over"):
        load(path)
    edit_config(path, num_nextn_predict_layers=1)
    with caplog.at_level(logging.INFO):
        assert torch.equal(logits(path), expected)
    assert "layers.2 (1 tensors), mtp (1 tensors)" in caplog.text
    edit_tensors(path, **{"model.layers.3.eh_proj.weight": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.eh_proj\.weight is left over"):
        load(path)


def test_a_tensor_that_a_layer_needs_is_never_skipped(tmp_path: Path) -> None:
    path = make_checkpoint("mistral", tmp_path)
    to_layout_with_images(path, "Mistral3ForConditionalGeneration")
    rename_tensors(path, "model.language_model.layers.1.mlp.", "model.vision_tower.layers.1.mlp.")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.\S+ and 2 more are missing, which Mistral3For"):
        load(path)


def test_what_stands_beside_the_text_model_without_a_known_name_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint("mistral", tmp_path)
    to_layout_with_images(path, "Mistral3ForConditionalGeneration")
    edit_tensors(path, **{"model.memory.weight": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"model\.memory\.weight is left over"):
        load(path)


def test_a_model_around_an_unknown_text_model_is_refused_by_name(tmp_path: Path) -> None:
    path = make_checkpoint("mistral", tmp_path)
    to_layout_with_images(path, "Mistral3ForConditionalGeneration", model_type="mamba9")
    with pytest.raises(UnsupportedModel, match="no model family Mistral3 yet"):
        load(path)
    to_layout_with_images(make_checkpoint("llama", path), "PrefixLMForConditionalGeneration")
    assert json.loads((path / "config.json").read_text())["text_config"]["model_type"] == "llama"
    with pytest.raises(UnsupportedModel, match="no model family PrefixLM yet"):
        load(path)


@pytest.mark.parametrize("family", ["deepseek_ocr", "hyperclovax_vision", "janus", "minicpmv4_6", "paddleocr_vl"])
def test_an_encoder_is_skipped_by_text_models_and_later_stages_alone(family: str, tmp_path: Path) -> None:
    path = make_vision_checkpoint(family, tmp_path)
    LoadedModel.open(Checkpoint.open(path), Mesh.single(), reads_images=False).check_tensors()
    stages = [Mesh(pipeline=Axis(rank, 2)) for rank in range(2)]
    for stage in stages:
        LoadedModel.open(Checkpoint.open(path), stage).check_tensors()
    if family == "janus":
        edit_tensors(path, **{"model.aligner.fc9.weight": torch.ones(3)})
        with pytest.raises(CheckpointError, match=r"model\.aligner\.fc9\.weight is left over"):
            LoadedModel.open(Checkpoint.open(path), stages[0]).check_tensors()


def test_laguna_as_transformers_names_it_in_memory_and_with_layers_without_experts_listed(tmp_path: Path) -> None:
    path = make_checkpoint("laguna", tmp_path, mlp_layer_types=["dense", "dense", "sparse"])
    expected, before = logits(path), "model.layers.2.mlp."
    rename_tensors(path, f"{before}experts.e_score_correction_bias", f"{before}gate.e_score_correction_bias")
    rename_tensors(path, f"{before}shared_expert.", f"{before}shared_experts.")
    edit_config(path, remove=("mlp_layer_types",), mlp_only_layers=[0, 1], gating="per-head")
    assert torch.equal(logits(path), expected)
    edit_config(path, mlp_only_layers=[0, 3])
    with pytest.raises(CheckpointError, match="mlp_only_layers .* expected a list of layers, which are 3"):
        load(path)


@pytest.mark.parametrize("is_released", [False, True])
def test_the_text_model_of_nemotron_3_nano_omni(is_released: bool, tmp_path: Path) -> None:
    """transformers writes the released names; the released config has the text model in llm_config."""
    import transformers

    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4, "max_img_size": 32}
    config = transformers.NemotronH_Omni_Reasoning_V3_Config(
        text_config=family_config("nemotron_h").to_dict(),
        vision_config={**vision, "video_temporal_patch_size": 2},
        vision_hidden_size=16,
        projector_hidden_size=8,
    )
    torch.manual_seed(0)
    model = transformers.NemotronH_Omni_Reasoning_V3(config).eval()
    for parameter in model.language_model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    if is_released:
        name, text = (
            "NemotronH_Nano_Omni_Reasoning_V3",
            json.loads((tmp_path / "config.json").read_text())["text_config"],
        )
        edit_config(tmp_path, ("text_config",), architectures=[name], model_type=name, llm_config=text)
        edit_tensors(tmp_path, **{"sound_projection.norm.weight": torch.ones(3)})
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([[5, 9, 77, 30]])).logits[0]
    torch.testing.assert_close(logits(tmp_path), expected, rtol=1e-5, atol=1e-5)
