"""Simulated schedulers get what the arguments and the device say."""

from __future__ import annotations

import msgspec
import pytest

from octavo.config.args import EngineArgs
from octavo.errors import ConfigError
from octavo.scheduler.build import build_scheduler
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
