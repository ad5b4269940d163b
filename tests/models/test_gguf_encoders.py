"""A GGUF file of a model for vectors or scores computes, bit by bit, what the checkpoint computes it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.config.checkpoint import Checkpoint
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.gguf.reader import read_gguf
from octavo.llm import LLM
from tests.fakes.gguf_encoders import convert_encoder, halved, joined, squeezed
from tests.fakes.gguf_files import Stored, plain
from tests.fakes.vector_models import save, write_modules
from tests.models.test_distance_encoders import random_jina
from tests.models.test_encoders import ENCODERS

LONG = pytest.mark.long
PROMPTS: list[Any] = [{"prompt_token_ids": [1, *range(5, 5 + count), 2]} for count in (3, 1, 90)]
XLM = {"type_vocab_size": 1, "pad_token_id": 1}
MODERN = {"num_hidden_layers": 4, "local_attention": 16}
HEADS = {"head_dim": 16, "num_key_value_heads": 2}
GEMMA = {**HEADS, "use_bidirectional_attention": True, "sliding_window": 16, "num_hidden_layers": 6}
GEMMA["query_pre_attn_scalar"] = 16


@pytest.mark.parametrize(
    ("family", "architecture", "config", "change"),
    [
        ("Bert", "bert", ENCODERS["Bert"], dict),
        pytest.param("XLMRoberta", "bert", XLM, squeezed, marks=LONG),
        ("ModernBert", "modern-bert", MODERN, dict),
        ("Gemma3Text", "gemma-embedding", GEMMA, dict),
        pytest.param("NomicBert", "nomic-bert", {}, dict, marks=LONG),
        pytest.param("Roberta", "bert", XLM, dict, marks=LONG),
        pytest.param("XLMRoberta", "bert", XLM, joined, marks=LONG),
        pytest.param("DistilBert", "bert", ENCODERS["DistilBert"], dict, marks=LONG),
        pytest.param("JinaEmbeddingsV3", "jina-bert-v3", {"type_vocab_size": 1}, dict, marks=LONG),
        pytest.param("EuroBert", "eurobert", HEADS, dict, marks=LONG),
    ],
)
def test_vectors_are_those_of_the_checkpoint(
    family: str, architecture: str, config: dict[str, Any], change: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    save(folder, f"{family}Model", **config)
    write_modules(folder, "mean", "Normalize")
    same_vectors(folder, convert_encoder(folder, architecture, {"pooling_type": 1}, change))


@pytest.mark.parametrize("change", [dict, halved])
def test_vectors_of_jina_bert(change: Any, tmp_path: Path) -> None:
    (folder := tmp_path / "m").mkdir()
    random_jina(folder, is_for_code=False)
    write_modules(folder, "lasttoken", "Normalize")
    same_vectors(folder, convert_encoder(folder, "jina-bert-v2", {"pooling_type": 3}, change))


def same_vectors(folder: Path, file: Path) -> None:
    with LLM(str(folder)) as llm:
        want, longest = [each.outputs for each in llm.embed(PROMPTS)], llm.config.model.max_model_len
    with LLM(str(file), tokenizer=str(folder)) as llm:
        assert [each.outputs for each in llm.embed(PROMPTS)] == want
        assert [llm.embed(each)[0].outputs for each in PROMPTS] == want
        assert llm.config.model.max_model_len == longest


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_layers_behind_the_pooling_are_those_of_the_file(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    save(folder, "Gemma3TextModel", **GEMMA)
    generator = torch.Generator().manual_seed(2)
    layers = [torch.randint(-9, 9, shape, generator=generator).float() for shape in ((96, 64), (64, 96))]
    dense = {f"dense_{place}.weight": each for place, each in enumerate(layers, start=2)}

    def store(name: str, tensor: Tensor) -> Stored:
        if name not in dense or kind == "F32":
            return plain(tensor)
        blocks = tensor.to(torch.int8).unflatten(-1, (-1, 32))
        scales = torch.ones(*blocks.shape[:-1], 1, dtype=torch.float16).view(torch.int8)
        return "Q8_0", tuple(tensor.shape), torch.cat((scales, blocks), -1).numpy().tobytes()

    file = convert_encoder(folder, "gemma-embedding", {"pooling_type": 1}, lambda found: {**found, **dense}, store)
    write_modules(folder, "mean")
    with LLM(str(folder)) as llm:
        pooled = [torch.tensor(each.outputs.embedding) for each in llm.embed(PROMPTS)]
    want = [torch.nn.functional.normalize(layers[1] @ (layers[0] @ each), dim=0) for each in pooled]
    with LLM(str(file), tokenizer=str(folder)) as llm:
        found = [torch.tensor(each.outputs.embedding) for each in llm.embed(PROMPTS)]
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
    bad = convert_encoder(folder, "gemma-embedding", {}, lambda found: {**found, "dense_2.weight": layers[1]})
    with pytest.raises(CheckpointError, match=r"dense_2\.weight has shape \[64, 96\], expected 64 columns"):
        LLM(str(bad), tokenizer=str(folder))


LABELS = {0: "sad", 1: "glad", 2: "neither"}


@pytest.mark.parametrize(
    ("family", "architecture", "config"),
    [
        ("XLMRoberta", "bert", {**XLM, "num_labels": 1}),
        pytest.param("DistilBert", "bert", {**ENCODERS["DistilBert"], "id2label": LABELS}, marks=LONG),
        ("ModernBert", "modern-bert", {**MODERN, "classifier_pooling": "cls", "id2label": LABELS}),
    ],
)
def test_scores_are_those_of_the_checkpoint(
    family: str, architecture: str, config: dict[str, Any], tmp_path: Path
) -> None:
    folder, more = tmp_path / "m", {"pooling_type": 4}
    save(folder, f"{family}ForSequenceClassification", **config)
    if "id2label" in config:
        more |= {"classifier.output_labels": [*LABELS.values()]}
    if "classifier_pooling" in config:
        more |= {"classifier.pooling_type": 2}
    file = convert_encoder(folder, architecture, more, squeezed if "num_labels" in config else dict)
    scores = []
    for model in (folder, file):
        with LLM(str(model), tokenizer=str(folder)) as llm:
            assert llm.config.model.pooling is not None
            scores.append((llm.config.model.pooling.labels, [each.outputs for each in llm.classify(PROMPTS)]))
    assert scores[0] == scores[1]


def test_a_decoder_that_a_file_makes_an_encoder_of(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    save(folder, "Qwen3Model", **HEADS, is_causal=False)
    write_modules(folder, "mean", "Normalize")
    same_vectors(folder, convert_encoder(folder, "qwen3", {"pooling_type": 1}))


@pytest.mark.parametrize(
    ("family", "config", "more", "change", "complaint"),
    [
        ("BertModel", {}, {"pooling_type": 9}, dict, r"bert\.pooling_type is 9, expected 0 \(none\), 1 \(mean\)"),
        ("BertModel", {}, {"pooling_type": "mean"}, dict, r'bert\.pooling_type is "mean", expected an integer'),
        ("BertModel", {}, {"attention.causal": 1}, dict, r"bert\.attention\.causal is 1, expected true or false"),
        ("BertForSequenceClassification", {}, {}, dict, r"cls\.weight is missing: the converter leaves out"),
        (
            *("XLMRobertaForSequenceClassification", XLM, {"classifier.output_labels": ["a", "b", "c"]}, dict),
            r"classifier\.output_labels is .*expected a name for each of the 2 rows of cls\.output\.weight",
        ),
        ("BertModel", {}, {"context_length": 7}, dict, r"embed_positions.weight has shape \[130, 64\]"),
        (
            *("BertModel", {}, {}, lambda found: {**found, "dense_2.weight": found["token_types.weight"]}),
            r"holds dense_2\.weight, which BertModel does not read",
        ),
    ],
)
def test_a_file_that_contradicts_itself_is_refused_by_name(
    family: str, config: dict[str, Any], more: dict[str, Any], change: Any, complaint: str, tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    save(folder, family, **config)
    file = convert_encoder(folder, "bert", more, change)
    with pytest.raises((CheckpointError, UnsupportedModel), match=complaint):
        LLM(str(file), tokenizer=str(folder))


def test_a_file_that_judges_by_yes_and_no_has_these_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    save(folder, "Qwen3ForCausalLM", **HEADS)
    words = {"model": "gpt2", "pre": "qwen2", "tokens": [*(f"t{n}" for n in range(98)), "no", "yes"]}
    words |= {"token_type": [1] * 100, "merges": []}
    more: dict[str, Any] = {f"tokenizer.ggml.{name}": each for name, each in words.items()}

    def judged(found: dict[str, Tensor]) -> dict[str, Tensor]:
        head = found.get("output.weight", found["token_embd.weight"])
        return {**found, "cls.output.weight": head[[99, 98]].clone()}

    file = convert_encoder(folder, "qwen3", {"pooling_type": 4, "attention.causal": True, **more}, judged)
    assert Checkpoint.open(file).gguf == read_gguf(file)
    scores = []
    for model, options in ((file, {}), (folder, {"convert": "embed"})):
        with LLM(str(model), tokenizer=str(folder), **options) as llm:
            pooling = llm.config.model.pooling
            assert pooling is not None
            scores.append(pooling.token_ids)
    assert scores == [(99, 98), ()]
    wide = convert_encoder(folder, "qwen3", {"pooling_type": 4, "embedding_length": 4096, **more}, without_head)
    with pytest.raises(UnsupportedModel, match=r"output\.weight is missing: of rerankers of this size"):
        Checkpoint.open(wide)


def without_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each for name, each in tensors.items() if name != "output.weight"}
