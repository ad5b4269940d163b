"""NomicBERT as its releases have it, whose experts transformers lacks, against the same equations in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from octavo.config.checkpoint import Checkpoint
from octavo.errors import UnsupportedModel
from octavo.llm import LLM
from octavo.models.encoders import NomicBertModel
from tests.fakes.checkpoints import edit_config
from tests.fakes.gguf_encoders import convert_encoder
from tests.fakes.rank_threads import llm_of_ranks
from tests.fakes.vector_models import write_modules, write_tokenizer

TEXTS = ["w1 w2 w3", "w4", " ".join(f"w{number * 7 % 96}" for number in range(60)), "w9 w8 w7 w6 w5 w4 w3 w2"]
EXPERTS, WIDTH, INNER, LAYERS = 4, 64, 96, 4
CONFIG: dict[str, Any] = {
    "architectures": ["NomicBertModel"],
    "model_type": "nomic_bert",
    "activation_function": "gelu",
    "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
    "layer_norm_epsilon": 1e-5,
    "max_trained_positions": 100,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "moe_every_n_layers": 2,
    "moe_normalize_expert_weights": False,
    "moe_top_k": 2,
    "n_embd": WIDTH,
    "n_head": 4,
    "n_inner": INNER,
    "pad_token_id": 0,
    "n_layer": LAYERS,
    "n_positions": 130,
    "num_experts": EXPERTS,
    "num_shared_experts": 0,
    "prenorm": False,
    "qkv_proj_bias": True,
    "rotary_emb_base": 10_000,
    "rotary_emb_fraction": 1.0,
    "rotary_scaling_factor": None,
    "type_vocab_size": 1,
    "use_rms_norm": None,
    "vocab_size": 128,
}


def random_release(path: Path) -> dict[str, Tensor]:
    """Write a random checkpoint with the names of nomic-embed-text-v2-moe, and return its tensors."""
    path.mkdir(exist_ok=True)
    shapes = {"embeddings.word_embeddings": (128, WIDTH), "embeddings.token_type_embeddings": (1, WIDTH)}
    norms = ["emb_ln"]
    for layer in range(LAYERS):
        own = f"encoder.layers.{layer}"
        shapes |= {f"{own}.attn.Wqkv": (3 * WIDTH, WIDTH), f"{own}.attn.out_proj": (WIDTH, WIDTH)}
        if layer % 2:
            shapes[f"{own}.mlp.router.layer"] = (EXPERTS, WIDTH)
            shapes |= {f"{own}.mlp.experts.mlp.{name}": (EXPERTS * INNER, WIDTH) for name in ("w1", "w2")}
        else:
            shapes |= {f"{own}.mlp.fc1": (INNER, WIDTH), f"{own}.mlp.fc2": (WIDTH, INNER)}
        norms += [f"{own}.norm1", f"{own}.norm2"]
    generator = torch.Generator().manual_seed(4)
    made: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        end = "" if ".experts." in name else ".weight"
        made[f"{name}{end}"] = torch.randn(*shape, generator=generator) / 6
        if end and "embeddings" not in name and "router" not in name:
            made[f"{name}.bias"] = torch.randn(shape[0], generator=generator) / 6
        elif not end and name.endswith("w1"):
            made[name.replace("mlp.w1", "bias")] = torch.randn(WIDTH, generator=generator) / 6
    for name in norms:
        made[f"{name}.weight"], made[f"{name}.bias"] = torch.randn(2, WIDTH, generator=generator) * 0.2 + 1
    save_file(made, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(path)
    write_modules(path, "mean")
    return made


def states(t: dict[str, Tensor], token_ids: list[int]) -> Tensor:
    """Return what the release computes, [tokens, hidden]."""

    def normed(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (WIDTH,), t[f"{name}.weight"], t[f"{name}.bias"], 1e-5)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))

    def turned(x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(len(token_ids)).float(), 10_000.0 ** -(torch.arange(8) / 8))
        cos, sin, (one, other) = angles.cos(), angles.sin(), x.chunk(2, -1)
        return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)

    def mixed(x: Tensor, name: str) -> Tensor:
        weights, chosen = linear(x, f"{name}.router.layer").softmax(-1).topk(2)
        up, down = (t[f"{name}.experts.mlp.{each}"].view(EXPERTS, INNER, WIDTH) for each in ("w1", "w2"))
        all_of = torch.einsum("tei,eih->teh", F.gelu(torch.einsum("th,eih->tei", x, up)), down)
        taken = all_of.gather(1, chosen[..., None].expand(-1, -1, WIDTH))
        return (taken * weights[..., None]).sum(1) + t[f"{name}.experts.bias"]

    x = t["embeddings.word_embeddings.weight"][token_ids] + t["embeddings.token_type_embeddings.weight"][0]
    x = normed(x, "emb_ln")
    for layer in range(LAYERS):
        own = f"encoder.layers.{layer}"
        q, k, v = linear(x, f"{own}.attn.Wqkv").view(-1, 3, 4, 16).permute(1, 2, 0, 3)
        scores = turned(q) @ turned(k).transpose(1, 2) / 4
        attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(-1, WIDTH)
        x = normed(x + linear(attended, f"{own}.attn.out_proj"), f"{own}.norm1")
        inner = mixed(x, f"{own}.mlp") if layer % 2 else linear(F.gelu(linear(x, f"{own}.mlp.fc1")), f"{own}.mlp.fc2")
        x = normed(x + inner, f"{own}.norm2")
    return x


@pytest.mark.parametrize("device", ["auto", "reference"])
def test_a_release_with_experts(device: str, tmp_path: Path) -> None:
    tensors = random_release(tmp_path)
    with LLM(str(tmp_path), device=device, dtype="float32", max_num_batched_tokens=256) as llm:
        assert llm.config.model.max_model_len == CONFIG["max_trained_positions"]
        together = llm.embed(TEXTS)
        for output in together:
            want = states(tensors, output.prompt_token_ids).mean(0)
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), want, rtol=1e-5, atol=1e-5)
        assert [llm.embed(text)[0].outputs for text in TEXTS] == [output.outputs for output in together]


@pytest.mark.parametrize("args", [{}, {"quantization": "int4"}], ids=str)
def test_two_ranks_give_the_bits_of_one(args: dict[str, Any], tmp_path: Path) -> None:
    random_release(tmp_path)
    with LLM(str(tmp_path), **args) as llm:
        one = [each.outputs for each in llm.embed(TEXTS)]
    with llm_of_ranks(tmp_path, 2, **args) as llm:
        assert [each.outputs for each in llm.embed(TEXTS)] == one


def test_a_file_of_llama_cpp_has_experts_without_a_bias(tmp_path: Path) -> None:
    """Its converter leaves the bias out, which is zero in the release."""
    tensors, own = random_release(folder := tmp_path / "m"), dict[str, Tensor]()
    for name, tensor in tensors.items():
        if name.endswith("experts.bias"):
            tensor.zero_()
        elif ".experts.mlp." in name:
            stacked = tensor.view(EXPERTS, INNER, WIDTH)
            own[f"{name}.weight"] = stacked if name.endswith("w1") else stacked.transpose(1, 2).contiguous()
        else:
            own[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    write_modules(folder, "mean", "Normalize")  # as is done with files
    with LLM(str(folder), dtype="float32") as llm:
        want = [each.outputs for each in llm.embed(TEXTS)]
    # as the converter's own config states it
    names = {"n_embd": "hidden_size", "n_inner": "intermediate_size", "n_layer": "num_hidden_layers"}
    names |= {"n_head": "num_attention_heads", "n_positions": "max_position_embeddings"}
    edit_config(folder, **{to: CONFIG[of] for of, to in names.items()}, layer_norm_eps=1e-5)
    edit_config(folder, rope_parameters={"rope_theta": 10_000.0})
    save_file(own, folder / "model.safetensors")
    counts = {"expert_count": EXPERTS, "expert_used_count": 2, "moe_every_n_layers": 2, "pooling_type": 1}
    file = convert_encoder(folder, "nomic-bert-moe", {**counts, "context_length": 100})
    with LLM(str(file), tokenizer=str(folder), dtype="float32") as llm:
        assert [each.outputs for each in llm.embed(TEXTS)] == want


@pytest.mark.parametrize("changes", [{"prenorm": True}, {"num_shared_experts": 1}, {"activation_function": "geglu"}])
def test_what_no_release_has_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=next(iter(changes))):
        NomicBertModel.read(Checkpoint(tmp_path, {**CONFIG, **changes}))


def test_the_first_releases_have_gates_and_no_biases(tmp_path: Path) -> None:
    own = {"activation_function": "swiglu", "moe_every_n_layers": 0, "n_positions": 8192, "rotary_emb_base": 1000}
    own |= dict.fromkeys(("mlp_fc1_bias", "mlp_fc2_bias", "qkv_proj_bias"), False)
    config = NomicBertModel.read(Checkpoint(tmp_path, {**CONFIG, **own, "max_trained_positions": 2048}))
    assert (config.mlp, config.activation, config.mixture, config.mlp_bias) == (None, "silu", None, False)
    assert (config.qkv_bias, config.max_positions) == (False, 2048)
    assert config.rope is not None
    assert config.rope.theta == 1000.0
