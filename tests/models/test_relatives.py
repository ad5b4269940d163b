"""Families that no class of transformers computes: their weights are those of relatives under other names."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from octavo.devices.cpu.runtime import CpuRuntime
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError
from tests.conformance.runtimes import LEVELS
from tests.distributed.threads import run_ranks
from tests.fakes.checkpoints import edit_config, edit_tensors, load_oracle, make_checkpoint
from tests.models.loading import read_config
from tests.models.paged_run import PagedRun, Stream, generated, load, logits_of
from tests.models.test_alice import alice
from tests.models.test_domyn import domyn
from tests.models.test_kimi_k3 import kimi_k3
from tests.models.test_tensor_parallel import Rank

TOKENS = [3 + 7 * each % 120 for each in range(24)]


def logits(path: Path) -> Tensor:
    return logits_of(load(path), TOKENS)


def oracle(path: Path, change: Callable[[Any, nn.Module], None] | None = None) -> Tensor:
    """Return what transformers' model computes; `change` is given each of its layers, and what makes a norm."""
    model = load_oracle(path)
    for layer in model.model.layers if change is not None else ():
        change(layer, type(layer.input_layernorm))
    with torch.inference_mode():
        found: Tensor = model(torch.tensor([TOKENS])).logits[0]
    return found


def rewrite(path: Path, changed: dict[str, Tensor], **config: Any) -> None:
    """Write other tensors in the place of all, and other keys of the config; None removes one."""
    removed = tuple(name for name, value in config.items() if value is None)
    edit_config(path, remove=removed, **{name: value for name, value in config.items() if value is not None})
    edit_tensors(path, remove=tuple(load_file(path / "model.safetensors")), **changed)


def text_alone(family: str, architecture: str, model_type: str, folder: Path) -> tuple[Path, Tensor]:
    path = make_checkpoint(family, folder)
    expected, tensors = logits(path), load_file(path / "model.safetensors")
    text = json.loads((path / "config.json").read_text())["text_config"]
    rewrite(path, {name.replace("model.language_model.", "model.", 1): each for name, each in tensors.items()})
    (path / "config.json").write_text(json.dumps({**text, "architectures": [architecture], "model_type": model_type}))
    return path, expected


def glm5_next(folder: Path) -> tuple[Path, Tensor]:
    return text_alone("glm5_next", "Glm5NextForCausalLM", "glm5_next_text", folder)


def minimax_m3(folder: Path) -> tuple[Path, Tensor]:
    return text_alone("minimax_m3_vl", "MiniMaxM3SparseForCausalLM", "minimax_m3_text", folder)


def deepseek_v4(folder: Path) -> tuple[Path, Tensor]:
    path = make_checkpoint("deepseek_v4", folder)
    expected, tensors = logits(path), load_file(path / "model.safetensors")
    start = next(name for name in tensors if name.endswith("layers.0.ffn.gate.weight")).removesuffix("weight")
    others = {f"{start}bias": torch.ones(6), f"{start}bias_vl": torch.ones(6), "vision.a.weight": torch.ones(2)}
    others |= {"aligner.w1.weight": torch.ones(2), "image_start": torch.ones(32), "image_newline": torch.ones(32)}
    rewrite(path, tensors | others, architectures=["DeepseekV4ForConditionalGeneration"], vision_n_layers=1)
    return path, expected


def mimo_v2(folder: Path) -> tuple[Path, Tensor]:
    path = make_checkpoint("mimo_v2_flash", folder)
    expected, tensors = logits(path), load_file(path / "model.safetensors")
    for layer in range(3):
        start = f"model.layers.{layer}.self_attn."
        parts = [tensors.pop(f"{start}{each}_proj.weight") for each in "qkv"]
        tensors[f"{start}qkv_proj.weight"] = torch.cat(parts)
    rewrite(path, tensors, architectures=["MiMoV2ForCausalLM"], model_type="mimo_v2", attention_value_scale=0.707)
    return path, expected


