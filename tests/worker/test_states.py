"""Layers that keep a state: the same bits however a prompt is cut, in whatever blocks, from whatever memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from octavo.config.checkpoint import Checkpoint
from octavo.core.model_shape import State
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import BlockCopy, BlockOps, NewSequence, TokenLogprobs
from octavo.devices.cpu.runtime import CpuRuntime
from octavo.distributed.mesh import Axis, Mesh
from octavo.models.loader import LoadedModel
from octavo.worker.worker import Worker
from tests.conformance.runtimes import LEVELS
from tests.distributed.threads import run_ranks
from tests.fakes.running_sum import make_running_sum
from tests.models.paged_run import load
from tests.models.test_tensor_parallel import Rank, generated
from tests.worker.engine_config import make_config, start_worker
from tests.worker.prefix_model import row, step

PROMPT = [(37 * i) % 120 + 3 for i in range(40)]
PARAMS = SamplingParams(temperature=0.8, seed=3, logprobs=2)
TOKENS = [1, 2, 3, 4]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_running_sum(tmp_path / "model", monkeypatch, head_dim=8)


def opened(path: Path, **options: Any) -> Worker:
    """A worker with 16 blocks of 16 tokens, whose memory, the null block included, is full of NaN."""
    config = make_config(path, block_size=16, num_gpu_blocks_override=16, swap_space=0.001, **options)
    worker = start_worker(config)
    for cache in worker._runner.cache.caches:
        cache.fill_(torch.nan)
    return worker


def new(seq_id: int, states: list[int], tokens: list[int] = TOKENS) -> NewSequence:
    return NewSequence(
        seq_id=seq_id,
        index=0,
        epoch=0,
        token_ids=PROMPT,
        block_tables=[tokens, states],
        params=PARAMS,
        num_prompt_tokens=len(PROMPT),
    )


def decoded(worker: Worker, seq_id: int, count: int, start: int = 40) -> list[TokenLogprobs]:
    outputs = [worker.submit(step(rows=[row(seq_id, start + i, 1)])).result() for i in range(count)]
    return [output.rows[0].tokens[0] for output in outputs]


def alone(path: Path) -> list[TokenLogprobs]:
    """The first tokens of the prompt, computed at once."""
    worker = opened(path)
    first = worker.submit(step([new(1, [5, 6, 7, 8])], [row(1, 0, 40)])).result().rows[0].tokens[0]
    return [first, *decoded(worker, 1, 11)]


@pytest.mark.parametrize("cuts", [(7, 16, 17), (16, 32), (15, 31), (39,)], ids=str)
def test_a_cut_prompt_beside_others_gives_the_same_bits(path: Path, cuts: tuple[int, ...]) -> None:
    expected, worker = alone(path), opened(path)
    # the blocks that the last row of a cut ends in have a state, others do not unless somebody wants it
    ends = {(end - 1) // 16 for end in (*cuts, 40)}
    states = [block if entry in ends else 0 for entry, block in enumerate([9, 6, 7])] + [8]
    news = [new(1, states), new(2, [1, 0, 2, 3], [9, 10, 11, 12])]
    worker.submit(step(news, [row(1, 0, cuts[0], 0), row(2, 0, 3, 0)])).result()
    for start, end in zip(cuts, (*cuts[1:], 40), strict=True):
        rows = [row(1, start, end - start, int(end == 40))]
        output = worker.submit(step(rows=[row(2, 3, 9, 0), *rows] if start == cuts[0] else rows)).result()
    assert [output.rows[-1].tokens[0], *decoded(worker, 1, 11)] == expected
    state = worker._runner.cache.caches[1]
    # unwanted states are nowhere, the null block included
    assert {int(block) for block in (~state[0].isnan()).all(1).nonzero()} == {*states, 1} - {0}


def test_a_state_is_swapped_and_forked_like_other_blocks(path: Path) -> None:
    expected, worker = alone(path), opened(path)
    worker.submit(step([new(1, [0, 0, 7, 8])], [row(1, 0, 40)])).result()
    out = [BlockCopy(block, block, 0) for block in TOKENS] + [BlockCopy(7, 1, 1)]
    worker.submit(step(block_ops=BlockOps(swap_outs=out))).result()
    for cache in worker._runner.cache.caches:
        cache.fill_(torch.nan)
    back = [BlockCopy(block, block + 4, 0) for block in TOKENS] + [BlockCopy(1, 2, 1)]
    # a second sequence goes on in copies of the last blocks
    copies = [BlockCopy(7, 9, 0), BlockCopy(2, 3, 1)]
    worker.submit(step(block_ops=BlockOps(swap_ins=back, copies=copies))).result()
    known = [*PROMPT, expected[0].token_id]
    for seq_id, states, tokens in ((2, [0, 0, 2, 4], [5, 6, 7, 8]), (3, [0, 0, 3, 5], [5, 6, 9, 10])):
        again = msgspec.structs.replace(new(seq_id, states, tokens), token_ids=known)
        worker.submit(step([again])).result()
        assert decoded(worker, seq_id, 11) == expected[1:]


def test_states_are_float32_in_every_cache_type_and_steps_are_not_recorded(path: Path) -> None:
    for options in ({"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}):
        worker = start_worker(make_config(path, block_size=16, num_gpu_blocks_override=16, **options))
        kinds = [cache.dtype for cache in worker._runner.cache.caches]
        assert kinds[1] is kinds[3] is torch.float32
        assert kinds[0] is kinds[2] is not torch.float32
        assert worker._runner.cache.caches[1].shape[::2] == (1, 16)
    worker.submit(step([new(1, [5, 6, 7, 8])], [row(1, 0, 40)])).result()
    decoded(worker, 1, 3)
    assert not getattr(worker._runner.model, "_is_recordable", False)
    text = worker.plan.render()
    assert "a state of 16 float32 per block, layers 1-2" in text
    assert "keys and values of 2 x 8 per token, layers 0, 2" in text


@pytest.mark.skipif(not LEVELS, reason="needs the compiled kernels")
def test_ranks_that_share_layers_have_shares_of_the_state_and_compute_the_same_bits(path: Path) -> None:
    def work(mesh: Mesh) -> Any:
        return generated(Rank(path, mesh, CpuRuntime.open(1, LEVELS[-1]).bind(), torch.float32, None))

    tokens, logits = work(Mesh.single())
    for found_tokens, found in run_ranks(2, work):
        assert found_tokens == tokens
        assert torch.equal(found, logits)
    checkpoint = Checkpoint.open(path)
    shape = LoadedModel.open(checkpoint, Mesh(Axis(1, 2))).shape
    assert [group.keeps for group in shape.cache_groups][1] == State(8)


def test_a_stage_has_the_caches_of_its_layers(path: Path) -> None:
    checkpoint = Checkpoint.open(path)
    stages = [LoadedModel.open(checkpoint, Mesh(pipeline=Axis(rank, 2))) for rank in range(2)]
    assert sum((len(g.layers) for stage in stages for g in stage.shape.cache_groups), 0) == 4
    whole = load(path)
    layers = list(whole.layers.values())
    places = [(each.self_attn.attend.cache_index, each.self_attn.attend.cache_group) for each in (layers[0], layers[2])]
    sums = [(each.self_attn.sum.cache_index, each.self_attn.sum.cache_group) for each in layers[1:]]
    assert (places, sums) == ([(0, 0), (2, 0)], [(1, 1), (3, 1)])


@pytest.mark.skipif(not LEVELS, reason="needs the compiled kernels")
def test_steps_with_compiled_states_are_recorded_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"head_dim": 8, "num_key_value_heads": 4, "is_compiled": True}
    path = make_running_sum(tmp_path, monkeypatch, **sizes)
    found = []
    for is_eager in (True, False):
        worker = opened(path, enforce_eager=is_eager)
        drawn = worker.submit(step([new(1, [5, 6, 7, 8])], [row(1, 0, 40)])).result().rows[0].tokens
        worker.submit(step([new(2, [9, 0, 10, 11], [9, 10, 11, 12])], [row(2, 0, 39, 0)])).result()
        drawn += decoded(worker, 1, 11)
        drawn += worker.submit(step(rows=[row(2, 39, 1)])).result().rows[0].tokens
        drawn += decoded(worker, 2, 11)
        assert any(getattr(worker._runner.model, "_recordings", {}).values()) != is_eager
        found.append(drawn)
    assert (found[0], found[0][:12]) == (found[1], found[0][12:])
