"""Vectors of models whose last layers are among the weights: ColBERT with any encoder, Voyage, Jina's reranker."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.errors import CheckpointError, InvalidRequest
from octavo.llm import LLM
from octavo.server.decode import decode
from octavo.server.preparing import Preparer, TextPolicy
from octavo.server.schema.pairs import RerankRequest, ScoreRequest
from tests.fakes.checkpoints import edit_config, edit_tensors, rename_tensors
from tests.fakes.vector_models import save
from tests.models.test_encoders import TEXTS, hidden_of

QWEN: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}
LFM: dict[str, Any] = {"num_key_value_heads": 2, "block_ff_dim": 64, "layer_types": ["conv", "full_attention"]}
JINA: dict[str, Any] = {"model_type": "xlm-roberta", "position_embedding_type": "rotary"}
"""What the configs of Jina's releases have in the place of transformers' model type."""


PAIRS = {"text_1": ["w3", "w4"], "text_2": ["w7", "w8"]}


def normalized(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


@pytest.mark.parametrize(
    ("architecture", "family", "own", "changes", "name"),
    [
        ("ColBERTModernBertModel", "ModernBert", {}, {}, "linear"),
        ("ColBERTModernBertModel", "ModernBert", {}, {}, "colbert_linear"),
        ("ColBERTLfm2Model", "Lfm2", LFM, {}, "linear"),
        ("ColBERTJinaRobertaModel", "JinaEmbeddingsV3", {"type_vocab_size": 1}, JINA, "linear"),
        ("HF_ColBERT", "JinaEmbeddingsV3", {"type_vocab_size": 1}, JINA, "linear"),
    ],
)
def test_colbert_projects_the_states_of_any_encoder(
    tmp_path: Path, architecture: str, family: str, own: dict[str, Any], changes: dict[str, Any], name: str
) -> None:
    model, projection = save(tmp_path, f"{family}Model", **own), torch.randn(24, 64) / 8
    if family == "JinaEmbeddingsV3":
        rename_tensors(tmp_path, "", "roberta.")
    edit_tensors(tmp_path, **{f"{name}.weight": projection})
    edit_config(tmp_path, architectures=[architecture], **changes)
    with LLM(str(tmp_path)) as llm:
        for output in llm.encode(TEXTS):
            want = normalized(hidden_of(model, output.prompt_token_ids) @ projection.T)
            np.testing.assert_allclose(output.outputs.data, want.numpy(), rtol=1e-5, atol=1e-5)
        assert llm.score("w1", ["w2 w3"])[0].outputs.score > 0
    edit_tensors(tmp_path, **{f"{name}.weight": projection[:0]})
    with pytest.raises(CheckpointError, match=r"linear.weight .*, expected \[128, 64\]"):
        LLM(str(tmp_path))
    edit_tensors(tmp_path, remove=(f"{name}.weight",))
    with pytest.raises(CheckpointError, match=r"linear.weight is missing, expected \[128, 64\]"):
        LLM(str(tmp_path))


def test_threads_that_share_a_model_get_the_bits_of_the_first(tmp_path: Path) -> None:
    save(tmp_path, "ModernBertModel")
    edit_tensors(tmp_path, **{"linear.weight": torch.randn(24, 64, generator=torch.Generator().manual_seed(0)) / 8})
    edit_config(tmp_path, architectures=["ColBERTModernBertModel"])
    texts = ["w1 " * length for length in range(1, 9)]
    with LLM(str(tmp_path), num_gpu_blocks_override=64) as llm:
        expected = [output.outputs.data for output in llm.encode(texts)]
        with ThreadPoolExecutor(1) as pool:
            found = [output.outputs.data for output in pool.submit(llm.encode, texts).result()]
    assert all((one == other).all() for one, other in zip(found, expected, strict=True))


def test_vectors_of_voyage_are_wider_than_its_states(tmp_path: Path) -> None:
    model, projection = save(tmp_path, "Qwen3Model", **QWEN, is_causal=False), torch.randn(80, 64) / 8
    edit_tensors(tmp_path, **{"linear.weight": projection})
    edit_config(tmp_path, architectures=["VoyageQwen3BidirectionalEmbedModel"], is_causal=None)
    with LLM(str(tmp_path)) as llm:
        for output in llm.embed(TEXTS):
            want = normalized(hidden_of(model, output.prompt_token_ids).mean(0) @ projection.T)
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), want, rtol=1e-5, atol=1e-5)


def test_jinas_reranker_makes_vectors_of_documents_and_of_the_query_behind_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.config.pooling.projections._JINA_ROWS", (6, 5))
    model, first, second = save(tmp_path, "Qwen3Model", **QWEN), torch.randn(32, 64) / 8, torch.randn(24, 32) / 8
    edit_tensors(tmp_path, **{"projector.0.weight": first, "projector.2.weight": second})
    edit_config(tmp_path, architectures=["JinaForRanking"])
    with LLM(str(tmp_path)) as llm:
        (output,) = llm.encode("w1 w7 w2 w8 w9 w2 w1")
        hidden = hidden_of(model, output.prompt_token_ids)
        ids = torch.tensor(output.prompt_token_ids)
        want = (hidden @ first.T).relu() @ second.T
        np.testing.assert_allclose(output.outputs.data, want[[3, 6, 1, 7]].numpy(), rtol=1e-5, atol=1e-5)
        assert ids[[3, 6, 1, 7]].tolist() == [6, 6, 5, 5]
        with pytest.raises(InvalidRequest, match="made for token_embed; POST /pooling and LLM.encode return it"):
            llm.embed("w1")


def test_jinas_reranker_compares_a_query_with_all_documents_in_one_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.config.pooling.projections._JINA_ROWS", (6, 5))
    model = save(tmp_path, "Qwen3Model", **QWEN, max_position_embeddings=400)
    first, second = torch.randn(32, 64) / 8, torch.randn(24, 32) / 8
    edit_tensors(tmp_path, **{"projector.0.weight": first, "projector.2.weight": second})
    edit_config(tmp_path, architectures=["JinaForRanking"])
    texts = ["w7", "w8 </s> w9", "w8"]
    with LLM(str(tmp_path), max_model_len=300) as llm:
        tools = llm.engine.input
        outputs = llm.score("w3 w4", texts)
        (ids,) = {tuple(output.prompt_token_ids) for output in outputs}
        places = [place for mark in (6, 5) for place in range(len(ids)) if ids[place] == mark]
        assert len(places) == 4
        assert tools.tokenizer.special_tokens["sep_token"] == "</s>"
        assert tools.tokenizer.token_id("</s>") not in ids, "it is text in a text"
        with pytest.raises(InvalidRequest, match="spells the mark"):
            llm.score("w3", "w8 w2")
        rows = (hidden_of(model, list(ids))[places] @ first.T).relu() @ second.T
        want = torch.nn.functional.cosine_similarity(rows[-1], rows[:-1])
        scores = [output.outputs.score for output in outputs]
        torch.testing.assert_close(torch.tensor(scores), want, rtol=1e-4, atol=1e-5)
        preparer = Preparer(tools, TextPolicy())
        for text, count, kind in (({"query": "w3 w4", "documents": texts}, 1, RerankRequest), (PAIRS, 2, ScoreRequest)):
            assert len(prompts := decode(json.dumps(text).encode(), kind).prompts(preparer)) == count
            if count == 1:
                assert prompts[0].token_ids == list(ids)
        assert [each.outputs.score for each in llm.score(PAIRS["text_1"], PAIRS["text_2"])] == [
            llm.score(one, other)[0].outputs.score for one, other in zip(*PAIRS.values(), strict=True)
        ]
        (failed, _) = llm.score("w3", ["w4 " * 300, "w5"])
        assert (failed.outputs, failed.error is None) == (None, False)
        picture = {"content": [{"type": "image_url", "image_url": "data:image/png;base64,AAAA"}]}
        for body, said in (
            ({"documents": ["w7"], "truncate_prompt_tokens": -1}, "would cut off documents"),
            ({"documents": [picture]}, "reads text alone"),
        ):
            with pytest.raises(InvalidRequest, match=said):
                decode(json.dumps({"query": "w3"} | body).encode(), RerankRequest).prompts(preparer)


def test_a_layer_may_be_in_one_of_several_files(tmp_path: Path) -> None:
    model, projection = save(tmp_path, "BertModel"), torch.randn(24, 64) / 8
    stored = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = {"model-1.safetensors": stored, "model-2.safetensors": {"linear.weight": projection}}
    index = {name: file for file, tensors in names.items() for name in tensors}
    for file, tensors in names.items():
        save_file(tensors, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    edit_config(tmp_path, architectures=["HF_ColBERT"])
    with LLM(str(tmp_path)) as llm:
        (output,) = llm.encode(TEXTS[0])
        want = normalized(hidden_of(model, output.prompt_token_ids) @ projection.T)
        np.testing.assert_allclose(output.outputs.data, want.numpy(), rtol=1e-5, atol=1e-5)
