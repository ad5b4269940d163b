"""Heads beside those of transformers' encoders: labels of the privacy filter, rewards, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.config.args import EngineArgs
from octavo.config.checkpoint import Checkpoint
from octavo.config.pooling.read_pooling import pooling_config
from octavo.core.pooling import PoolingParams
from octavo.errors import CheckpointError, ConfigError, InvalidRequest, UnsupportedModel
from octavo.llm import LLM
from tests.fakes.checkpoints import edit_config, edit_tensors
from tests.fakes.rank_threads import llm_of_ranks
from tests.fakes.vector_models import save, write_tokenizer
from tests.models.test_encoders import DEBERTA, TEXTS, hidden_of

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


GPT2: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 130, "num_labels": 3}
NEO = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8}


def _long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("GPT2ForTokenClassification", GPT2),
        ("EuroBertForSequenceClassification", {"classifier_pooling": "late"}),
        _long("EuroBertForSequenceClassification", {"classifier_pooling": "bos"}),
        _long("EuroBertForSequenceClassification", {"classifier_pooling": "mean"}),
        _long("EuroBertForTokenClassification", {}),
        _long("ModernBertForSequenceClassification", {"classifier_activation": "silu", "local_attention": 16}),
        _long("ModernBertForTokenClassification", {"classifier_activation": "silu", "local_attention": 16}),
        _long("DistilBertForTokenClassification", {"n_layers": 2, "n_heads": 4, "dim": 64, "hidden_dim": 96}),
        _long("RobertaForTokenClassification", {}),
        _long("GteForTokenClassification", {"type_vocab_size": 2}),
        _long("GPT2ForSequenceClassification", GPT2),
        _long("GPTBigCodeForTokenClassification", GPT2),
        _long("GPTNeoForTokenClassification", NEO),
        _long("GPTNeoXForTokenClassification", {}),
        _long("FalconForTokenClassification", {}),
        _long("BloomForTokenClassification", {}),
        _long("MptForTokenClassification", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 130}),
    ],
)
def test_labels_by_a_layer_of_another_name(tmp_path: Path, name: str, own: dict[str, Any]) -> None:
    """Decoders of transformers store it as `score` or `classifier`; EuroBERT has a dense layer before it."""
    model = save(tmp_path, name, **{"num_labels": 3} | own)
    edit_config(tmp_path, bos_token_id=1, eos_token_id=2)
    task = "token_classify" if "Token" in name else "classify"
    with LLM(str(tmp_path)) as llm:
        together = llm.encode(TEXTS, pooling_task=task)
        for output in together:
            with torch.inference_mode():
                want = model(input_ids=torch.tensor([output.prompt_token_ids])).logits[0].softmax(-1)
            np.testing.assert_allclose(output.outputs.data, want.numpy(), rtol=1e-5, atol=1e-5)
        alone = [llm.encode(text, pooling_task=task)[0].outputs.data for text in TEXTS]
        assert all((one == output.outputs.data).all() for one, output in zip(alone, together, strict=True))


@pytest.mark.parametrize("family", ["Bert", *map(_long, ("Roberta", "XLMRoberta", "Camembert", "Ernie", "DebertaV2"))])
def test_guesses_of_masked_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """A row of each token, with the probability of each token of the vocabulary; logits without the activation."""
    monkeypatch.setattr("octavo.worker.pooling.LOGITS_BYTES", 4000)  # ten rows together
    model = save(tmp_path, f"{family}ForMaskedLM", **(DEBERTA if family == "DebertaV2" else {"type_vocab_size": 1}))
    with LLM(str(tmp_path), convert="classify") as llm:
        together = llm.encode(TEXTS)
        raw = llm.encode(TEXTS, pooling_params=PoolingParams(use_activation=False))
        for output, logits in zip(together, raw, strict=True):
            with torch.inference_mode():
                want = model(input_ids=torch.tensor([output.prompt_token_ids])).logits[0]
            np.testing.assert_allclose(logits.outputs.data, want.numpy(), rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(output.outputs.data, want.softmax(-1).numpy(), rtol=1e-5, atol=1e-5)
        alone = [llm.encode(text)[0].outputs.data for text in TEXTS]
        assert all((one == output.outputs.data).all() for one, output in zip(alone, together, strict=True))
        with pytest.raises(InvalidRequest, match="made for token_classify"):
            llm.embed("w1")
    with LLM(str(tmp_path)) as llm:
        assert len(llm.embed("w1")[0].outputs.embedding) == 64


@pytest.mark.parametrize(
    ("family", "kind"), [("ModernBert", "modernbert"), ("Electra", "electra"), ("EuroBert", "eurobert")]
)
def test_families_without_guesses_of_masked_tokens_are_named(tmp_path: Path, family: str, kind: str) -> None:
    c = Checkpoint(tmp_path, {"architectures": [f"{family}ForMaskedLM"], "model_type": kind, "hidden_size": 8})
    with pytest.raises(ConfigError, match=f"guesses of masked tokens of {family}ForMaskedLM are not implemented, only"):
        pooling_config(EngineArgs(model=str(tmp_path), convert="classify"), c)


@pytest.mark.long
def test_labels_of_gpt2_are_the_same_in_pieces(tmp_path: Path) -> None:
    save(tmp_path, "GPT2ForSequenceClassification", **GPT2)
    edit_config(tmp_path, bos_token_id=1, eos_token_id=2)
    with LLM(str(tmp_path)) as llm:
        expected = [output.outputs for output in llm.classify(TEXTS)]
    with LLM(str(tmp_path), max_num_batched_tokens=24, max_num_seqs=4) as llm:
        assert [output.outputs for output in llm.classify(TEXTS)] == expected


def test_ways_to_score_and_widths_that_are_not_implemented_are_named(tmp_path: Path) -> None:
    euro = {"architectures": ["EuroBertForSequenceClassification"], "model_type": "eurobert", "hidden_size": 8}
    cases = [
        (euro | {"classifier_pooling": "first"}, 'classifier_pooling is "first", expected "bos" or "mean" or "late"'),
        (
            {"architectures": ["OPTModel"], "model_type": "opt", "hidden_size": 64, "word_embed_proj_dim": 32},
            "word_embed_proj_dim is 32, expected 64",
        ),
    ]
    for config, message in cases:
        with pytest.raises(CheckpointError, match=message):
            pooling_config(EngineArgs(model=str(tmp_path)), Checkpoint(tmp_path, config))


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


@pytest.mark.parametrize(
    ("more", "activation"),
    [
        ({}, "identity"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, "sigmoid"),
    ],
)
def test_numbers_that_a_classifier_was_trained_for_have_no_bounds(
    tmp_path: Path, more: dict[str, Any], activation: str
) -> None:
    values = {"architectures": ["BertForSequenceClassification"], "model_type": "bert", "hidden_size": 8}
    c = Checkpoint(tmp_path, values | {"num_labels": 1, "problem_type": "regression"} | more)
    found = pooling_config(EngineArgs(model=str(tmp_path)), c)
    assert found is not None
    assert found.activation == activation


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