def mimo_v2_omni(folder: Path) -> tuple[Path, Tensor]:
    path = make_checkpoint("mimo_v2_flash", folder)
    expected, tensors = logits(path), load_file(path / "model.safetensors")
    others = {
        name: torch.zeros(2) for name in ("visual.a.weight", "audio_encoder.a.weight", "speech_embeddings.0.weight")
    }
    own = {"architectures": ["MiMoV2OmniForCausalLM"], "model_type": "mimovl", "vision_config": {"depth": 1}}
    rewrite(path, tensors | others, attention_value_scale=0.707, **own)
    return path, expected


def param2(folder: Path) -> tuple[Path, Tensor]:
    path = make_checkpoint("bailing_moe_v2", folder)
    expected, config = logits(path), json.loads((path / "config.json").read_text())
    own: dict[str, Any] = {"architectures": ["Param2MoEForCausalLM"], "model_type": "param2moe", "use_qk_norm": True}
    factor = config.get("routed_scaling_factor", 2.5)
    rewrite(path, load_file(path / "model.safetensors"), routed_scaling_factor=factor, **own)
    return path, expected


def ling3(folder: Path) -> tuple[Path, Tensor]:
    path = make_checkpoint("bailing_hybrid", folder)
    expected, tensors = logits(path), load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    for name in [each for each in tensors if each.endswith(".A_log")]:
        tensors[name] = tensors[name].view(1, 1, -1, 1)
    own: dict[str, Any] = {"architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_moe_v3"}
    own |= {"gated_attention_proj_granularity_type": "head_wise", "partial_rotary_factor": 0.5}
    rewrite(path, tensors, routed_scaling_factor=config.get("routed_scaling_factor", 2.5), **own)
    return path, expected


