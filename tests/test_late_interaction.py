"""Late interaction: vectors of tokens as transformers gives them, and their scores by MaxSim."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.errors import InvalidRequest
from octavo.llm import LLM
from tests.fakes.checkpoints import edit_config, edit_tensors, rename_tensors
from tests.fakes.vector_models import save, write_late_interaction, write_modules

DOCUMENTS = ["w3 w7 w8", " ".join(f"w{number * 7 % 90}" for number in range(90)), "w7", "w1 w2 w3"]
MASK, QUERY, DOCUMENT, PUNCTUATION = 99, 94, 95, 11
"""Ids of w95, w90, w91 and w7."""


def vectors_of(model: Any, projection: torch.Tensor, ids: list[int], num_unseen: int = 0) -> torch.Tensor:
    seen = torch.tensor([[1] * (len(ids) - num_unseen) + [0] * num_unseen])
    with torch.inference_mode():
        hidden = model(input_ids=torch.tensor([ids]), attention_mask=seen).last_hidden_state[0]
    return torch.nn.functional.normalize(hidden @ projection.T, dim=-1)


@pytest.mark.parametrize("device", ["auto", "reference"])
@pytest.mark.parametrize("is_seen", [False, True])
def test_scores_are_those_of_masked_vectors_without_punctuation(tmp_path: Path, is_seen: bool, device: str) -> None:
    model, projection = save(tmp_path, "ModernBertModel", local_attention=64), torch.randn(24, 64)
    keys = {"document_length": 40, "skiplist_words": ["w7", "absent"], "attend_to_expansion_tokens": is_seen}
    write_late_interaction(tmp_path, projection, **keys)
    query_ids = [1, QUERY, 5, 6, 2] + [MASK] * 11
    query = vectors_of(model, projection, query_ids, 0 if is_seen else 11)
    with LLM(str(tmp_path), device=device) as llm:
        together = llm.score("w1 w2", DOCUMENTS)
        for text, output in zip(DOCUMENTS, together, strict=True):
            words = [int(word[1:]) + 4 for word in text.split()][:37]
            ids = [1, DOCUMENT, *words, 2]
            assert output.prompt_token_ids == query_ids + ids
            document = vectors_of(model, projection, ids)[[each != PUNCTUATION for each in ids]]
            want = (query @ document.T).max(1).values.sum().item()
            assert output.outputs.score == pytest.approx(want, rel=1e-5)
        assert [llm.score("w1 w2", each)[0].outputs for each in DOCUMENTS] == [each.outputs for each in together]
        (rows,) = llm.encode("w1 w2")
        want_rows = vectors_of(model, projection, [1, 5, 6, 2]).numpy()
        np.testing.assert_allclose(rows.outputs.data, want_rows, rtol=1e-5, atol=1e-5)
        (rows,) = llm.encode("w1 w2", prompt_name="query")
        np.testing.assert_allclose(rows.outputs.data, query.numpy(), rtol=1e-5, atol=1e-5)
        (cut,) = llm.score("w1 w2", "w3", truncate_prompt_tokens=8)
        assert cut.prompt_token_ids == [*query_ids[:8], 1, DOCUMENT, 7, 2]
        (rows,) = llm.encode([1, 5], prompt_name="query")
        assert rows.prompt_token_ids == [1, 5]
        (refused,) = llm.encode("w1", prompt_name="passage")
        assert refused.error is not None
        assert "must be a prompt of the checkpoint (query, document)" in refused.error.message
        with pytest.raises(InvalidRequest, match="token_embed; POST /pooling and LLM.encode return it, POST /score"):
            llm.embed("w1")


def test_colbert_has_its_projection_among_the_weights_of_bert(tmp_path: Path) -> None:
    model, projection = save(tmp_path, "BertModel"), torch.randn(24, 64)
    rename_tensors(tmp_path, "", "bert.")
    edit_tensors(tmp_path, **{"linear.weight": projection})
    edit_config(tmp_path, architectures=["HF_ColBERT"])
    meta = {"query_token_id": "w90", "doc_token_id": "w91", "query_maxlen": 8, "dim": 24, "mask_punctuation": False}
    (tmp_path / "artifact.metadata").write_text(json.dumps(meta))
    with LLM(str(tmp_path)) as llm:
        (output,) = llm.score("w1", "w2 w3")
        # this tokenizer names no token for masks, so that the one for the end is taken
        query = vectors_of(model, projection, [1, QUERY, 5, 2, 2, 2, 2, 2], 4)
        document = vectors_of(model, projection, [1, DOCUMENT, 6, 7, 2])
        assert output.outputs.score == pytest.approx((query @ document.T).max(1).values.sum().item(), rel=1e-5)


def test_bge_m3_makes_vectors_and_weights_of_tokens_beside_the_vector(tmp_path: Path) -> None:
    model = save(tmp_path, "XLMRobertaModel", type_vocab_size=1, bos_token_id=1, eos_token_id=2)
    write_modules(tmp_path, "cls", "Normalize")
    heads = {"colbert": torch.nn.Linear(64, 64), "sparse": torch.nn.Linear(64, 1)}
    for name, head in heads.items():
        torch.save(head.state_dict(), tmp_path / f"{name}_linear.pt")
    with LLM(str(tmp_path)) as llm:
        for text in DOCUMENTS:
            (whole,) = llm.embed(text)
            with torch.inference_mode():
                hidden = model(input_ids=torch.tensor([whole.prompt_token_ids])).last_hidden_state[0]
                rows = torch.nn.functional.normalize(heads["colbert"](hidden[1:]), dim=-1)
                weights = torch.relu(heads["sparse"](hidden))[1:-1, 0]
            want = torch.nn.functional.normalize(hidden[0], dim=-1)
            torch.testing.assert_close(torch.tensor(whole.outputs.embedding), want, rtol=1e-5, atol=1e-5)
            for task, expected in (("token_embed", rows), ("token_classify", weights)):
                (found,) = llm.encode(text, pooling_task=task)
                np.testing.assert_allclose(found.outputs.data, expected.numpy(), rtol=1e-5, atol=1e-5)
        (plain,) = llm.encode(DOCUMENTS[0], pooling_task="token_classify")
    with LLM(str(tmp_path), hf_overrides={"architectures": ["BgeM3EmbeddingModel"]}) as llm:  # the name in vLLM
        (named,) = llm.encode(DOCUMENTS[0], pooling_task="token_classify")
    assert (named.outputs.data == plain.outputs.data).all()
