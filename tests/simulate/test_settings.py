"""Simulated schedulers get what the arguments and the device say."""

from __future__ import annotations

import msgspec
import pytest

from octavo.config.args import EngineArgs
from octavo.core.step import BlockCopy, BlockOps, ScheduledSequence, SchedulerOutput
from octavo.errors import ConfigError
from octavo.scheduler.build import build_scheduler
from octavo.simulate.cost_model import work_of
from octavo.simulate.presets import preset
from octavo.simulate.settings import engine_settings
from tests.fakes.engine import make_request


def test_blocks_and_costs_come_from_the_device() -> None:
    model = preset("h100/llama-3.1-8b")
    settings = engine_settings(EngineArgs(swap_space=1, max_num_seqs=7), model, max_model_len=999)
    assert settings.limits.num_blocks == model.kv_tokens(0.9) // 16
    assert settings.limits.num_host_blocks == (1 << 30) // (16 * 131_072)
    assert (settings.scheduler.max_num_seqs, settings.scheduler.max_model_len) == (7, 999)
    assert settings.limits.block_bytes == 16 * 131_072
    assert settings.preemption_costs.prefill_tokens_per_s == model.prefill_tokens_per_s > 10_000


def test_arguments_win_over_the_device() -> None:
    args = EngineArgs(num_gpu_blocks_override=12, prefill_tokens_per_s=5.0)
    settings = engine_settings(args, preset("h100/llama-3.1-8b"), max_model_len=99)
    assert (settings.limits.num_blocks, settings.scheduler.prefill_tokens_per_s) == (12, 5.0)


def test_a_windowed_model_takes_requests_that_are_longer_than_its_cache() -> None:
    args = EngineArgs(num_gpu_blocks_override=97, max_num_batched_tokens=1024, max_model_len=8192)
    windowed = msgspec.structs.replace(preset("h100/mistral-7b-v0.1"), sliding_window=512)
    for model, is_refused in ((preset("h100/llama-3.1-8b"), True), (windowed, False)):
        scheduler = build_scheduler(engine_settings(args, model, max_model_len=8192))
        assert (scheduler.refusal(make_request("a", range(8000))) is not None) == is_refused


def test_a_device_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="l4/qwen3-14b leaves no room for a KV block"):
        engine_settings(EngineArgs(), preset("l4/qwen3-14b"), max_model_len=99)


def test_groups_have_room_for_as_many_sequences_and_share_the_memory() -> None:
    plain = preset("h100/llama-3.1-8b")
    model = msgspec.structs.replace(plain, sliding_window=1024, windowed_share=0.75, state_bytes=10_000_000.0)
    args = EngineArgs(num_gpu_blocks_override=4096, max_num_batched_tokens=1024)
    full, windowed, states = engine_settings(args, model, max_model_len=16384).limits.groups
    assert (windowed.window, states.is_state, full.max_live_tokens) == (1024, True, None)
    assert 7.9 < full.num_blocks / windowed.num_blocks < 8.1
    assert states.num_blocks == full.num_blocks // 256
    each = [group.num_blocks * group.block_bytes for group in (full, windowed, states)]
    assert 0.99 < sum(each) / (4096 * 16 * plain.kv_bytes_per_token) <= 1


def test_a_model_with_windows_and_states_runs_and_costs_what_its_layers_read() -> None:
    copies = BlockOps(copies=[BlockCopy(1, 2, 0), BlockCopy(1, 2, 2)])
    rows = [ScheduledSequence(1, 0, 99, 1, 1), ScheduledSequence(2, 0, 0, 20, 1)]
    step = SchedulerOutput(step_id=1, new_sequences=[], rows=rows, finished_ids=[], block_ops=copies)
    model = msgspec.structs.replace(
        preset("h100/llama-3.1-8b"), kv_bytes_per_token=100.0, sliding_window=10, windowed_share=0.75, state_bytes=300.0
    )
    work = work_of(step, 10, model)
    assert work.num_context_tokens == 0.25 * 100 + 0.75 * 10
    assert (work.num_pairs, work.num_copied_blocks) == (0.25 * 210 + 0.75 * 155, 0.25 + 3)
