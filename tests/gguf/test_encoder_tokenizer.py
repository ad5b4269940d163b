"""The tokenizer of an encoder's file makes the ids that the original tokenizer makes, with the tokens around texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from octavo.engine.text.tokenizer import Tokenizer
from octavo.errors import CheckpointError
from tests.fakes.gguf_files import gguf_bytes

TEXTS = ("Naïve blocks aren't PAGES, 東京!", "  two  spaces\tand\nlines ", "unheardof 12345 ???", "")
CORPUS = ["naive naïve blocks are pages", "Two spaces and lines 12345", "don't! aren't? PAGES, 東 京"] * 20


def trained(model: str, lowercase: bool) -> Backend:
    """A small tokenizer of the kind of BERT, or of XLM-RoBERTa."""
    if model == "bert":
        backend = Backend(models.WordPiece(unk_token="[UNK]"))
        backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        trainer: Any = trainers.WordPieceTrainer(vocab_size=120, special_tokens=special, show_progress=False)
        single, pair, ends = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    else:
        backend = Backend(models.Unigram())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
        )
        special = ["<s>", "<pad>", "</s>", "<unk>"]
        trainer = trainers.UnigramTrainer(
            vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False
        )
        single, pair, ends = "<s> $A </s>", "<s> $A </s> </s> $B </s>", [("<s>", 0), ("</s>", 2)]
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ends)
    return backend


def write(path: Path, backend: Backend, model: str, more: dict[str, Any] | None = None) -> Path:
    """Write the tokenizer as the converter does: words of BERT have ▁ before them, and pieces within words nothing."""
    tokens: list[str] = [str(backend.id_to_token(number)) for number in range(backend.get_vocab_size())]
    special = {number for number, each in backend.get_added_tokens_decoder().items() if each.special}
    own: dict[str, Any] = {"model": model, "pre": "default"}
    own["token_type"] = [3 if number in special else 1 for number in range(len(tokens))]
    if model == "bert":
        for number in set(range(len(tokens))) - special:
            token = tokens[number]
            tokens[number] = token[2:] if token.startswith("##") else f"▁{token}"
        own |= {"bos_token_id": 2, "seperator_token_id": 3, "unknown_token_id": 1}
    else:
        state = json.loads(backend.to_str())["model"]
        own |= {"scores": [float(score) for _, score in state["vocab"]], "remove_extra_whitespaces": True}
        own |= {"add_bos_token": True, "add_eos_token": True, "bos_token_id": 0, "eos_token_id": 2}
        own["unknown_token_id"] = state["unk_id"]
    metadata = {f"tokenizer.ggml.{key}": each for key, each in {**own, "tokens": tokens, **(more or {})}.items()}
    path.write_bytes(gguf_bytes(metadata, {}))
    return path


@pytest.mark.parametrize(("model", "lowercase"), [("bert", True), ("bert", False), ("t5", False)])
def test_ids_of_texts_and_pairs_are_those_of_the_original(model: str, lowercase: bool, tmp_path: Path) -> None:
    backend = trained(model, lowercase)
    found = Tokenizer.open(write(tmp_path / "m.gguf", backend, model))
    for text in TEXTS:
        assert found.encode(text) == backend.encode(text).ids
        assert found.encode(text, add_special_tokens=False) == backend.encode(text, add_special_tokens=False).ids
        pair = backend.encode(text, "are pages")
        ids, second = found.encode_whole((text, "are pages"), None)
        assert ids == pair.ids
        assert second == (pair.type_ids.index(1) if 1 in pair.type_ids else 0)


@pytest.mark.parametrize(
    ("model", "more", "complaint"),
    [
        ("bert", {"seperator_token_id": 999}, "seperator_token_id is 999, expected the id of the token"),
        ("bert", {"unknown_token_id": "no"}, "unknown_token_id is 'no', expected the id of the token"),
        ("t5", {"scores": [0.0]}, "scores has 1 numbers, expected "),
        ("t5", {"scores": "no"}, "scores has 0 numbers, expected "),
        ("t5", {"unknown_token_id": -4}, "unknown_token_id is -4, expected 0 to "),
        ("t5", {"precompiled_charsmap": [4, 0, 0]}, "precompiled_charsmap has 3 elements, expected the bytes"),
        ("t5", {"precompiled_charsmap": [8, 0, 0, 0, 1, 2]}, "precompiled_charsmap has 6 elements, expected the bytes"),
        ("t5", {"precompiled_charsmap": [0, 4, 0, 0, *[126] * 1024, 97, 0]}, "precompiled_charsmap has 1,030 elements"),
        ("t5", {"eos_token_id": 7.5}, "eos_token_id is 7.5, expected the id of the token </s>"),
    ],
)
def test_a_damaged_tokenizer_is_refused_by_name(
    model: str, more: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "m.gguf", trained(model, True), model, more)
    with pytest.raises(CheckpointError, match=rf"m\.gguf: tokenizer\.ggml\.{complaint}"):
        Tokenizer.open(path)
