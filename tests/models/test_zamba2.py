"""Zamba2's blocks are shared by layers: files that have them several times, and what stages cannot share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from octavo import LLM, SamplingParams
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, ConfigError
from tests.fakes.checkpoints import edit_tensors, make_checkpoint
from tests.fakes.vector_models import write_tokenizer
from tests.models.loading import open_model

PARAMS = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, ignore_eos=True)
PROMPTS: Any = [{"prompt_token_ids": [*range(5, 5 + count)]} for count in (3, 20)]


@pytest.mark.parametrize("args", [{}, {"quantization": "int4"}], ids=str)
def test_a_file_may_have_a_block_for_each_layer_that_shares_it(args: dict[str, Any], tmp_path: Path) -> None:
    path, found = make_checkpoint("zamba2", tmp_path), []
    write_tokenizer(path)
    begin, again = "model.layers.0.shared_transformer.", "model.layers.2.shared_transformer."
    shared = {name: each for name, each in load_file(path / "model.safetensors").items() if name.startswith(begin)}
    assert shared
    for changes in ({}, {name.replace(begin, again): each.clone() for name, each in shared.items()}):
        edit_tensors(path, **changes)
        with LLM(str(path), dtype="float32", num_gpu_blocks_override=64, **args) as llm:
            found.append([output.outputs for output in llm.generate(PROMPTS, PARAMS)])
    assert found[0] == found[1]


def test_stages_are_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_checkpoint("zamba2", tmp_path))
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size: layers of this model share weights"):
        open_model(checkpoint, Mesh.of_rank(0, pipeline=2))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_mem_blocks": 3}, "num_mem_blocks is 3, expected at most the 2 layers"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, expected num_attention_heads, which is 4"),
        ({"mamba_expand": 1e308}, "n_mamba_heads is 4, expected .* a divisor of 2147483647"),
        ({"n_mamba_heads": 5}, "n_mamba_heads is 5, expected a multiple of mamba_ngroups and a divisor of 64"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_checkpoint("zamba2", tmp_path), overrides=changes)
    with pytest.raises(CheckpointError, match=said):
        open_model(checkpoint)
