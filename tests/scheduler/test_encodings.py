"""Layers that read an encoder's output beside layers that keep tokens: a sound is written once and found."""

from __future__ import annotations

import msgspec
import pytest

from octavo.config.schema import PreemptionMode
from octavo.core.cache_key import Placeholder
from octavo.core.media import MediaInput
from octavo.core.messages import EngineCoreRequest
from octavo.engine.engine_core import EngineCore
from octavo.kv_cache.allocation import Shortage
from tests.fakes.accounting import check_scheduler
from tests.fakes.engine import Collected, make_core, make_request, run, run_alone
from tests.fakes.executor import ENCODING, NUM_ENCODED

BOTH = (None, ENCODING)
BLOCK = 4
NUM_BLOCKS = -(-NUM_ENCODED // BLOCK)
"""Blocks of one sound."""


def sound_core(num_encodings: int = 4, **options: object) -> EngineCore:
    values: dict[str, object] = {"max_num_batched_tokens": 8, "num_blocks": (64, num_encodings * NUM_BLOCKS)} | options
    return make_core(block_size=BLOCK, sliding_window=BOTH, **values)  # type: ignore[arg-type]


def sound_request(name: str, sound: int, length: int = 6, **params: object) -> EngineCoreRequest:
    """A request whose first token stands for a sound."""
    request = make_request(name, [sound, *range(1, length)], **params)
    placeholder = Placeholder(0, 1, bytes([sound]) * 32)
    media = MediaInput("audio", placeholder.digest, (), NUM_ENCODED, {})
    return msgspec.structs.replace(request, placeholders=(placeholder,), media=(media,))


def used(core: EngineCore) -> int:
    return core.scheduler.block_manager.groups[1].pool.num_used_blocks


def num_written(core: EngineCore) -> int:
    return sum(bool(new.media) for step in core.executor.steps for new in step.new_sequences)  # type: ignore[attr-defined]


def expected(request: EngineCoreRequest) -> Collected:
    return run_alone(request, BOTH)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_request_holds_the_blocks_of_its_sound_once_however_many_sequences_it_has(caching: bool, depth: int) -> None:
    core = sound_core(depth=depth, enable_prefix_caching=caching)
    request = sound_request("a", 9, 21, n=3, max_tokens=12)
    core.add_request(request)
    most, seen = 0, Collected()
    while core.has_unfinished():
        seen.add(core.step().outputs)
        check_scheduler(core.scheduler)
        most = max(most, used(core))
    assert most == NUM_BLOCKS
    assert num_written(core) == 1
    assert seen.token_ids == expected(request).token_ids


def test_the_same_sound_is_found_and_another_is_not() -> None:
    core = sound_core()
    first = run(core, [sound_request("a", 9)])
    again = run(core, [sound_request("b", 9, 3)])
    assert num_written(core) == 1
    other = run(core, [sound_request("c", 8)])
    assert num_written(core) == 2
    assert first.token_ids["a"] != other.token_ids["c"]
    assert again.token_ids == expected(sound_request("b", 9, 3)).token_ids
    salted = msgspec.structs.replace(sound_request("d", 9), cache_salt="x")
    run(core, [salted])
    assert num_written(core) == 3


def test_a_prefix_is_continued_although_its_sound_was_evicted() -> None:
    core = sound_core(1)
    run(core, [sound_request("a", 9, 21)])
    run(core, [sound_request("b", 8, 3)])
    seen = run(core, [again := sound_request("c", 9, 21)])
    assert seen.finals["c"].num_cached_tokens == 20
    assert num_written(core) == 3
    assert seen.token_ids == expected(again).token_ids


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("num_blocks", [(24, 30), (64, 6)], ids=["tokens are short", "encodings are"])
def test_preempted_requests_find_their_sounds(mode: PreemptionMode, depth: int, num_blocks: tuple[int, int]) -> None:
    core = sound_core(num_blocks=num_blocks, preemption_mode=mode, num_host_blocks=64, depth=depth)
    kinds: list[dict[str, object]] = [{}, {"n": 2}, {"n": 2, "use_beam_search": True}, {}]
    requests = [sound_request(f"r{i}", 3 + i % 3, 5 * i + 3, max_tokens=20, seed=i, **kinds[i % 4]) for i in range(8)]
    seen = run(core, requests)
    stats = core.stats()
    if num_blocks[0] == 24:
        assert stats.num_preemptions > 0
        assert (stats.num_preemptions_by_swap > 0) == (mode == "swap")
    for request in requests:
        name = request.request_id
        assert seen.token_ids[name] == expected(request).token_ids[name]


def test_a_request_waits_for_the_blocks_of_its_sound() -> None:
    core = sound_core(1)
    core.add_request(sound_request("a", 9, max_tokens=30))
    core.add_request(other := sound_request("b", 8))
    core.step()
    manager, group = core.scheduler.block_manager, core.scheduler.groups["b"]
    hit = manager.find_prefix(group, group.live[0], 6)
    shortage = manager.shortage(group, hit, waive_watermark=True)
    assert shortage == Shortage("needs 3 free KV blocks, 0 are free, 0 stay free", (0, NUM_BLOCKS))
    assert run(core).token_ids["b"] == expected(other).token_ids["b"]


def test_a_request_that_failed_leaves_no_encoding() -> None:
    core = sound_core(fail_token=5)
    run(core, [sound_request("a", 9, 7)])
    run(core, [sound_request("b", 9, 3)])
    assert num_written(core) == 2
