"""DeepSeek-V4: the release's config, its names and transformers', and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.attention.backend import cache_layout
from octavo.config.checkpoint import Checkpoint
from octavo.core.model_shape import Spaced
from octavo.devices.reference.attention import ReferenceBackend
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError
from octavo.models.loader import LoadedModel
from octavo.ops.registry import bind
from octavo.quantization.method import KeptAs
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import edit_config, edit_tensors, family_config, load_oracle, make_checkpoint
from tests.fakes.quantized import exponents, fp4, fp8, quantize
from tests.models.loading import read_config
from tests.models.paged_run import load, logits_of

TOKENS = [3 + 7 * each % 120 for each in range(30)]
YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
RELEASED = {
    "compress_ratios": [128, 4, 0, 4, 0],  # the last one of a layer that predicts a further token
    "compress_rate_csa": 2,
    "compress_rate_hca": 6,
    "num_hash_layers": 2,
    "qk_rope_head_dim": 4,
    "rope_theta": 10_000,
    "compress_rope_theta": 160_000,
    "rope_scaling": YARN,
    "num_nextn_predict_layers": 1,
    "topk_method": "noaux_tc",
}
KEYS = ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor")
"""Keys of today that those of the release stand for."""


def logits(path: Path) -> torch.Tensor:
    return logits_of(load(path), TOKENS)


def test_the_config_of_the_release_means_the_same(tmp_path: Path) -> None:
    kinds = ["hash_moe", "hash_moe", "moe", "moe"]
    path = make_checkpoint("deepseek_v4", tmp_path, mlp_layer_types=kinds)
    expected = logits(path)
    edit_config(path, remove=KEYS, **RELEASED)
    assert torch.equal(logits(path), expected)
    with torch.inference_mode():  # as transformers reads it
        found = load_oracle(path)(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(expected, found, atol=2e-4, rtol=1e-4)


def test_names_of_the_release_and_of_transformers_class_mean_the_same(tmp_path: Path) -> None:
    """The former have no prefix; layers that predict further tokens stand beside the others."""
    path = make_checkpoint("deepseek_v4", tmp_path)
    expected, stored = logits(path), load_file(path / "model.safetensors")
    made = {name.removeprefix("model.").replace("hc_head.hc_", "hc_head_"): tensor for name, tensor in stored.items()}
    made = {
        name.replace("embed_tokens", "embed").replace(".attn.norm.", ".attn.kv_norm."): t for name, t in made.items()
    }
    made["mtp.0.attn.wkv.weight"] = torch.zeros(2, 2)
    for name in [each for each in made if each.endswith("tid2eid")]:
        made[name] = made[name].to(torch.int32)
    save_file(made, path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits(path), expected)
    own = {name: tensor.contiguous() for name, tensor in load_oracle_tensors(tmp_path / "again").items()}
    save_file(own, path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits(path), expected)


def load_oracle_tensors(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_oracle(make_checkpoint("deepseek_v4", path)).state_dict()
    return tensors


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ((1, 6), r"tid2eid names experts from 0 to 6, expected 0 to 5"),
        ((3, 3), r"tid2eid names an expert twice for token 5, expected 2 different ones"),
    ],
)
def test_experts_that_a_token_cannot_have_are_named(experts: tuple[int, int], message: str, tmp_path: Path) -> None:
    path = make_checkpoint("deepseek_v4", tmp_path)
    name = "model.layers.0.ffn.gate.tid2eid"
    table = load_file(path / "model.safetensors")[name]
    table[5] = torch.tensor(experts)
    edit_tensors(path, **{name: table})
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_random_weights_have_tables_with_different_experts(tmp_path: Path) -> None:
    path = write_byte_tokenizer(make_checkpoint("deepseek_v4", tmp_path, vocab_size=300, hidden_size=64))
    params, found = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), []
    for _ in range(2):
        with LLM(str(path), dtype="bfloat16", max_model_len=96, load_format="dummy") as llm:
            found.append(llm.generate([TOKENS], params)[0].outputs[0])
    assert found[0].finish_reason == "length"
    assert found[0].token_ids == found[1].token_ids


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_key_value_heads", 2),
        ("scoring_func", "sigmoid"),
        ("norm_topk_prob", False),
        ("attention_bias", True),
        ("layer_types", ["full_attention"] * 4),
        ("mlp_layer_types", ["moe"] * 3),
        ("compress_rates", {"compressed_sparse_attention": 0, "heavily_compressed_attention": 6}),
        ("o_groups", 3),
        ("hc_mult", 0),
        ("index_topk", -1),
        ("swiglu_limit", 0.0),
        ("sliding_window", 0),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(name: str, value: Any, tmp_path: Path) -> None:
    path = make_checkpoint("deepseek_v4", tmp_path)
    edit_config(path, **{name: value})
    named = "compressed_sparse_attention" if name == "compress_rates" else name
    with pytest.raises(CheckpointError, match=named):
        read_config(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("compress_ratios", 4),
        ("compress_ratios", [128, 4]),
        ("compress_ratios", [128, 4, 8, 4]),
        ("compress_ratios", [128, 4, False, 4]),
        ("num_hash_layers", -1),
        ("num_hash_layers", "2"),
        ("qk_rope_head_dim", "4"),
        ("qk_rope_head_dim", 0),
        ("qk_rope_head_dim", 18),
        ("qk_rope_head_dim", 10**400),
        ("compress_rate_csa", 0),
        ("compress_rate_hca", "6"),
    ],
)
def test_what_is_malformed_in_a_release_is_refused_by_its_own_name(name: str, value: Any) -> None:
    config = json.loads(family_config("deepseek_v4").to_json_string(use_diff=False))
    config = {key: each for key, each in config.items() if key not in KEYS} | RELEASED | {name: value}
    with pytest.raises(CheckpointError, match=rf"{name} is .*, expected"):
        LoadedModel.open(Checkpoint(Path(__file__).parent, config), Mesh.single())


def test_vectors_are_not_in_the_codes_of_a_quantised_cache() -> None:
    for dtype, expected in ((torch.float32, torch.float32), (torch.int8, torch.bfloat16)):
        for stride, count in ((1, 16), (4, 4), (6, 3), (128, 1)):
            layout = cache_layout(ReferenceBackend(dtype), Spaced(24, stride), 5, 16)
            assert layout.shape == (1, 5, count * 24)
            assert layout.dtype == expected


def test_a_context_is_not_bounded_by_the_vectors_that_are_chosen(tmp_path: Path) -> None:
    path = make_checkpoint("deepseek_v4", tmp_path)
    assert json.loads((path / "config.json").read_text())["index_topk"] == 3
    assert load(path).config.max_positions == 256


def test_weights_of_the_release_are_read(tmp_path: Path) -> None:
    """Experts are codes of 4 bits, two in a byte; others floats of 8 bits, with the exponents of blocks."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32}
    path, of_blocks = make_checkpoint("deepseek_v4", tmp_path / "model", **sizes), fp8(16, 16, ".scale")

    def encode(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        if ".experts." in name:
            powers = exponents(weight)
            codes, meaning = fp4(weight, torch.exp2(powers.float() - 127))
            return {".weight": codes.view(torch.int8), ".scale": powers.view(torch.float8_e8m0fnu)}, meaning
        parts, _ = of_blocks(name, weight)
        powers = torch.exp2(torch.ceil(parts[".scale"].log2()))
        whole = powers.repeat_interleave(16, 0)[: len(weight)].repeat_interleave(16, 1)[:, : weight.shape[1]]
        codes = (weight / whole).to(torch.float8_e4m3fn)
        return {".weight": codes, ".scale": powers.to(torch.float8_e8m0fnu)}, codes.float() * whole

    config = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [16, 16]}
    stored = r".*\.ffn\..*\.w[123]|.*\.(wq_[ab]|wo_[ab])|.*\.attn\.wkv"
    made = quantize(path, encode, {**config, "activation_scheme": "dynamic"}, weights=stored)
    names = {each.name for each in Checkpoint.open(made).tensors.values()}
    assert {"model.layers.1.attn.wq_a.scale", "model.layers.1.ffn.experts.0.w1.scale"} <= names
    expected = logits(path)
    kept_as = KeptAs(activation_bits=16)
    model = LoadedModel.open(Checkpoint.open(made), Mesh.single(), kept_as=kept_as).load(bind(), ReferenceBackend())
    torch.testing.assert_close(logits_of(model, TOKENS), expected, atol=1e-3, rtol=1e-3)
