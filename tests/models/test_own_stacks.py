"""Layers that run several times, and streams that join later ones, compute what straight stacks made of them do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from octavo import LLM, SamplingParams
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, ConfigError, UnsupportedModel
from octavo.models.loader import LoadedModel
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import edit_config, edit_tensors, load_oracle, make_checkpoint
from tests.models.paged_run import load, logits_of
from tests.models.test_own_code import TOKENS, assert_ranks_agree, logits, released


def unrolled(path: Path, loops: int) -> None:
    """Write the layers of a checkpoint several times, one behind the other."""
    tensors = load_file(path / "model.safetensors")
    again = {
        name.replace(f"layers.{layer}.", f"layers.{layer + 2 * loop}."): tensor.clone()
        for name, tensor in tensors.items()
        for layer in (0, 1)
        for loop in range(1, loops)
        if f"layers.{layer}." in name
    }
    edit_tensors(path, **again)
    edit_config(path, num_hidden_layers=2 * loops)


def test_nanbeige_without_norms_between_is_a_llama_of_repeated_layers(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path / "looped")
    other = make_checkpoint("llama", tmp_path / "unrolled")
    unrolled(other, 3)
    released(path, "NanbeigeForCausalLM", "nanbeige", num_loops=3, skip_loop_final_norm=True)
    model = load(path)
    assert torch.equal(logits_of(model, TOKENS, 6), logits_of(load(other), TOKENS, 6))
    once = load(make_checkpoint("llama", tmp_path / "once"))
    assert {name: each.shape for name, each in model.state().items()} == {
        name: each.shape for name, each in once.state().items()
    }
    released(path, "NanbeigeForCausalLM", "nanbeige", loop_share_kv=True)
    with pytest.raises(UnsupportedModel, match="loop_share_kv"):
        load(path)


def test_each_loop_of_nanbeige_begins_with_what_the_last_norm_makes(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    oracle = load_oracle(path)
    with torch.no_grad():
        first = oracle.model(torch.tensor([TOKENS])).last_hidden_state
        expected = oracle(inputs_embeds=first).logits[0]
    released(path, "NanbeigeForCausalLM", "nanbeige", num_loops=2)
    assert torch.allclose(logits(path), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="pipeline_parallel_size"):
        LoadedModel.open(Checkpoint.open(path), Mesh.of_rank(0, pipeline=2), torch.float32)
    assert_ranks_agree(path)
    edit_config(path, num_loops=2000)
    with pytest.raises(CheckpointError, match="num_loops is 2000, expected at most 512"):
        load(path)


@pytest.mark.long
def test_an_engine_runs_loops_in_recorded_steps(tmp_path: Path) -> None:
    """Each loop has a cache of its own, which prefix hits and preempted requests read as others do."""
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 128}
    path, other = (make_checkpoint("llama", tmp_path / name, **sizes) for name in ("looped", "unrolled"))
    unrolled(other, 3)
    released(path, "NanbeigeForCausalLM", "nanbeige", num_loops=3, skip_loop_final_norm=True)
    prompts = [[7 * place % 300 for place in range(length)] for length in (20, 40, 33, 40)]
    params = SamplingParams(temperature=0.0, logprobs=2, max_tokens=24, ignore_eos=True)
    found = []
    for each in (path, other):
        write_byte_tokenizer(each)
        with LLM(str(each), dtype="bfloat16", max_model_len=96, num_gpu_blocks_override=12, threads=1) as llm:
            found.append([answer.outputs for answer in llm.generate(prompts, params, use_tqdm=False)])
    assert found[0] == found[1]


def test_streams_of_solar_join_later_ones(tmp_path: Path) -> None:
    """A stream that joins itself is itself; one that joins behind a layer takes a part of what the layer adds."""
    path = make_checkpoint("llama", tmp_path)
    expected, oracle = logits(path), load_oracle(path)
    lists = {"bskcn_1": [0], "bskcn_2": [1], "bskcn_3": [1], "bskcn_4": [1], "bskcn_tv": [0.9, 0.25]}
    released(path, "SolarForCausalLM", "solar", **{**lists, "bskcn_1": [1]})
    assert torch.equal(logits(path), expected)

    def join(layer: Any, inputs: Any) -> Any:
        return (0.25 * oracle.model.embed_tokens(torch.tensor([TOKENS])) + 0.75 * inputs[0], *inputs[1:])

    oracle.model.layers[1].register_forward_pre_hook(join)
    edit_config(path, bskcn_1=[0], bskcn_4=[])
    with torch.no_grad():
        joined = oracle(input_ids=torch.tensor([TOKENS])).logits[0]
    assert torch.allclose(logits(path), joined, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(joined, expected, rtol=1e-2)
    edit_config(path, bskcn_2=[3])
    with pytest.raises(CheckpointError, match="bskcn_2 is \\[3\\], expected a list of layers, from 0 to 1"):
        load(path)
