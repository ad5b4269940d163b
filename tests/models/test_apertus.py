"""Apertus 1.5: tokens that the head does not have are read and not drawn, whatever shares the vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.errors import CheckpointError
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import edit_config, load_oracle, make_checkpoint
from tests.models.loading import read_config
from tests.models.paged_run import load, logits_of

TOKENS = [3 + 7 * each % 120 for each in range(20)]
DRAWN = 100


def test_logits_of_a_smaller_head_are_those_of_transformers(tmp_path: Path) -> None:
    path = make_checkpoint("apertus1p5", tmp_path, output_vocab_size=DRAWN)
    with torch.inference_mode():
        expected = load_oracle(path)(torch.tensor([TOKENS])).logits[0]
    found = logits_of(load(path), TOKENS)
    assert max(TOKENS) > DRAWN == expected.shape[1]
    torch.testing.assert_close(found[:, :DRAWN], expected, atol=1e-4, rtol=1e-4)
    assert (found[:, DRAWN:] == torch.finfo(torch.float32).min).all()


def test_the_model_around_the_text_model_means_the_same(tmp_path: Path) -> None:
    path = make_checkpoint("apertus1p5", tmp_path, output_vocab_size=DRAWN)
    expected = logits_of(load(path), TOKENS)
    text, stored = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    names = {name: name.replace("model.", "model.language_model.") for name in stored}
    made = {names[name]: tensor for name, tensor in stored.items()}
    made["model.vision_tokenizer.encoder.conv_in.weight"] = torch.zeros(2, 2)
    save_file(made, path / "model.safetensors", {"format": "pt"})
    around = {"architectures": ["Apertus1p5ForConditionalGeneration"], "model_type": "apertus1p5"}
    (path / "config.json").write_text(json.dumps({**around, "dtype": "float32", "text_config": text}))
    assert torch.equal(logits_of(load(path), TOKENS), expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_token_without_a_logit_is_drawn(ranks: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 300, "output_vocab_size": 60}
    path = write_byte_tokenizer(make_checkpoint("apertus1p5", tmp_path, **sizes))
    params = SamplingParams(temperature=3.0, seed=1, max_tokens=60, ignore_eos=True)
    with LLM(str(path), dtype="bfloat16", max_model_len=96, tensor_parallel_size=ranks) as llm:
        tokens = llm.generate([TOKENS], params)[0].outputs[0].token_ids
    assert max(tokens) < 60


@pytest.mark.parametrize(("name", "value"), [("output_vocab_size", 131), ("tie_word_embeddings", True)])
def test_a_head_that_cannot_be_is_refused_by_name(name: str, value: object, tmp_path: Path) -> None:
    path = make_checkpoint("apertus1p5", tmp_path, output_vocab_size=DRAWN)
    edit_config(path, **{name: value})
    with pytest.raises(CheckpointError, match=name):
        read_config(path)
