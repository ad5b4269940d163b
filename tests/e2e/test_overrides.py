"""A model whose config.json is overridden is the one whose config.json has these values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint

ROPE = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}
PARAMS = SamplingParams(seed=1, max_tokens=8, logprobs=1, ignore_eos=True)


def generated(path: Path, **arguments: Any) -> list[Any]:
    with LLM(str(path), max_model_len=600, max_num_seqs=2, num_gpu_blocks_override=64, **arguments) as llm:
        outputs = llm.generate([[1 + i % 100 for i in range(300)], "a"], PARAMS)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_byte_tokenizer(make_checkpoint("llama", tmp_path / "own"))
    return tmp_path / "own"


def test_results_are_those_of_the_written_config(path: Path, tmp_path: Path) -> None:
    written = tmp_path / "written"
    write_byte_tokenizer(make_checkpoint("llama", written))
    config = json.loads((written / "config.json").read_text())
    config["rope_parameters"] = {**config["rope_parameters"], **ROPE["rope_scaling"]}
    (written / "config.json").write_text(json.dumps(config))
    expected = generated(written)
    assert generated(path, hf_overrides=ROPE) == expected
    assert generated(path, hf_overrides=ROPE, tensor_parallel_size=2) == expected
    with pytest.raises(ValueError, match="max_model_len is 600, must be at most 256"):
        generated(path)
