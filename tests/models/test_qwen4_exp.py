"""Qwen4-Exp: what is refused, how tables of n-grams are stored, and the gate behind the delta rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.config.checkpoint import Checkpoint
from octavo.core.model_shape import Indexed
from octavo.errors import CheckpointError
from octavo.layers.ngrams import NgramSizes
from octavo.models.registry import resolve_model
from tests.fakes.checkpoints import edit_config, family_config, load_oracle, make_checkpoint
from tests.models.paged_run import load, logits_of

TOKENS = [2 + 7 * each % 100 for each in range(40)]
TABLE = "layers.0.ple.ple_embedding"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("indexer_budget", 13),
        ("indexer_kv_heads", 2),
        ("indexer_head_dim", 2),
        ("indexer_n_heads", None),
        ("layer_types", ["sliding_attention"] * 3),
        ("hc_count", 1),
        ("ple_layer_ids", [2]),
        ("ple_layer_ids", [0]),
        ("ple_embed_dim", 25),
        ("ngram_size", 1),
        ("heads_per_ngram", 1 << 20),
        ("split_ngram_parts", 1 << 20),
        ("eos_token_id", None),
        ("output_gate_type", "relu"),
        ("num_experts_per_tok", 5),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(name: str, value: Any) -> None:
    config = json.loads(family_config("qwen4_exp").to_json_string(use_diff=False))
    checkpoint = Checkpoint(Path(__file__).parent, config | {"architectures": ["Qwen4ExpForCausalLM"], name: value})
    with pytest.raises(CheckpointError, match=name):
        resolve_model(checkpoint).read(checkpoint)


def test_tables_of_two_layers_have_rows_of_different_primes() -> None:
    sizes = NgramSizes(longest=3, heads=2, dim=8, vocab=100, stop=2, base=20, multiple=8, parts=1, seed=1234, taps=4)
    assert [sizes.rows(place) for place in range(2)] == [[23, 29, 31, 37], [41, 43, 47, 53]]


def test_a_cache_without_small_keys_says_so() -> None:
    assert Indexed(2, 16, 8, 4).render() == "keys and values of 2 x 16 and a key of 8 per token"
    assert Indexed(2, 16, 0, 4).render() == "keys and values of 2 x 16 per token"


@pytest.mark.long
def test_numbers_of_hashes_and_tables_in_one_piece_are_read(tmp_path: Path) -> None:
    path = make_checkpoint("qwen4_exp", tmp_path)
    expected, tensors = logits_of(load(path), TOKENS), load_file(path / "model.safetensors")
    parts = [name for name in tensors if f"{TABLE}.ngram_embedding.shard_" in name]
    assert len(parts) == 3
    for layer in (0, 2):
        own = f"model.layers.{layer}.ple.ple_embedding.ngram_embedding"
        tensors[f"{own}.weight"] = torch.cat([tensors.pop(f"{own}.shard_{each}.weight") for each in range(3)])
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits_of(load(path), TOKENS), expected)
    tensors[f"model.{TABLE}.layer_multipliers"] += 2
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="layer_multipliers differs"):
        load(path)


@pytest.mark.long
@pytest.mark.parametrize("changes", [{"output_gate_type": "sigmoid"}, {"ple_layer_ids": None, "hc_count": 2}])
def test_variants_agree_with_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    path = make_checkpoint("qwen4_exp", tmp_path, **changes)
    with torch.inference_mode():
        expected = load_oracle(path)(torch.tensor([TOKENS[:20]]), use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(load(path), TOKENS[:20]), expected, atol=3e-4, rtol=0)


@pytest.mark.long
def test_the_text_of_a_model_that_reads_images_is_the_same(tmp_path: Path) -> None:
    path = make_checkpoint("qwen4_exp", tmp_path)
    expected, tensors = logits_of(load(path), TOKENS), load_file(path / "model.safetensors")
    text = json.loads((path / "config.json").read_text())
    moved = {name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}
    moved |= {"model.visual.patch_embed.proj.bias": torch.zeros(2)}
    save_file(moved, path / "model.safetensors", {"format": "pt"})
    edit_config(
        path, architectures=["Qwen4ExpForConditionalGeneration"], model_type="qwen4_exp", text_config=text,
        vision_config={"model_type": "qwen4_exp_vision"},
    )  # fmt: skip
    assert torch.equal(logits_of(load(path), TOKENS), expected)
