from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from octavo.core.sampling_params import SamplingParams
from octavo.worker.worker import Worker
from tests.conformance.runtimes import LEVELS
from tests.fakes.allocations import peak_bytes
from tests.fakes.checkpoints import load_oracle, make_checkpoint
from tests.worker.dummy_steps import FULLEST, dummy_step, run_dummy
from tests.worker.engine_config import make_config, start_worker
from tests.worker.prefix_model import new_sequence, row, step, tokens_of


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("worker") / "model")


def test_greedy_steps_agree_with_transformers(checkpoint: Path) -> None:
    worker = start_worker(make_config(checkpoint))
    prompt = [5, 17, 99, 3, 64]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    drawn = tokens_of(worker.submit(step([new_sequence(1, prompt, [1, 2], params=params)], [row(1, 0, 5)])).result())
    drawn += [
        token
        for position in range(5, 16)
        for token in tokens_of(worker.submit(step(rows=[row(1, position, 1)])).result())
    ]
    oracle = load_oracle(checkpoint)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(12):
            tokens.append(int(oracle(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert [each[0] for each in drawn] == tokens[5:]


def test_trust_remote_code_has_no_effect_but_a_line_at_the_start(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "octavo"):
        start_worker(make_config(checkpoint))
        assert "trust_remote_code" not in caplog.text
        start_worker(make_config(checkpoint, trust_remote_code=True))
    (said,) = (each.getMessage() for each in caplog.records if "trust_remote_code" in each.getMessage())
    assert said.endswith("octavo runs no code from checkpoints, and has Qwen3ForCausalLM built in")


LONG_ROPE = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0] * 4, "long_factor": [1.5, 2, 4, 9]}


def test_the_configured_max_model_len_chooses_the_factors_of_longrope(tmp_path: Path) -> None:
    path = make_checkpoint("phi3", tmp_path, rope_parameters=LONG_ROPE, original_max_position_embeddings=20)
    # a step may have more positions than a sequence
    short, long = (start_worker(make_config(path, max_model_len=length)) for length in (20, 21))
    for worker in (short, long):
        worker.submit(step([new_sequence(1, [5, 17, 99], [1])], [row(1, 0, 3)])).result()
    assert not torch.equal(short._runner.cache.caches[0], long._runner.cache.caches[0])
    assert "with its short factors: max_model_len is at most 20" in short.plan.summarize()
    assert "with its long factors: max_model_len is above 20" in long.plan.render()
    assert short.identity()["positions"] != long.identity()["positions"]
    assert "positions" not in start_worker(make_config(make_checkpoint("phi3", tmp_path / "plain"))).identity()


WIDE = {"hidden_size": 64, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32, "vocab_size": 3000}
LARGE_VOCABULARY = {"vocab_size": 60_000}


@pytest.mark.parametrize(
    ("family", "model", "options", "params"),
    [
        ("qwen3", {}, {}, FULLEST),
        ("qwen3", WIDE, {"max_num_seqs": 64, "max_num_batched_tokens": 512, "dtype": "bfloat16"}, FULLEST),
        ("qwen3", LARGE_VOCABULARY, {"max_num_seqs": 32, "max_num_batched_tokens": 64}, FULLEST),
        ("qwen3", LARGE_VOCABULARY, {"max_num_seqs": 32, "max_num_batched_tokens": 64}, SamplingParams(seed=0)),
        ("gpt2", {}, {"max_num_seqs": 1, "max_num_batched_tokens": 256}, SamplingParams(temperature=0.0)),
        ("mistral", {"head_dim": 64}, {"max_num_seqs": 20, "max_num_batched_tokens": 200}, FULLEST),
        ("llama", {"intermediate_size": 2000}, {"max_num_seqs": 3, "max_num_batched_tokens": 256}, FULLEST),
    ],
)
def test_the_fullest_step_stays_within_the_plan(
    family: str, model: dict[str, Any], options: dict[str, Any], params: SamplingParams, tmp_path: Path
) -> None:
    worker = start_worker(make_config(make_checkpoint(family, tmp_path / "model", **model), **options))
    run_dummy(worker, 1, 2)  # whatever is made once
    fullest = dummy_step(worker, options.get("max_num_seqs", 8), options.get("max_num_batched_tokens", 64), params)
    peak = peak_bytes(lambda: worker.submit(fullest).result())
    assert peak <= worker.plan.activation_bytes


@pytest.mark.parametrize("queries", [1, 4])
def test_long_contexts_stay_within_the_plan(queries: int, tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path / "model", max_position_embeddings=2048)
    worker = start_worker(make_config(path, max_num_seqs=16))
    run_dummy(worker, 1, 2)
    table = range(1, 129)
    full = step(
        [new_sequence(i, [7] * 2048, table) for i in range(16)], [row(i, 2048 - queries, queries) for i in range(16)]
    )
    assert peak_bytes(lambda: worker.submit(full).result()) <= worker.plan.activation_bytes


def test_dummy_steps_fill_what_they_are_told_to(checkpoint: Path) -> None:
    worker = start_worker(make_config(checkpoint))
    made = dummy_step(worker, 5, 64)
    assert [each.num_tokens for each in made.rows] == [16, 12, 12, 12, 12]
    assert made.num_tokens == 64
    assert len({block for new in made.new_sequences for block in new.block_tables[0]}) == 5
    output = worker.submit(made).result()
    assert [each.error for each in output.rows] == [None] * 5


def test_prompt_logprobs_of_a_full_step_stay_within_the_plan(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path / "model", vocab_size=20_000)
    worker = start_worker(make_config(path, max_num_batched_tokens=256))
    params = SamplingParams(temperature=0.0, prompt_logprobs=20)
    run_dummy(worker, 1, 2)
    full = step([new_sequence(1, [7] * 256, range(1, 17), params=params)], [row(1, 0, 256, num_prompt_logprobs=255)])
    assert peak_bytes(lambda: worker.submit(full).result()) <= worker.plan.activation_bytes


def test_many_samples_of_one_prompt_stay_within_the_plan(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path / "model", vocab_size=50_000)
    worker = start_worker(make_config(path, max_num_seqs=64))
    params = SamplingParams(seed=0, n=64, top_p=0.99)
    run_dummy(worker, 1, 2)
    full = step([new_sequence(1, [7] * 4, [1], params=params)], [row(1, 0, 4, 64)])
    assert peak_bytes(lambda: worker.submit(full).result()) <= worker.plan.activation_bytes


@pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")
def test_short_steps_run_on_one_thread_unless_more_are_given(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.devices.cpu.device._ALONE_BYTES", 5 * load_oracle(checkpoint).num_parameters() * 4)
    worker = start_worker(make_config(checkpoint, dtype="float32"))
    alone = []
    for num_tokens in (4, 8, 4):
        run_dummy(worker, 1, num_tokens)
        alone.append(worker._device.kernel_clock.is_alone)  # type: ignore[union-attr]
    assert alone == [True, False, True]
    asked = start_worker(make_config(checkpoint, dtype="float32", threads=1))
    run_dummy(asked, 1, 4)
    assert not asked._device.kernel_clock.is_alone  # type: ignore[union-attr]


def test_swap_space_takes_no_memory_until_it_is_used(checkpoint: Path) -> None:
    plan = start_worker(make_config(checkpoint, swap_space=1)).plan
    assert plan.cache.num_host_blocks > 0


def test_every_operator_has_an_implementation_and_a_reason(checkpoint: Path) -> None:
    choices = start_worker(make_config(checkpoint)).op_choices()
    assert {"rms_norm", "prepare_linear"} <= {operator for operator, _, _ in choices}
    assert all(implementation and because for _, implementation, because in choices)


def test_a_plan_says_what_a_rank_has(checkpoint: Path) -> None:
    config = make_config(checkpoint)
    device = replace(config.device, tensor_parallel_size=4, pipeline_parallel_size=2)
    whole, *ranks = (
        Worker(each, rank=rank).prepare()
        for each, rank in [(config, 0), *((msgspec.structs.replace(config, device=device), rank) for rank in range(8))]
    )
    assert whole.share is None
    shares = [plan.share for plan in ranks]
    assert [share.layers for share in shares if share] == [(0, 1)] * 4 + [(1, 2)] * 4
    assert [share.vocabulary for share in shares[:4] if share] == [(0, 33), (33, 66), (66, 99), (99, 130)]
    assert shares[5] is not None
    assert (shares[5].num_heads, shares[5].num_kv_heads) == (1, 1)
    assert "rank 5 of 8" in ranks[5].render()
    assert "layers 1-1 of 2, 1 heads with 1 of keys and values, tokens 33-65" in ranks[5].render()
    assert all(plan.weights_bytes < whole.weights_bytes for plan in ranks)
