"""Vectors and scores of ranks that share a model are those of one rank, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from octavo import LLM
from octavo.errors import ConfigError
from tests.fakes.rank_threads import llm_of_ranks
from tests.fakes.vector_models import save, write_modules, write_splade, write_tokenizer

TEXTS: Final = ["w1 w2 w3", " ".join(f"w{number * 7 % 96}" for number in range(70)), "w4"]
QWEN: Final = {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}


def _vectors(folder: Path) -> None:
    save(folder, "Qwen3Model", **QWEN)
    torch.manual_seed(0)
    write_modules(folder, "lasttoken", "Dense", "Normalize", dense=torch.nn.Linear(64, 32))


def _judge(folder: Path) -> None:
    save(folder, "Qwen3ForCausalLM", **QWEN)
    write_tokenizer(folder, ends=False, words=("yes", "no"))


KINDS: Final[dict[str, tuple[Callable[[Path], object], Callable[[LLM], list[Any]], dict[str, Any]]]] = {
    "vectors": (_vectors, lambda llm: llm.embed(TEXTS), {}),
    "rows": (_vectors, lambda llm: llm.encode(TEXTS), {"pooler_config": {"task": "token_embed"}}),
    # as many labels as no number of ranks divides
    "labels": (
        lambda folder: save(folder, "Qwen3ForSequenceClassification", num_labels=3, **QWEN),
        lambda llm: llm.classify(TEXTS),
        {},
    ),
    # of a family that stores it under another name
    "rows of labels": (
        lambda folder: save(folder, "GPT2ForTokenClassification", n_embd=64, n_layer=2, n_head=4, num_labels=3),
        lambda llm: llm.encode(TEXTS),
        {},
    ),
    "judge": (_judge, lambda llm: llm.score(TEXTS[0], TEXTS), {"convert": "classify"}),
    "encoder": (
        lambda folder: save(folder, "BertForSequenceClassification", num_labels=3),
        lambda llm: llm.classify(TEXTS),
        {},
    ),
}


@pytest.mark.parametrize(
    ("kind", "tensor", "pipeline"),
    [
        *[(kind, *ranks) for kind in ("vectors", "labels", "judge") for ranks in ((2, 1), (1, 2), (2, 2))],
        *[("rows", 2, 2), ("encoder", 2, 1)],
        pytest.param("rows of labels", 2, 2, marks=pytest.mark.long),
    ],
)
def test_ranks_make_the_bits_of_one(kind: str, tensor: int, pipeline: int, tmp_path: Path) -> None:
    make, ask, arguments = KINDS[kind]
    make(tmp_path)
    arguments = {"max_num_batched_tokens": 48, "max_num_seqs": 4, **arguments}
    with LLM(str(tmp_path), **arguments) as llm:
        expected = [output.outputs for output in ask(llm)]
    with llm_of_ranks(tmp_path, tensor, pipeline, **arguments) as llm:
        found = [output.outputs for output in ask(llm)]
    if kind.startswith("rows"):
        assert all(np.array_equal(a.data, b.data) for a, b in zip(found, expected, strict=True))
    else:
        assert found == expected


def test_weights_of_tokens_are_made_on_one_rank(tmp_path: Path) -> None:
    save(tmp_path, "BertForMaskedLM")
    write_splade(tmp_path)
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size is 2, but a model .* of the vocabulary .* runs in one rank"
    ):
        LLM(str(tmp_path), tensor_parallel_size=2)
