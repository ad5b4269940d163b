"""Inkling as released, and what its configs may state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.config.checkpoint import Checkpoint
from octavo.devices.reference.attention import ReferenceBackend
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.models.loader import LoadedModel
from octavo.ops.recurrent import TokenRows
from octavo.ops.registry import bind
from octavo.ops.relative import relative_attention
from octavo.ops.stored_rows import example_rows
from tests.fakes.checkpoints import edit_config, load_oracle, make_checkpoint
from tests.fakes.vision import write_tokenizer

PROMPT = {"prompt_token_ids": [3 + 7 * place % 120 for place in range(40)]}
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, logprobs=3, ignore_eos=True)


def generate(path: Path, **args: Any) -> Any:
    write_tokenizer(path)
    with LLM(str(path), dtype="float32", num_gpu_blocks_override=64, **args) as llm:
        [output] = llm.generate([PROMPT], PARAMS)
    assert output.error is None
    return output.outputs[0]


def edit_text(path: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    text = json.loads((path / "config.json").read_text())["text_config"]
    edit_config(path, text_config={**{k: v for k, v in text.items() if k not in remove}, **changes})


@pytest.mark.long
def test_a_release_gives_the_bits_of_transformers_layout(tmp_path: Path) -> None:
    path = make_checkpoint("inkling", tmp_path)
    expected = generate(path)
    others = {"intermediate_size": 24, "dense_intermediate_size": 56, "dense_mlp_idx": 1, "local_layer_ids": [0, 2]}
    others |= {"sconv_kernel_size": 4, "model_max_length": 256, "use_sconv": True, "norm_after_topk": True}
    gone = ("layer_types", "mlp_layer_types", "moe_intermediate_size", "conv_kernel_size", "max_position_embeddings")
    edit_text(path, gone, **others)
    found = generate(path)
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)


@pytest.mark.long
def test_tokens_beyond_the_unpadded_vocabulary_are_never_drawn(tmp_path: Path) -> None:
    path = make_checkpoint("inkling", tmp_path, unpadded_vocab_size=80)
    found, oracle = generate(path), load_oracle(path)
    ids = [*PROMPT["prompt_token_ids"], *found.token_ids]
    with torch.inference_mode():
        logits = oracle(torch.tensor([ids])).logits[0]
    assert logits.shape[1] == 80
    assert logits[len(PROMPT["prompt_token_ids"]) - 1 : -1].argmax(-1).tolist() == list(found.token_ids)


@pytest.mark.long
def test_prediction_layers_and_encoders_are_left_out(tmp_path: Path) -> None:
    path = make_checkpoint("inkling", tmp_path)
    expected, tensors = generate(path), load_file(path / "model.safetensors")
    save_file({**tensors, "model.mtp.layers.0.norm.weight": torch.ones(32)}, path / "model.safetensors")
    assert generate(path).token_ids == expected.token_ids


def test_the_growth_of_queries_is_computed_for_positions_that_are_served(tmp_path: Path) -> None:
    path = make_checkpoint("inkling", tmp_path)
    edit_text(path, max_position_embeddings=2**31 - 1)
    opened = LoadedModel.open(Checkpoint.open(path), Mesh.single(), torch.float32)
    layer: Any = opened.load(bind(), ReferenceBackend(), max_positions=40).layers["1"]
    assert len(layer.self_attn.rel_logits_proj._factors) == 40


@pytest.mark.parametrize("window", [None, 9])
def test_scores_have_products_with_the_profile_of_their_distance(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, factors = (
        torch.randn(20, heads, dim, generator=generator) for heads, dim in ((4, 8), (2, 8), (2, 8), (4, 3))
    )
    profiles = torch.randn(3, window or 6, generator=generator)
    rows = example_rows((20,), (20,), 16)
    cache = torch.full((3, 16 * 2 * 2 * 8), torch.nan)
    found = relative_attention(q, (k, v), (factors, profiles), cache, rows, 0.3, window)
    distance = torch.arange(20)[:, None] - torch.arange(20)
    biases = (factors @ profiles)[:, :, distance.clamp(0, profiles.shape[1] - 1)]  # [queries, heads, queries, keys]
    biases = biases[torch.arange(20), :, torch.arange(20)].masked_fill((distance >= profiles.shape[1])[:, None], 0.0)
    scores = torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(2, 1)) * 0.3 + biases
    scores = scores.masked_fill(((distance < 0) | (distance >= (window or 20)))[:, None], -torch.inf)
    expected = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v.repeat_interleave(2, 1))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 40])
def test_the_bits_of_a_query_do_not_depend_on_the_cut_of_its_prompt(window: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v, factors = (
        torch.randn(70, heads, dim, generator=generator) for heads, dim in ((6, 8), (2, 8), (2, 8), (6, 3))
    )
    profiles, cache = torch.randn(3, 40, generator=generator), torch.zeros(6, 16 * 2 * 2 * 8)

    def attend(first: int, end: int, rows: TokenRows) -> torch.Tensor:
        part = slice(first, end)
        return relative_attention(q[part], (k[part], v[part]), (factors[part], profiles), cache, rows, 0.3, window)

    whole = attend(0, 70, example_rows((70,), (70,), 16))
    for sizes in ([1] * 70, [7] * 10, [33, 37]):
        ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
        parts = [
            attend(end - size, end, example_rows((size,), (end,), 16)) for size, end in zip(sizes, ends, strict=True)
        ]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_sconv": False}, "use_sconv is false, expected true"),
        ({"shared_expert_sink": False}, "shared_expert_sink is false, expected true"),
        ({"q_bias": True}, "q_bias is true, expected false"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"v_head_dim": 16}, "v_head_dim is 16, expected 8"),
        ({"swa_num_key_value_heads": 3}, "swa_num_key_value_heads is 3"),
        ({"layer_types": ["hybrid"]}, 'layer_types is .*, expected "hybrid" or "hybrid_sliding" for each of 3 layers'),
        ({"layer_types": None, "local_layer_ids": [3]}, "local_layer_ids is .*, expected numbers of the 3 layers"),
        ({"unpadded_vocab_size": 131}, "unpadded_vocab_size is 131, expected at most vocab_size, which is 130"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok is 7, expected at most n_routed_experts, which is 6"),
    ],
    ids=str,
)
def test_configs_of_other_models_are_refused_by_name(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = make_checkpoint("inkling", tmp_path)
    edit_text(path, **change)
    with pytest.raises((CheckpointError, UnsupportedModel), match=said):
        LoadedModel.open(Checkpoint.open(path), Mesh.single(), torch.float32)
