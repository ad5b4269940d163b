"""Recurrences on CUDA, interpreted: the same bits for any cut of a prompt, and states that are advanced once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from octavo import LLM
from octavo.attention.metadata import AttentionMetadata
from octavo.devices import DEVICES
from octavo.devices.cuda.runtime import CudaRuntime
from octavo.ops.registry import Ops, bind
from tests.devices.cuda.interpreted import NAME, RepeatedCalls
from tests.devices.cuda.sanitizer import sanitized
from tests.devices.cuda.test_engine import PARAMS, generate
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint

OPS = CudaRuntime().bind()
LENGTHS, TABLES, BLOCK = (11, 6), ((1, 2, 3), (4, 5)), 4
RECURRENT = ("qwen3_5", "falcon_h1", "jamba", "lfm2")
Step = tuple[Sequence[Tensor], Tensor, AttentionMetadata]


def convolution(ops: Ops, step: Step) -> Tensor:
    (x, *_), states, rows = step
    weight = torch.linspace(-1.0, 1.0, 5 * 9).view(5, 9)
    return ops.short_convolution(x[:, 0], weight, weight[0], states[:, :36], rows)


def delta_rule(ops: Ops, step: Step) -> Tensor:
    (q, k, v, numbers), states, rows = step
    heads = torch.tensor([0.2, -0.3]), torch.tensor([0.5, 0.1])
    return ops.gated_delta_rule(q, k, v, numbers[:, 0], numbers[:, 1], heads, states, rows)


def delta_rule_with_decays_of_rows(ops: Ops, step: Step) -> Tensor:
    (q, k, v, numbers), states, rows = step
    heads = torch.tensor([0.2, -0.3]), torch.linspace(-1.0, 1.0, 18), torch.tensor([2.0, 1.0])
    steps = torch.cat((q.flatten(1), k.flatten(1)), 1)
    return ops.gated_delta_rule(q, k, v, steps, numbers[:, 1], heads, states, rows)


def mamba2(ops: Ops, step: Step) -> Tensor:
    (q, k, v, numbers), states, rows = step
    heads = torch.tensor([0.2, -0.3]), torch.tensor([0.5, 0.1]), torch.tensor([2.0, 1.0])
    return ops.mamba2_scan(q, k, v, numbers[:, 0], heads, (0.1, 1.5), states, rows)


def mamba(ops: Ops, step: Step) -> Tensor:
    (q, k, v, _), states, rows = step
    numbers = torch.linspace(0.1, 3.0, 9 * 20).view(9, 20), torch.linspace(-1.0, 1.0, 20), torch.linspace(0.0, 2.0, 20)
    inputs = v.flatten(1)
    return ops.selective_scan(q[:, 0], k[:, 0], inputs, inputs.flip(1), numbers, states, rows)


def run(compute: Callable[[Ops, Step], Tensor], cuts: Sequence[tuple[int, int]], ops: Ops = OPS) -> list[Tensor]:
    """Return the results of two sequences whose rows have so many tokens in each step, and the states behind them."""
    generator = torch.Generator().manual_seed(3)
    inputs = [
        [torch.randn(shape, generator=generator) for shape in ((length, 1, 9), (length, 1, 9), (length, 2, 10))]
        for length in LENGTHS
    ]
    for length, each in zip(LENGTHS, inputs, strict=True):
        each.append(torch.randn(length, 2, 2, generator=generator))
    states, done = torch.full((6, 2 * 9 * 10), 7.0), [0, 0]
    found: list[list[Tensor]] = [[], []]
    for counts in cuts:
        ends = [start + count for start, count in zip(done, counts, strict=True)]
        rows = AttentionMetadata.build(counts, ends, TABLES, BLOCK)
        parts = (
            torch.cat([each[start:end] for each, start, end in zip(kind, done, ends, strict=True)])
            for kind in zip(*inputs, strict=True)
        )
        for outs, out in zip(found, compute(ops, (tuple(parts), states, rows)).split(list(counts)), strict=True):
            outs.append(out)
        done = ends
    return [*(torch.cat(each) for each in found), states[1:]]


@pytest.mark.parametrize("compute", [convolution, delta_rule, delta_rule_with_decays_of_rows, mamba, mamba2])
def test_a_cut_of_a_prompt_changes_no_bit(compute: Callable[[Ops, Step], Tensor]) -> None:
    whole = run(compute, [LENGTHS])
    cut = run(compute, [(1, 1), (6, 1), (1, 3), (3, 1)])
    assert all(torch.equal(one, other) for one, other in zip(cut, whole, strict=True))
    for one, other in zip(whole, run(compute, [LENGTHS], bind()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ops", [OPS, bind()], ids=["triton", "reference"])
@pytest.mark.parametrize("compute", [convolution, delta_rule, mamba, mamba2])
def test_rows_that_fill_a_step_up_advance_no_state(compute: Callable[[Ops, Step], Tensor], ops: Ops) -> None:
    inputs = [torch.randn(3, *shape) for shape in ((1, 9), (1, 9), (2, 10), (2, 2))]
    before = torch.randn(6, 2 * 9 * 10)
    alone, filled = before.clone(), before.clone()
    rows = AttentionMetadata.build((1, 1, 1), (6, 5, 6), (*TABLES, (0, 0, 0)), BLOCK)
    single = AttentionMetadata.build((1, 1), (6, 5), TABLES, BLOCK)
    expected = compute(ops, ([each[:2] for each in inputs], alone, single))
    with sanitized() as report:
        found = compute(ops, (inputs, filled, rows))
    assert not report.faults
    assert torch.equal(found[:2], expected)
    assert torch.equal(filled, alone)
    assert not torch.equal(alone[2], before[2])
    assert torch.equal(alone[[0, 1, 3, 4]], before[[0, 1, 3, 4]])


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("qwen3_5", {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}),
        ("falcon_h1", {"num_hidden_layers": 1}),
        pytest.param("jamba", {"num_hidden_layers": 2}, marks=pytest.mark.long),
    ],
)
def test_a_prefix_that_is_continued_behind_a_snapshot_changes_no_bit(
    family: str, layers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DEVICES, "cuda", NAME)
    model = write_byte_tokenizer(make_checkpoint(family, tmp_path / "model", vocab_size=300, **layers))
    shared = [5 + i * 7 % 90 for i in range(16)]
    prompts: Any = [
        {"prompt_token_ids": [*shared, 9]},  # leaves a snapshot behind its first block
        {"prompt_token_ids": [*shared, 3, 4, 8], "cache_salt": "of its own"},
        {"prompt_token_ids": [*shared, 3, 4, 8]},
    ]
    sizes: Any = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 32}
    with LLM(str(model), device="cuda", batch_invariant=True, **sizes) as llm:
        _, cold, warm = (llm.generate(each, PARAMS, use_tqdm=False)[0] for each in prompts)
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 16)
    assert [(each.token_ids, each.logprobs) for each in warm.outputs] == [
        (each.token_ids, each.logprobs) for each in cold.outputs
    ]


@pytest.mark.long
@pytest.mark.parametrize("family", RECURRENT)
def test_decode_steps_are_captured_and_have_their_bits_in_any_schedule(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DEVICES, "cuda", NAME)
    model = write_byte_tokenizer(make_checkpoint(family, tmp_path / "model", vocab_size=300))
    before = RepeatedCalls.num_replays
    found = generate(model, device="cuda", batch_invariant=True, max_tokens=4)
    assert RepeatedCalls.num_replays > before
    expected = generate(model, device="reference", max_tokens=4)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for args in ({"max_num_seqs": 1}, {"max_num_batched_tokens": 5}, {"enforce_eager": True}):
        assert generate(model, device="cuda", batch_invariant=True, max_tokens=4, **args) == found
