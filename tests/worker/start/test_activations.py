"""The bound of a step's memory, beside what steps really take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.config.checkpoint import Checkpoint
from octavo.config.schema import SchedulerConfig
from octavo.core.sampling_params import SamplingParams
from octavo.devices.reference.attention import ReferenceBackend
from octavo.distributed.mesh import Axis, Mesh
from octavo.errors import ConfigError
from octavo.models.loader import LoadedModel
from octavo.worker.start.activations import Activations
from octavo.worker.start.memory import ModelSizes
from tests.conformance.runtimes import LEVELS, REFERENCE
from tests.fakes.allocations import peak_bytes
from tests.fakes.checkpoints import make_checkpoint
from tests.worker.dummy_steps import FULLEST, dummy_step, run_dummy
from tests.worker.engine_config import make_config, start_worker
from tests.worker.prefix_model import new_sequence, row, step

GATED = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**GATED, "head_dim": 32},
    "qwen3": {**GATED, "head_dim": 64},
    "gpt2": {"n_embd": 256, "n_head": 8},
    "opt": {"hidden_size": 256, "ffn_dim": 1024, "num_attention_heads": 8, "word_embed_proj_dim": 256},
}
NUM_ROWS, NUM_TOKENS, LENGTH = 32, 512, 250


@pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")
@pytest.mark.parametrize(
    ("family", "is_recorded"),
    [
        # steps of many sizes are recorded for an MLP with a gate and for one without; of the others in the long tests
        pytest.param(
            family,
            is_recorded,
            id=f"{family}-{'recorded' if is_recorded else 'eager'}",
            marks=[pytest.mark.long] * (is_recorded and family not in ("llama", "opt")),
        )
        for family in FAMILIES
        for is_recorded in (False, True)
    ],
)
def test_the_bound_is_the_peak_or_up_to_half_more(family: str, is_recorded: bool, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path / "model", vocab_size=3000, **FAMILIES[family])
    sizes = {"max_num_seqs": NUM_ROWS, "max_num_batched_tokens": NUM_TOKENS}
    worker = start_worker(make_config(path, dtype="bfloat16", enforce_eager=not is_recorded, **sizes))
    run_dummy(worker, 1, 2)  # what is made once
    fullest = dummy_step(worker, NUM_ROWS, NUM_TOKENS, FULLEST)
    params = SamplingParams(temperature=0.0, prompt_logprobs=20)
    prompts = step(
        [new_sequence(i, [7] * LENGTH, range(1, 17), params=params) for i in (1, 2)],
        [row(i, 0, LENGTH, num_prompt_logprobs=LENGTH - 1) for i in (1, 2)],
    )

    def run() -> None:
        for _ in range(2):  # the second time nothing has to make room
            worker.submit(fullest).result()
            worker.submit(prompts).result()
        for num_rows in range(1, NUM_ROWS + 1) if is_recorded else ():
            for _ in range(3):  # seen, recorded, run again
                run_dummy(worker, num_rows, num_rows)

    peak = peak_bytes(run)
    assert peak <= worker.plan.activation_bytes <= 1.5 * peak


@pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")
def test_steps_of_many_sizes_hold_no_more_than_the_largest(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path / "model", vocab_size=3000, **FAMILIES["llama"])
    worker = start_worker(make_config(path, max_num_seqs=NUM_ROWS, max_num_batched_tokens=NUM_TOKENS))
    run_dummy(worker, 1, 2)

    def run() -> None:
        for num_tokens in [*range(40, NUM_TOKENS, 37), *range(NUM_TOKENS, 40, -53)]:
            run_dummy(worker, NUM_ROWS, num_tokens)

    assert peak_bytes(run) <= worker.plan.activation_bytes


def sizes_of(path: Path, mesh: Mesh) -> ModelSizes:
    opened = LoadedModel.open(Checkpoint.open(path), mesh, torch.bfloat16)
    scheduler = SchedulerConfig(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64)
    return ModelSizes.of(opened, REFERENCE, ReferenceBackend(torch.bfloat16), scheduler, 16)


def test_each_rank_counts_its_own_heads_and_layers(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path / "model", vocab_size=3000, **FAMILIES["llama"])
    whole = sizes_of(path, Mesh.single())
    half = sizes_of(path, Mesh(Axis(1, 2)))
    assert (half.shape.num_heads, half.shape.num_kv_heads) == (4, 2)
    assert half.shape.num_layers == whole.shape.num_layers
    assert [2 * each for each in half.layer_block_bytes] == list(whole.layer_block_bytes)
    assert 0.5 <= half.weights_bytes / whole.weights_bytes < 0.51  # the norms are whole on every rank
    assert half.activation_bytes(256) < whole.activation_bytes(256)
    stage = sizes_of(path, Mesh(pipeline=Axis(1, 2)))
    assert stage.shape.num_layers * 2 == whole.shape.num_layers
    assert sum(len(group.layers) for group in stage.shape.cache_groups) == stage.shape.num_layers
    assert stage.weights_bytes < whole.weights_bytes


def test_heads_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path / "model", vocab_size=3000, **FAMILIES["llama"])
    with pytest.raises(ConfigError, match="tensor_parallel_size is 3, must divide the 8 attention heads"):
        sizes_of(path, Mesh(Axis(1, 3)))


def test_a_dry_run_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    opened = LoadedModel.open(Checkpoint.open(make_checkpoint("llama", tmp_path / "model")), Mesh.single())
    before = {name: parameter.shape for name, parameter in opened.model.named_parameters()}
    scheduler = SchedulerConfig(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64)
    Activations(opened, REFERENCE, ReferenceBackend(), scheduler)
    assert {name: parameter.shape for name, parameter in opened.model.named_parameters()} == before
    loaded = opened.load(REFERENCE.ops, ReferenceBackend())
    assert all(not tensor.is_meta for tensor in loaded.state().values())
