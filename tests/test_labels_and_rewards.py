"""Heads beside those of transformers' encoders: labels of the privacy filter, rewards, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.config.args import EngineArgs
from octavo.config.checkpoint import Checkpoint
from octavo.config.read_pooling import pooling_config
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.llm import LLM
from tests.fakes.checkpoints import edit_config, edit_tensors
from tests.fakes.rank_threads import llm_of_ranks
from tests.fakes.vector_models import save, write_tokenizer
from tests.models.test_encoders import TEXTS, hidden_of

QWEN: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}
FILTER: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "num_labels": 3}


@pytest.mark.parametrize("device", ["auto", "reference"])
def test_the_privacy_filter_sees_a_window_to_both_sides(tmp_path: Path, device: str) -> None:
    model = save(tmp_path, "OpenAIPrivacyFilterForTokenClassification", **QWEN, **FILTER)
    with LLM(str(tmp_path), device=device) as llm:
        together = llm.encode(TEXTS)
        for output in together:
            with torch.inference_mode():
                want = model(input_ids=torch.tensor([output.prompt_token_ids])).logits[0].softmax(-1)
            np.testing.assert_allclose(output.outputs.data, want.numpy(), rtol=1e-4, atol=1e-5)
        if device == "auto":
            alone = [llm.encode(text)[0].outputs.data for text in TEXTS]
            assert all((one == output.outputs.data).all() for one, output in zip(alone, together, strict=True))


@pytest.mark.long
def test_ranks_give_the_labels_of_the_privacy_filter_that_one_gives(tmp_path: Path) -> None:
    save(tmp_path, "OpenAIPrivacyFilterForTokenClassification", **QWEN, **FILTER)
    with LLM(str(tmp_path)) as llm:
        expected = [output.outputs.data for output in llm.encode(TEXTS)]
    with llm_of_ranks(tmp_path, 2) as llm:
        found = [output.outputs.data for output in llm.encode(TEXTS)]
    assert all((one == other).all() for one, other in zip(found, expected, strict=True))


def test_rewards_of_internlm_2_have_a_head_of_its_own_name(tmp_path: Path) -> None:
    model, head = save(tmp_path, "LlamaModel", num_key_value_heads=2), torch.randn(1, 64) / 8
    stored = {name.replace("embed_tokens", "tok_embeddings"): each for name, each in model.state_dict().items()}
    for layer in range(2):
        q, k, v = (
            stored.pop(f"layers.{layer}.self_attn.{each}_proj.weight").view(-1, heads, 16, 64)
            for each, heads in (("q", 2), ("k", 1), ("v", 1))
        )
        stored[f"layers.{layer}.attention.wqkv.weight"] = torch.cat((q, k, v), 1).reshape(-1, 64)
    names = {
        "self_attn.o_proj": "attention.wo",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    for ours, theirs in names.items():
        stored = {name.replace(ours, theirs): each for name, each in stored.items()}
    stored = {f"model.{name}": each.contiguous() for name, each in stored.items()} | {"v_head.weight": head}
    edit_tensors(tmp_path, remove=tuple(model.state_dict()), **stored)
    edit_config(tmp_path, architectures=["InternLM2ForRewardModel"], model_type="internlm2", bias=False)
    with LLM(str(tmp_path)) as llm:
        for output in llm.encode(TEXTS):
            want = hidden_of(model, output.prompt_token_ids) @ head.T
            np.testing.assert_allclose(output.outputs.data, want.numpy(), rtol=1e-5, atol=1e-5)


def test_rewards_of_jamba_have_no_bounds(tmp_path: Path) -> None:
    c = Checkpoint(tmp_path, {"architectures": ["JambaForSequenceClassification"], "hidden_size": 8, "num_labels": 1})
    found = pooling_config(EngineArgs(model=str(tmp_path)), c)
    assert found is not None
    assert (found.labels, found.activation) == (("LABEL_0",), "identity")


def test_rerankers_that_see_both_sides_score_the_mean(tmp_path: Path) -> None:
    model = save(tmp_path, "LlamaForSequenceClassification", **QWEN, is_causal=False, num_labels=1)
    edit_config(tmp_path, architectures=["LlamaBidirectionalForSequenceClassification"], model_type="llama_bidirec")
    edit_config(tmp_path, pooling="avg", is_causal=None)
    with LLM(str(tmp_path)) as llm:
        for output in llm.score("w1 w2", TEXTS):
            want = torch.sigmoid(model.score(hidden_of(model, output.prompt_token_ids).mean(0)))
            assert output.outputs.score == pytest.approx(want.item(), rel=1e-5)
    edit_config(tmp_path, temperature=0.5)
    with pytest.raises(CheckpointError, match=r"temperature is 0.5, expected 1"):
        LLM(str(tmp_path))


@pytest.mark.parametrize("family", ["DeepseekV3", "Bloom"])
def test_layers_that_hide_tokens_behind_are_refused_where_tokens_see_both_sides(tmp_path: Path, family: str) -> None:
    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    sizes = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "num_key_value_heads": 4}
    own = latent | sizes if family == "DeepseekV3" else {"n_layer": 2, "n_head": 4}
    save(tmp_path, f"{family}Model", **own)
    edit_config(tmp_path, is_causal=False)
    with pytest.raises(UnsupportedModel, match="tokens see those behind them, which is not implemented"):
        LLM(str(tmp_path))


@pytest.mark.parametrize(
    ("names", "own", "written"),
    [
        (["no", "yes"], {"is_original_qwen3_reranker": True}, True),
        (["w3", "w4"], {"method": "from_2_way_softmax"}, False),
        (["w3"], {"method": "no_post_processing"}, False),
    ],
)
def test_a_model_may_judge_by_the_tokens_that_overrides_name(
    tmp_path: Path, names: list[str], own: dict[str, Any], written: bool
) -> None:
    model = save(tmp_path, "Qwen3ForCausalLM", **QWEN, tie_word_embeddings=False)
    write_tokenizer(tmp_path, ends=False, words=("yes", "no"))
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": names, **own}
    with LLM(str(tmp_path), hf_overrides=overrides) as llm:
        (output,) = llm.score("w7", "w8")
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([output.prompt_token_ids])).logits[0, -1]
        ids = [llm.get_tokenizer().token_id(name) for name in names]
        want = logits[ids[-1]] - (logits[ids[0]] if len(ids) == 2 else 0.0)
        assert output.outputs.score == pytest.approx(torch.sigmoid(want).item(), rel=1e-5)
        assert (output.prompt_token_ids == [11, 12]) is not written
    with pytest.raises(CheckpointError, match="classifier_from_token .* expected one token of the tokenizer, or one"):
        LLM(str(tmp_path), hf_overrides=overrides | {"classifier_from_token": ["absent"], "method": None})