def longcat_lite(folder: Path) -> tuple[Path, Tensor]:
    """The input is the mean of embeddings of tokens and of n-grams, and stops at the ends of texts."""
    path = make_checkpoint("longcat_flash", folder)
    tensors, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(1)
    vocab, hidden, longest, splits, stop = 130, 32, 3, 2, TOKENS[5]
    word, added = tensors["model.embed_tokens.weight"], {}
    rows = [int(1.5 * vocab) + 2 * place + 1 for place in range((longest - 1) * splits)]
    inputs = word[torch.tensor(TOKENS)].clone()
    for place, count in enumerate(rows):
        table = torch.randn(count, hidden // len(rows), generator=generator)
        projection = torch.randn(hidden, hidden // len(rows), generator=generator) / 3
        added[f"model.ngram_embeddings.embedders.{place}.weight"] = table
        added[f"model.ngram_embeddings.post_projs.{place}.weight"] = projection
        for index, token in enumerate(TOKENS):
            number = token
            for distance in range(1, place // splits + 2):
                if index < distance or TOKENS[index - distance] == stop:
                    break
                number += TOKENS[index - distance] * vocab**distance
            inputs[index] += projection @ table[number % count]
    with torch.inference_mode():
        expected: Tensor = load_oracle(path)(inputs_embeds=inputs[None] / (len(rows) + 1)).logits[0]
    own: dict[str, Any] = {"architectures": ["LongcatFlashNgramForCausalLM"], "model_type": "longcat_flash_ngram"}
    own |= {"ngram_vocab_size_ratio": 1.5, "emb_neighbor_num": longest, "emb_split_num": splits, "eos_token_id": stop}
    rewrite(path, tensors | added, **own)
    return path, expected


def puzzle(folder: Path) -> tuple[Path, Tensor]:
    """Of two layers with experts, one has fewer: there, corrections let the relative choose none of the others."""
    kinds = ["linear_attention", "moe", "full_attention", "moe"]
    path = make_checkpoint("nemotron_h", folder, layer_types=kinds, n_group=1, topk_group=1, n_routed_experts=8)
    tensors, start = load_file(path / "model.safetensors"), "backbone.layers.1.mixer."
    start = next(name for name in tensors if ".layers.1.mixer.gate.weight" in name).removesuffix("gate.weight")
    tensors[f"{start}gate.e_score_correction_bias"][5:] = -1e4
    edit_tensors(path, **{f"{start}gate.e_score_correction_bias": tensors[f"{start}gate.e_score_correction_bias"]})
    expected = logits(path)
    for name in ("gate.weight", "gate.e_score_correction_bias"):
        tensors[start + name] = tensors[start + name][:5].clone()
    for name in [each for each in tensors if each.startswith(f"{start}experts.")]:
        if tensors[name].ndim == 3:
            tensors[name] = tensors[name][:5].clone()
        elif int(name.removeprefix(f"{start}experts.").partition(".")[0]) >= 5:
            del tensors[name]
    experts = [{"block_type": "moe", "n_routed_experts": each} for each in (5, 8)]
    blocks = [{"block_type": "mamba"}, experts[0], {"block_type": "attention"}, experts[1]]
    own = {"architectures": ["NemotronHPuzzleForCausalLM"], "model_type": "nemotron_h_puzzle", "block_configs": blocks}
    rewrite(path, tensors, n_routed_experts=None, layer_types=None, layers_block_type=None, **own)
    return path, expected


def apply(norm: nn.Module, block: nn.Module, given: Any, out: Any) -> Any:
    """Return what a block returned behind a norm."""
    return (norm(out[0]), *out[1:]) if isinstance(out, tuple) else norm(out)


def pangu(folder: Path) -> tuple[Path, Tensor]:
    path = make_checkpoint("deepseek_v3", folder, n_group=1, topk_group=1)
    generator, own = torch.Generator().manual_seed(1), load_file(path / "model.safetensors")

    def change(layer: Any, norm: Any) -> None:
        for block, name in ((layer.self_attn, "post_attention"), (layer.mlp, "post_mlp")):
            behind = norm(32, 1e-6)
            behind.weight.data = 1 + 0.3 * torch.randn(32, generator=generator)
            place = layer.self_attn.layer_idx
            own[f"model.layers.{place}.{name}_layernorm.new"] = behind.weight.data
            block.register_forward_hook(partial(apply, behind))

    expected = oracle(path, change)
    for name in [each for each in own if each.endswith("post_attention_layernorm.weight")]:
        own[name.replace("post_attention", "pre_mlp")] = own.pop(name)
    names = {name: name.replace(".new", ".weight").replace(".gate.e_score", ".e_score") for name in own}
    rewrite(
        path,
        {names[name]: each for name, each in own.items()},
        architectures=["PanguUltraMoEForCausalLM"],
        model_type="pangu_ultra_moe",
        sandwich_norm=True,
        router_enable_expert_bias=True,
    )
    return path, expected


def step3(folder: Path) -> tuple[Path, Tensor]:
    """Made of a mixture whose shared expert has a gate: zeros, which are a half."""
    width, heads = 24, {"num_attention_heads": 4, "num_key_value_heads": 1}
    path = make_checkpoint("qwen2_moe", folder, qkv_bias=False, mlp_only_layers=[0], norm_topk_prob=True, **heads)
    tensors = load_file(path / "model.safetensors")
    gates = {name: torch.zeros_like(each) for name, each in tensors.items() if "shared_expert_gate" in name}
    edit_tensors(path, **gates)
    generator, own = torch.Generator().manual_seed(1), {}

    def change(layer: Any, norm: Any) -> None:
        first, second = nn.Linear(32, width, bias=False), nn.Linear(width, 32, bias=False)
        between, start = norm(width, 1e-6), f"model.layers.{layer.self_attn.layer_idx}.self_attn."
        for name, module in (("q_proj", first), ("inter_norm", between), ("wq", second)):
            module.weight.data = torch.randn(module.weight.shape, generator=generator) * 0.3 + (name == "inter_norm")
            own[f"{start}{name}.weight"] = module.weight.data
        layer.self_attn.q_proj = nn.Sequential(first, between, second)

    expected = oracle(path, change)
    config = json.loads((path / "config.json").read_text())
    for name, each in tensors.items():
        if name in gates or name in own:
            continue
        name = name.replace(".mlp.shared_expert.", ".share_expert.").replace(".mlp.gate.", ".moe.gate.")
        own.setdefault(name, each * 0.5 if "share_expert.down_proj" in name else each)
    for layer in range(1, config["num_hidden_layers"]):
        for part in ("gate", "up", "down"):
            start = f"model.layers.{layer}."
            found = [own.pop(f"{start}mlp.experts.{each}.{part}_proj.weight") for each in range(config["num_experts"])]
            own[f"{start}moe.{part}_proj.weight"] = torch.stack(found)
    rewrite(
        path,
        own,
        architectures=["Step3TextForCausalLM"],
        model_type="step3_text",
        head_dim=8,
        share_q_dim=width,
        num_attention_groups=1,
        num_key_value_heads=None,
        moe_num_experts=config["num_experts"],
        moe_top_k=config["num_experts_per_tok"],
        norm_expert_weight=True,
        share_expert_dim=config["shared_expert_intermediate_size"],
        moe_layers_enum=",".join(map(str, range(1, config["num_hidden_layers"]))),
        max_position_embedding=128,
        max_position_embeddings=None,
    )
    return path, expected


def plamo3(folder: Path) -> tuple[Path, Tensor]:
    """Made of Gemma 3, whose weights of norms are all beside 1, with embeddings that are multiplied before."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    local = {"rope_type": "default", "rope_theta": 70.0}
    yarn = {"rope_type": "yarn", "rope_theta": 5_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    path = make_checkpoint(
        *("gemma3", folder),
        hidden_activation="silu",
        layer_types=kinds,
        num_hidden_layers=3,
        query_pre_attn_scalar=16,
        rope_parameters={"full_attention": {**yarn, "truncate": False}, "sliding_attention": local},
        tie_word_embeddings=False,
    )
    expected, found = oracle(path), load_file(path / "model.safetensors")
    own = {"lm_head.weight": found.pop("lm_head.weight"), "model.norm.weight": found.pop("model.norm.weight")}
    own["model.embed_tokens.weight"] = found.pop("model.embed_tokens.weight") * 32**0.5
    for start in (f"model.layers.{layer}." for layer in range(3)):
        target, names = start.replace("layers.", "layers.layers."), ("q_proj", "k_proj", "v_proj")
        own[f"{target}mixer.qkv_proj.weight"] = torch.cat([found[f"{start}self_attn.{each}.weight"] for each in names])
        gate_up = torch.cat([found[f"{start}mlp.{each}_proj.weight"] for each in ("gate", "up")])
        own[f"{target}mlp.gate_up_proj.weight"] = gate_up
        for old, new, offset in (
            *(("input_layernorm", "pre_mixer_norm", 1.0), ("post_attention_layernorm", "post_mixer_norm", 0.2)),
            *(("pre_feedforward_layernorm", "pre_mlp_norm", 1.0), ("self_attn.k_norm", "mixer.k_norm", 1.0)),
            *(("post_feedforward_layernorm", "post_mlp_norm", 5**-1.5), ("self_attn.q_norm", "mixer.q_norm", 1.0)),
            *(("self_attn.o_proj", "mixer.o_proj", 1.0), ("mlp.down_proj", "mlp.down_proj", 1.0)),
        ):
            own[f"{target}{new}.weight"] = found[f"{start}{old}.weight"] + (1.0 - offset)
    absent = dict.fromkeys(("layer_types", "rope_parameters", "sliding_window", "hidden_activation", "head_dim"))
    rope = {"rope_theta": 5_000.0, "rope_local_theta": 70.0, "rope_scaling_factor": 4.0, "initial_context_length": 16}
    rewrite(
        *(path, own),
        **{**absent, **rope, "architectures": ["Plamo3ForCausalLM"], "model_type": "plamo3", "head_dim": 16},
        sliding_window_pattern=3,
        window_size=7,
    )
    return path, expected


EXACT = {"glm5_next": glm5_next, "minimax_m3": minimax_m3, "mimo_v2": mimo_v2, "omni": mimo_v2_omni, "param2": param2}
EXACT |= {"deepseek_v4": deepseek_v4, "ling3": ling3}
NEAR = {
    "alice": alice,
    "domyn": domyn,
    "kimi_k3": kimi_k3,
    "pangu": pangu,
    "step3": step3,
    "longcat_lite": longcat_lite,
    "puzzle": puzzle,
    "plamo3": plamo3,
}


@pytest.mark.parametrize(
    "family", [each if each == "mimo_v2" else pytest.param(each, marks=pytest.mark.long) for each in EXACT]
)
def test_names_of_a_relative_mean_the_same(family: str, tmp_path: Path) -> None:
    path, expected = EXACT[family](tmp_path)
    assert torch.equal(logits(path), expected)


@pytest.mark.parametrize(
    "family", [each if each == "step3" else pytest.param(each, marks=pytest.mark.long) for each in NEAR]
)
def test_changed_blocks_of_a_relative_agree(family: str, tmp_path: Path) -> None:
    path, expected = NEAR[family](tmp_path)
    torch.testing.assert_close(logits(path), expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


@pytest.mark.long
@pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")
@pytest.mark.parametrize("family", [*NEAR, "mimo_v2", "param2", "ling3"])
def test_two_ranks_compute_the_bits_of_one(family: str, tmp_path: Path) -> None:
    path, _ = (NEAR | EXACT)[family](tmp_path)

    def work(mesh: Mesh) -> tuple[list[list[int]], Tensor]:
        runtime = CpuRuntime.open(1, LEVELS[-1])
        return generated(Rank(path, mesh, runtime.bind(), torch.bfloat16), torch.bfloat16)

    tokens, found = work(Mesh.single())
    for each_tokens, each_logits in run_ranks(2, work):
        assert each_tokens == tokens
        assert torch.equal(each_logits, found)


@pytest.mark.long
@pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")
@pytest.mark.parametrize("family", [*NEAR, "mimo_v2", "ling3"])
def test_a_prompt_in_pieces_beside_another_has_the_bits_that_it_has_alone(family: str, tmp_path: Path) -> None:
    path, _ = (NEAR | EXACT)[family](tmp_path)
    model = Rank(path, Mesh.single(), CpuRuntime.open(1, LEVELS[-1]).bind(), torch.bfloat16)
    alone = logits_of(model, TOKENS, 6, torch.bfloat16)
    run, stream, other = PagedRun(model, dtype=torch.bfloat16), Stream([*TOKENS]), Stream(TOKENS[::-1])
    run.step([(other, 3)])
    run.step([(stream, 5), (other, 9)])
    run.step([(other, 12), (stream, len(TOKENS) - 5)])
    run.decode([other, stream], 6)
    assert torch.equal(torch.stack(stream.logits), alone)


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "changes", "said"),
    [
        (mimo_v2, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config.*not read"),
        (longcat_lite, {"ngram_vocab_size_ratio": 1e308}, "ngram_vocab_size_ratio is 1e.308, expected a table"),
    ],
)
def test_weights_that_are_not_read_are_refused(
    make: Callable[[Path], tuple[Path, Tensor]], changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path, _ = make(tmp_path)
    edit_config(path, **changes)
    with pytest.raises(CheckpointError, match=said):
        read_config(path)


@pytest.mark.long
def test_other_differences_of_layers_are_refused(tmp_path: Path) -> None:
    path, _ = puzzle(tmp_path)
    blocks = json.loads((path / "config.json").read_text())["block_configs"]
    for changed, said in (({**blocks[0], "ssm_state_size": 3}, "ssm_state_size as"), ({"block_type": "x"}, "mamba")):
        edit_config(path, block_configs=[changed, *blocks[1:]])
        with pytest.raises(CheckpointError, match=f"block_configs.*{said}"):
            read_config(path)
