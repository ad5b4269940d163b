from __future__ import annotations

from typing import Any

import msgspec
import pytest

from octavo.config.explain import MemoryPlan
from octavo.config.schema import CacheConfig, SchedulerConfig
from octavo.core.model_shape import ModelShape
from octavo.devices.device import KV_BYTES_ON_HOST, DeviceMemory
from octavo.errors import ConfigError
from octavo.worker.start.memory import ModelSizes, divide_memory
from tests.fakes.shapes import group_windows

GIB = 1 << 30
QWEN3_06B = ModelShape(
    cache_groups=group_windows([None] * 28),
    num_layers=28,
    hidden_size=1024,
    intermediate_size=3072,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151_936,
    max_position_embeddings=40_960,
)
ACTIVATION_BYTES = 400 << 20
BLOCK_BYTES = 2 * 28 * 8 * 128 * 16 * 2


def make_plan(
    available: int = 64 * GIB,
    *,
    max_model_len: int = 4096,
    user_set_max_model_len: bool = False,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    weights_bytes: int = 1_192_000_000,
    windows: list[int | None] | None = None,
    kept_bytes: int = 0,
    encodings_bytes: int = 0,
    **cache: Any,
) -> MemoryPlan:
    return divide_memory(
        ModelSizes(
            msgspec.structs.replace(
                QWEN3_06B, cache_groups=group_windows(windows or [None] * 28), max_position_embeddings=2**31 - 1
            ),
            weights_bytes,
            position_bytes=512,
            layer_block_bytes=(BLOCK_BYTES // 28,) * len(set(windows or [None])),
            activation_bytes=lambda max_model_len: ACTIVATION_BYTES,
            encodings_bytes=encodings_bytes,
        ),
        DeviceMemory(total=64 * GIB, available=available, source="cgroup"),
        device="cpu",
        cache=CacheConfig(dtype="bfloat16", **cache),
        scheduler=SchedulerConfig(
            max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        ),
        user_set_max_model_len=user_set_max_model_len,
        kept_bytes=kept_bytes,
    )


def test_memory_that_keeps_blocks_outside_the_cache_is_not_planned_twice() -> None:
    plan, less = make_plan(), make_plan(kept_bytes=3 * GIB)
    assert plan.limit - less.limit == 3 * GIB
    assert "less 3.00 GiB of kv_host_size" in less.limit_because


def test_kept_encodings_are_planned_and_shown() -> None:
    plan, less = (make_plan(gpu_memory_utilization=0.06, encodings_bytes=size) for size in (0, GIB))
    assert GIB - BLOCK_BYTES <= plan.kv_bytes - less.kv_bytes <= GIB + BLOCK_BYTES
    assert less.planned_bytes <= less.limit
    assert "encodings" not in plan.render()
    (line,) = [each for each in less.render().splitlines() if "encodings" in each]
    assert "1.00 GiB" in line
    assert "kept for later prompts" in line


def test_a_cpu_gets_at_most_four_gib_of_cache() -> None:
    plan = make_plan()
    assert plan.cache.block_bytes == BLOCK_BYTES
    assert plan.kv_bytes == (plan.cache.num_blocks + 1) * BLOCK_BYTES
    assert KV_BYTES_ON_HOST - BLOCK_BYTES < plan.kv_bytes <= KV_BYTES_ON_HOST
    assert "4.00 GiB" in plan.num_blocks_because


def test_little_memory_is_shared_out_and_never_exceeded() -> None:
    plan = make_plan(4 * GIB)
    assert plan.num_blocks_because == "memory left"
    assert plan.limit == int(4 * GIB * 0.9)
    assert plan.limit - BLOCK_BYTES < plan.planned_bytes <= plan.limit
    assert "cgroup" in plan.limit_because
    assert (plan.cache.num_host_blocks, plan.host_bytes) == (0, 0)


@pytest.mark.parametrize("available", [int(2.5 * GIB), 6 * GIB, 20 * GIB])
def test_swap_space_fits_beside_everything_else(available: int) -> None:
    plan = make_plan(available)
    assert plan.planned_bytes + plan.host_bytes <= plan.limit
    assert plan.host_bytes <= 4 * GIB


def test_no_more_blocks_than_all_sequences_can_fill() -> None:
    plan = make_plan(max_model_len=100, max_num_seqs=3)
    assert plan.cache.num_blocks == 3 * 7
    assert "max_num_seqs" in plan.num_blocks_because


def test_override_is_the_exact_number_of_usable_blocks() -> None:
    plan = make_plan(num_gpu_blocks_override=123)
    assert (plan.cache.num_blocks, plan.num_blocks_because) == (123, "num_gpu_blocks_override")
    assert plan.kv_bytes == 124 * BLOCK_BYTES


def test_override_beyond_the_memory_names_both_numbers() -> None:
    room = make_plan(4 * GIB).cache.num_blocks
    with pytest.raises(ConfigError, match=rf"num_gpu_blocks_override 90,000 .* {room:,} blocks"):
        make_plan(4 * GIB, num_gpu_blocks_override=90_000)


def test_kv_cache_memory_decides_the_number_of_blocks() -> None:
    plan = make_plan(kv_cache_memory=8 * GIB)
    assert plan.num_blocks_because == "kv_cache_memory"
    assert 8 * GIB - BLOCK_BYTES < plan.kv_bytes <= 8 * GIB


@pytest.mark.parametrize(("size", "words"), [(BLOCK_BYTES, "give at least"), (100 * GIB, "is more than")])
def test_kv_cache_memory_out_of_reach_is_refused(size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_memory .* {words}"):
        make_plan(kv_cache_memory=size)


def test_weights_beyond_the_memory_are_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"weights take 1\.11 GiB, more than .*quantise the weights"):
        make_plan(GIB)


def test_a_context_that_was_asked_for_and_does_not_fit_is_refused() -> None:
    options: dict[str, Any] = {"available": 3 * GIB, "max_model_len": 40_000}
    with pytest.raises(ConfigError, match=r"max_model_len 40,000 .*lower max_model_len to [\d,]+") as raised:
        make_plan(**options, user_set_max_model_len=True)
    fitting = int(str(raised.value).rpartition("max_model_len to ")[2].partition(", or")[0].replace(",", ""))
    assert make_plan(3 * GIB, max_model_len=fitting, user_set_max_model_len=True).max_model_len == fitting


def test_a_context_that_nobody_asked_for_takes_no_memory_beyond_the_cache() -> None:
    absurd = make_plan(max_model_len=2**31 - 1)
    assert absurd.max_model_len <= KV_BYTES_ON_HOST // BLOCK_BYTES * 16
    assert absurd.weights_bytes < 2_000_000_000


def test_a_sliding_window_lets_a_long_context_into_a_small_cache() -> None:
    small = {"max_model_len": 40_960, "user_set_max_model_len": True, "max_num_batched_tokens": 512}
    plan = make_plan(num_gpu_blocks_override=97, windows=[1024] * 28, **small)
    # 1,535 tokens touch 97 blocks of 16
    assert (plan.cache.window, plan.cache.groups[0].max_live_tokens, plan.max_concurrency) == (1024, 1535, 1.0)
    with pytest.raises(ConfigError, match="needs 97 KV blocks .* lower max_num_batched_tokens"):
        make_plan(num_gpu_blocks_override=96, windows=[1024] * 28, **small)
    with pytest.raises(ConfigError, match="needs 2,560 KV blocks"):
        make_plan(num_gpu_blocks_override=97, **small)


def test_without_a_prefix_cache_there_are_no_more_blocks_than_windows_fill() -> None:
    few = {"max_model_len": 4096, "max_num_seqs": 4, "max_num_batched_tokens": 256, "windows": [512] * 28}
    assert make_plan(**few).cache.num_blocks == 4 * 256
    # 767 tokens touch 49 blocks of 16
    assert make_plan(enable_prefix_caching=False, **few).cache.num_blocks == 4 * 49
