"""The division of one budget in bytes between cache groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config.schema import CacheConfig, SchedulerConfig
from octavo.core.sampling_params import SamplingParams
from octavo.devices.device import DeviceMemory
from octavo.errors import ConfigError
from octavo.worker.start.cache_plan import CacheDivision
from tests.fakes.shapes import group, group_windows

LAYER_BYTES = 100
MEMORY = DeviceMemory(total=1 << 40, available=1 << 40, source="machine", most_kv_bytes=None)


def division(
    windows: list[int | None],
    *,
    max_model_len: int = 256,
    chunk: int = 16,
    num_lookahead_slots: int = 0,
    **cache: object,
) -> CacheDivision:
    scheduler = SchedulerConfig(
        max_model_len=max_model_len,
        max_num_batched_tokens=chunk,
        max_num_seqs=4,
        num_lookahead_slots=num_lookahead_slots,
    )
    config = CacheConfig(dtype="float32", block_size=4, **cache)  # type: ignore[arg-type]
    return CacheDivision(groups := group_windows(windows), [LAYER_BYTES] * len(groups), config, scheduler)


def test_layers_are_grouped_by_their_window_in_the_order_of_their_first_layers() -> None:
    assert group_windows([7, None, 7, 3]) == (group(0, 2, window=7), group(1), group(3, window=3))
    assert group(1, 4, 6, window=7).of_range(range(4, 8)) == group(0, 2, window=7)


def test_each_group_has_blocks_for_as_many_sequences() -> None:
    # a sequence of full length takes 64 blocks, and 7 of a window of 7 and a step of 16
    both = division([7, None, None])
    assert both.blocks_of(640) == [70, 640]
    assert both.num_bytes(640) == 71 * LAYER_BYTES + 641 * 2 * LAYER_BYTES
    limits = both.limits(640, 64)
    assert [group.num_host_blocks for group in limits.groups] == [7, 64]
    assert [(group.window, group.max_live_tokens) for group in limits.groups] == [(7, 22), (None, None)]


@given(
    windows=st.lists(st.sampled_from([None, 3, 7, 100]), min_size=1, max_size=6),
    max_model_len=st.integers(1, 400),
    num_bytes=st.integers(0, 200_000),
)
def test_the_groups_fill_the_budget_and_no_more(windows: list[int | None], max_model_len: int, num_bytes: int) -> None:
    groups = division(windows, max_model_len=max_model_len)
    most = groups.most_blocks(num_bytes)
    if most > 0:
        assert groups.num_bytes(most) <= num_bytes
        assert groups.num_bytes(most + 1) > num_bytes
        assert all(count >= 1 for count in groups.blocks_of(most))
    if len(set(windows)) == 1:
        assert most == num_bytes // (len(windows) * LAYER_BYTES) - 1 or most <= 0


def test_an_override_counts_the_blocks_of_the_group_that_needs_most() -> None:
    overridden = division([7, None], num_gpu_blocks_override=128)
    assert overridden.choose(10_000, MEMORY) == (128, "num_gpu_blocks_override")
    assert overridden.blocks_of(128) == [14, 128]
    with pytest.raises(ConfigError, match="num_gpu_blocks_override 128 needs .*, but there is room for 100 blocks"):
        overridden.choose(100, MEMORY)


def test_a_sequence_of_full_length_must_fit() -> None:
    division([7, None]).check_holds_one(64, "memory left")
    with pytest.raises(ConfigError, match=r"max_model_len 256 needs 64 KV blocks of 4 tokens .* there are 63 \(memory"):
        division([7, None]).check_holds_one(63, "memory left")


@pytest.mark.parametrize(
    ("num_slots", "num_blocks", "said"),
    [(5, 65, r"needs 66 KV .*; lower max_model_len to 255, "), (5, 1, "; lower num_lookahead_slots, or give")],
)
def test_a_sequence_of_full_length_must_fit_with_its_lookahead_slots(
    num_slots: int, num_blocks: int, said: str
) -> None:
    planned = division([None], num_lookahead_slots=num_slots)
    planned.check_holds_one(66, "memory left")
    planned.limits(66, 0).check_runs_alone(255, 1, SamplingParams(), 1)
    with pytest.raises(ConfigError, match=said):
        planned.check_holds_one(num_blocks, "memory left")


def test_a_context_that_nobody_asked_for_leaves_room_for_the_lookahead_slots() -> None:
    assert division([None], num_lookahead_slots=5, num_gpu_blocks_override=16).most_tokens(1 << 30, None) == 59
    assert division([None], num_lookahead_slots=70, num_gpu_blocks_override=16).most_tokens(1 << 30, None) == 1
