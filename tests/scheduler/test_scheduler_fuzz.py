"""Any schedule gives what one request at a time gives: every way to ask, every policy, every shortage.

`just fuzz` runs thousands of examples more.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, initialize, invariant, multiple, rule

from octavo.core.cache_key import Placeholder
from octavo.core.media import MediaInput
from octavo.core.messages import EngineCoreOutput, EngineCoreRequest
from octavo.core.sequence import SequenceGroup
from octavo.core.step import NewSequence, SchedulerOutput
from octavo.scheduler.policies import POLICIES
from octavo.simulate.replay import Replay
from tests.fakes.accounting import check_scheduler
from tests.fakes.engine import Clock, Collected, make_core, make_request, run_alone
from tests.fakes.executor import ENCODING, NUM_ENCODED, STATE, HashExecutor
from tests.fakes.listener import Mirror
from tests.fakes.prefix_source import ToySource
from tests.fakes.proposer import ToyProposer

FORM = {"json_object": True}
KINDS: list[dict[str, object]] = [
    {}, {}, {"n": 2}, {"n": 3}, {"n": 1, "best_of": 3}, {"n": 2, "best_of": 2, "use_beam_search": True},
    {"n": 1, "best_of": 3, "use_beam_search": True, "early_stopping": True, "length_penalty": 0.0},
    {"n": 2, "best_of": 3, "use_beam_search": True, "early_stopping": "never", "length_penalty": 2.0},
    {"n": 2, "use_beam_search": True, "early_stopping": "never", "length_penalty": -1.0},
    {"n": 3, "use_beam_search": True, "allowed_token_ids": (1, 2)},
    {"n": 2, "best_of": 3, "use_beam_search": True, "allowed_token_ids": (1, 2, 3, 5), "bad_words": ("some",)},
    {"structured_outputs": FORM}, {"structured_outputs": FORM, "n": 2},
    {"structured_outputs": FORM, "n": 2, "use_beam_search": True},
    {"n": 3, "repetition_detection": {"max_pattern_size": 1, "min_count": 2}},
]  # fmt: skip
PREFIXES = [[7] * 9, [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9], list(range(10, 30))]
STATE_GROUPS = [(None, STATE), (None, STATE), (4, STATE, None), (STATE,)]
ENCODING_GROUPS = [(None, ENCODING), (4, None, ENCODING)]
EVENTS = ["abort", "stop", "stop", "resume", "die", "pin", "reset", "same id", "read", "read no more"]
EVENTS += ["sleep", "wake up", "pause", "go on", "forget"]
FAIL_TOKEN = 11
REFUSALS = ("queue_full", "deadline_unreachable", "deadline_too_short", "too_many_prompts")


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    prefix = draw(st.sampled_from([[], *PREFIXES]))
    tail = draw(st.lists(st.integers(0, 2), min_size=0 if prefix else 1, max_size=9))
    return prefix + tail


@st.composite
def arrivals(draw: st.DrawFn) -> EngineCoreRequest:
    """A request without an id and a time of arrival."""
    request = make_request(
        "",
        draw(prompts()),
        max_tokens=draw(st.sampled_from([1, 2, 6, 9, 14, 20])),
        seed=draw(st.integers(0, 3)),
        end_token_ids=draw(st.sampled_from([(), (), (3,), tuple(range(0, 50, 7))])),
        stop_token_ids=draw(st.sampled_from([(), (), (5, 6)])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
        skip_reading_prefix_cache=draw(st.sampled_from([None, None, False, True])),
        **draw(st.sampled_from(KINDS)),
    )
    sound = bytes([request.prompt_token_ids[0]]) * 32
    request.placeholders = (Placeholder(0, 1, sound),)
    request.media = (MediaInput("audio", sound, (), NUM_ENCODED, {}),)
    offset, length = draw(st.sampled_from([(0, 0), (1, 4), (3, 5), (2, 6)]))
    if length and offset + length <= len(request.prompt_token_ids):
        image, is_whole = bytes([draw(st.integers(0, 1))]) * 32, draw(st.booleans())
        request.placeholders += (Placeholder(offset, length, image),)
        request.media += (MediaInput("image", image, ((offset, length),), length, {}, is_whole),)
    request.cache_salt = draw(st.sampled_from([None, None, None, "a"]))
    request.adapter = draw(st.sampled_from([None, None, "x", "y", "z"]))
    request.priority = draw(st.integers(0, 4))
    request.keep_s = draw(st.sampled_from([0.0, 0.0, 0.0, 3.0]))
    request.tenant = draw(st.sampled_from([None, "x", "y"]))
    request.first_token_deadline_s = draw(st.sampled_from([None, None, 10.0, 100.0]))
    return request


class PassCounter:
    """Reads the log of decisions: how often was a group passed that had been found not to fit in the same step?

    has_slots: adapters need slots. While one waits for a slot, those without an adapter pass those with one.
    """

    def __init__(self, *, has_slots: bool) -> None:
        self.num_passed: dict[str, int] = {}
        self._has_slots = has_slots
        self._blocked: dict[str, bool] = {}

    def begin(self) -> None:
        """A step is planned."""
        self._blocked = {}

    def note(self, kind: str, request: EngineCoreRequest) -> None:
        has_adapter = self._has_slots and request.adapter is not None
        if kind == "blocked":
            self._blocked[request.request_id] = has_adapter
        if kind in ("admitted", "swapped_in"):
            for passed, needs_slot in self._blocked.items():
                if has_adapter or not needs_slot:
                    self.num_passed[passed] = self.num_passed.get(passed, 0) + 1


class Schedules(RuleBasedStateMachine):
    """Requests arrive, abort, and stop while the core steps; each survivor must match its lonely run."""

    requests: Bundle[EngineCoreRequest] = Bundle("requests")

    @initialize(
        target=requests,
        first=st.lists(arrivals(), min_size=2, max_size=6),
        num_slots=st.sampled_from([24, 48, 64, 64, 96, 160]),
        block_size=st.sampled_from([1, 2, 4, 4]),
        max_num_seqs=st.sampled_from([2, 4, 6, 12, 12]),
        max_num_batched_tokens=st.sampled_from([6, 30, 48, 48]),
        long_prefill_token_threshold=st.sampled_from([0, 0, 1, 5, 16]),
        watermark=st.sampled_from([0.0, 0.0, 0.01, 0.3]),
        enable_prefix_caching=st.sampled_from([True, True, False]),
        prefix_cache_eviction=st.sampled_from(["lru", "cost"]),
        depth=st.integers(1, 4),
        num_host_blocks=st.sampled_from([0, 4, 40, 40]),
        preemption_mode=st.sampled_from(["recompute", "swap", "swap", "classic", "auto"]),
        swap_block_s=st.sampled_from([0.0, 0.1, 2.0]),
        num_lookahead_slots=st.sampled_from([0, 0, 0, 1, 3, 6]),
        max_loras=st.sampled_from([0, 0, 1, 2]),
        policy=st.sampled_from(list(POLICIES)),
        enable_chunked_prefill=st.sampled_from([True, True, False]),
        delay_factor=st.sampled_from([0.0, 0.5]),
        max_bypasses=st.sampled_from([0, 1, 2, 5]),
        priority_ageing=st.sampled_from([0.0, 5.0]),
        tenant_weights=st.sampled_from([{}, {"x": 3.0}]),
        max_queued_requests=st.sampled_from([None, None, None, None, None, 3]),
        max_queued_tokens=st.sampled_from([None, None, None, None, 30]),
        prefill_tokens_per_s=st.sampled_from([None, 2.0, 50.0]),
        sliding_window=st.sampled_from(
            [
                None,
                None,
                1,
                2,
                4,
                5,
                11,
                (None, 4),
                (5, None),
                (2, 11, None),
                *STATE_GROUPS,
                *STATE_GROUPS,
                *ENCODING_GROUPS,
            ]
        ),
        state_snapshot_tokens=st.sampled_from([0, 4, 16]),
        prefix_cache_size=st.sampled_from([None, None, 0, 100]),
        later_share=st.sampled_from([1.0, 0.6]),
        fetch_fails=st.sampled_from([None, None, 0.0, 0.5]),
        target_step_ms=st.sampled_from([None, None, 0.0, 1500.0]),
        may_fail=st.sampled_from([False, False, False, True]),
        rightness=st.sampled_from([None, None, None, 0.0, 0.6, 1.0]),
        sends_tokens=st.sampled_from([False, False, True]),
        compile_steps=st.sampled_from([0, 1, 2, 5]),
        is_recorded=st.sampled_from([False, False, True]),
    )
    def build(
        self, first: list[EngineCoreRequest], block_size: int, num_slots: int, later_share: float, may_fail: bool,
        fetch_fails: float | None,
        is_recorded: bool, rightness: float | None, **options: object,
    ) -> MultipleResults[EngineCoreRequest]:  # fmt: skip
        self.clock = Clock()
        if not options["enable_chunked_prefill"]:
            options["long_prefill_token_threshold"] = 0  # refused together
        # what is found in the cache is not computed, so it cannot fail: with both, a failure would depend on others
        self.fail_token = FAIL_TOKEN if may_fail and not options["enable_prefix_caching"] else None
        self.expected: dict[str, EngineCoreRequest] = {}
        sliding_window = options["sliding_window"]
        # what encoders make does not move between engines, and a recording holds no sounds
        has_encodings = isinstance(sliding_window, tuple) and ENCODING in sliding_window
        is_recorded = is_recorded and not has_encodings
        # of several cache groups, the later ones may have fewer blocks
        num_blocks = tuple(int(num_slots * share) // block_size for share in (1.0, later_share, later_share))
        # a replay has no source
        self.source = None
        if fetch_fails is not None and not is_recorded and not has_encodings:
            self.source = ToySource(fetch_fails)
        self.folder = TemporaryDirectory() if is_recorded else None
        self.recording = Path(self.folder.name) / "run" if self.folder is not None else None
        proposer = None if rightness is None else ToyProposer(self._alone, rightness)
        self.make_core = partial(
            make_core, source=self.source, num_blocks=num_blocks, block_size=block_size, clock=self.clock,
            fail_token=self.fail_token, record_to=self.recording, proposer=proposer, **options,
        )  # fmt: skip
        self.options = options
        self.seen = Collected()
        self.sent: dict[int, NewSequence] = {}
        self.cut: dict[str, set[int]] = {}
        self.alone: dict[str, dict[int, list[int]]] = {}
        self.companions: dict[str, list[EngineCoreRequest]] = {}
        self.count = self.num_repeated = 0
        self.passes = PassCounter(has_slots=bool(options["max_loras"]))
        self._start()
        return self.arrive(first, together=False)

    def _start(self) -> None:
        self.core = self.make_core()
        assert isinstance(self.core.executor, HashExecutor)
        self.executor = self.core.executor
        if self.source is not None:
            self.source.executor, self.source.block_manager = self.executor, self.core.scheduler.block_manager
        self.mirror = Mirror()
        self.core.scheduler.block_manager.listeners.append(self.mirror)
        self._listen()

    def _alone(self, group: SequenceGroup) -> dict[int, list[int]]:
        """The tokens of a request that runs by itself."""
        if group.request_id not in self.alone:
            request = self.expected.get(group.request_id, group.request)
            collected = run_alone(request, self.options["sliding_window"], self.fail_token)
            self.alone[group.request_id] = collected.token_ids.get(group.request_id, {})
        return self.alone[group.request_id]

    def _listen(self) -> None:
        log, passes = self.core.scheduler.log, self.passes
        begin, note = log.begin, log.note

        def begin_and_tell(step: int, now: float) -> None:
            begin(step, now)
            passes.begin()

        def note_and_tell(kind: str, request: EngineCoreRequest, because: str = "") -> None:
            note(kind, request, because)
            if "adapter" not in because:  # those without an adapter pass, without a bound
                passes.note(kind, request)

        log.begin, log.note = begin_and_tell, note_and_tell  # type: ignore[method-assign]

    @rule(target=requests, batch=st.lists(arrivals(), min_size=1, max_size=4), together=st.booleans())
    def arrive(self, batch: list[EngineCoreRequest], together: bool) -> MultipleResults[EngineCoreRequest]:
        for request in batch:
            self.count += 1
            request.request_id = f"r{self.count}"
            request.arrival_time = self.clock.time
            self.expected[request.request_id] = request
            if self.recording is not None:  # which holds no images either
                request.media, request.placeholders = request.media[:1], request.placeholders[:1]
        for part in [batch] if together else [[request] for request in batch]:
            if self.source is not None and self.count % 2:
                self.source.learn(part[0])
            self.core.add_requests(part)
            self.companions.update((request.request_id, part) for request in part)
        return multiple(*batch)

    @rule(
        event=st.sampled_from(EVENTS),
        request=requests, index=st.integers(0, 2), ttl_s=st.sampled_from([1.0, 10.0, 1e6]),
    )  # fmt: skip
    def disturb(self, event: str, request: EngineCoreRequest, index: int, ttl_s: float) -> None:
        group = self.core.scheduler.groups.get(request.request_id)
        if event == "abort":
            self._take_kept()  # nothing of it follows, neither its last output nor that of another one with its id
            if request.request_id in self.core.scheduler.groups:
                self.expected.pop(request.request_id)
            self.core.abort_requests([request.request_id])
        elif event == "stop" and group is not None and group.beams is None:
            self._stop(group, index)
        elif event == "resume" and group is not None:
            self._take_kept()
            if request.request_id in self.core.scheduler.groups:
                self.core.abort_requests([request.request_id])
                self._resume(group)
        elif event == "die" and self.source is None and self.recording is None:  # which are of one core
            self._die()
        elif event == "pin":
            prompt = request.prompt_token_ids
            assert self.core.pin_prefix(prompt, ttl_s, request.cache_salt).num_tokens <= len(prompt)
        elif event == "reset":
            has_blocks = any(True for _ in self.core.scheduler._registry.sequences_on_device())
            has_blocks |= self.source is not None and (self.source.is_busy or bool(self.source.holders))
            assert self.core.reset_prefix_cache() is not has_blocks
        elif event == "read" and self.source is not None and self.count not in self.source.holders:
            self.source.hold(request, self.count)
        elif event == "read no more" and self.source is not None:
            self.source.release()
        elif event == "sleep" and self.source is None and self.recording is None:
            self.core.call("sleep")
            self._step()
            assert self.core.sleep.is_on
        elif event == "wake up" and self.core.sleep.is_on:
            self.core.call("wake_up")
        elif event == "pause":
            self.core.call("pause", ("keep", "wait", "keep")[index], index == 2)
        elif event == "go on":
            self.core.call("resume")
        elif event == "forget":
            is_held = bool(self.core.scheduler.block_manager.holds)
            assert self.core.reset_prefix_cache(preempts=True) is not is_held
        elif event == "same id" and group is not None:
            self.core.add_request(request)
            self.num_repeated += 1

    def _stop(self, group: SequenceGroup, index: int) -> None:
        name = group.request_id
        if any(sequence.index == index and sequence.num_output_tokens for sequence in group.live):
            self.core.stop_sequence(name, index)
            self.cut.setdefault(name, set()).add(index)
            if name not in self.core.scheduler.groups:
                self.expected.pop(name)

    def _die(self) -> None:
        """The core dies with all steps in flight; another one, which knows nothing, gets what was running."""
        self._take_kept()
        groups = list(self.core.scheduler.groups.values())
        self._start()
        for group in groups:
            self._resume(group)

    def _take_kept(self) -> None:
        """Take what the next step would return whatever it computes."""
        kept, self.core._kept = self.core._kept + self.core.scheduler.take_ended(), []
        self._take(kept)

    def _resume(self, group: SequenceGroup) -> None:
        name = group.request_id
        metrics = group.metrics.copy()
        metrics.note(self.clock.time, "resumed")
        resumed = self.seen.to_resume(self.expected[name], metrics, self.cut.get(name, ()))
        assert bool(resumed.resumed) == (group.has_output and group.beams is None)
        self.passes.num_passed.pop(name, None)
        self.core.add_request(resumed)

    @rule(num_steps=st.integers(1, 5))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    def _step(self) -> None:
        num_before = len(self.executor.steps)
        self._take(self.core.step().outputs)
        for made in self.executor.steps[num_before:]:
            assert not (made.block_ops.swap_outs and made.block_ops.swap_ins), "out and in by one step"
            self._check_images(made)
        scheduler = self.core.scheduler
        assert sum(group.max_running_sequences for group in scheduler.running) <= self.options["max_num_seqs"]
        adapters = {group.request.adapter for group in scheduler.running} - {None}
        assert len(adapters) <= (self.options["max_loras"] or len(adapters))

    def _check_images(self, made: SchedulerOutput) -> None:
        """No row ends among tokens that see each other, and a step encodes few images, or one."""
        self.sent.update((new.seq_id, new) for new in made.new_sequences)
        costs: list[int] = []
        for row in made.rows:
            new, end = self.sent[row.seq_id], row.start + row.num_tokens
            spans = [each.spans[0] for each in new.media if each.spans]
            costs += [length for offset, length in spans if row.start <= offset < end]
            whole = new.whole_spans
            assert not any(offset < end < offset + length for offset, length in whole), "a row ends within an image"
        assert len(costs) <= 1 or sum(costs) <= self.options["max_num_batched_tokens"]

    def _take(self, outputs: list[EngineCoreOutput]) -> None:
        repeated = [each for each in outputs if each.error is not None and each.error.field == "request_id"]
        self.num_repeated -= len(repeated)
        self.seen.add(each for each in outputs if each not in repeated)

    @invariant()
    def accounts_agree(self) -> None:
        if not hasattr(self, "core"):
            return
        check_scheduler(self.core.scheduler)
        self.mirror.check(self.core.scheduler.block_manager)
        # the classic policy lets others pass who waits for an adapter, without a bound
        if self.options["enable_chunked_prefill"]:
            assert max(self.passes.num_passed.values(), default=0) <= self.options["max_bypasses"]

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        try:
            if self.core.sleep.is_on:
                self.core.call("wake_up")
            self.core.call("resume")
            for _ in range(3000):
                if not self.core.has_unfinished():
                    break
                self._step()
            self._check_the_end()
        finally:
            self.core.shutdown()
            if self.folder is not None:
                self.folder.cleanup()

    def _check_the_end(self) -> None:
        assert not self.core.has_unfinished()
        assert self.num_repeated == 0
        self.accounts_agree()
        if self.recording is not None:
            replay = Replay(self.recording)
            assert [each.step for each in replay.steps()] == self.executor.steps
            assert replay.scheduler.stats() == self.core.stats()
        self._check_that_nothing_leaks()
        assert self.seen.finals.keys() == self.expected.keys(), "exactly one final output for each request"
        for name, request in self.expected.items():
            self._compare(name, request)

    def _check_that_nothing_leaks(self) -> None:
        scheduler = self.core.scheduler
        registry, block_manager = scheduler._registry, scheduler.block_manager
        block_manager.pins.clear()
        if self.source is not None:
            self.source.release()
        while self.source is not None and (self.source.is_busy or self.source.holders):
            self._step()
        check_scheduler(scheduler)
        assert not block_manager.tables
        assert block_manager.num_used_blocks == block_manager.num_used_host_blocks == 0
        assert not registry.groups
        assert not registry.running
        assert not len(registry.waiting)
        assert not len(registry.swapped)
        assert registry.num_queued_tokens == 0
        assert self.executor.states.keys() == {sequence.seq_id for sequence in registry._released}

    def _compare(self, name: str, request: EngineCoreRequest) -> None:
        final = self.seen.finals[name]
        # all that come together are taken in, or none
        refusals = [self.core.scheduler.refusal(each) for each in self.companions[name]]
        refusal = next((each for each in refusals if each is not None), None)
        if refusal is not None and final.error == refusal:
            assert name not in self.seen.token_ids
            return
        if final.error is not None and final.error.code in REFUSALS:
            self._check_refusal(name, final.error.code)
            return
        assert refusal is None
        alone = run_alone(request, self.options["sliding_window"], self.fail_token)
        cut = self.cut.get(name, set())
        if not cut:
            assert final.error == alone.finals[name].error
        for index, token_ids in alone.token_ids.get(name, {}).items():
            have = self.seen.token_ids.get(name, {}).get(index, [])
            assert have == token_ids[: len(have)] or (final.error and have[: len(token_ids)] == token_ids)
            logprobs = alone.logprobs[name][index]
            assert self.seen.logprobs.get(name, {}).get(index, [])[: len(logprobs)] == logprobs[: len(have)]
            if index not in cut and final.error is None:
                assert len(have) == len(token_ids)
                assert self.seen.finish[name][index] == alone.finish[name][index]
        if final.error is None:
            assert self.seen.prompt_logprobs.get(name) == alone.prompt_logprobs.get(name)
            assert 0 <= final.num_cached_tokens < len(request.prompt_token_ids)
        assert final.metrics is not None
        times = [time for time, _ in final.metrics.timeline]
        assert times == sorted(times)

    def _check_refusal(self, name: str, code: str) -> None:
        assert name not in self.seen.token_ids
        if code.startswith("deadline"):
            assert any(each.first_token_deadline_s is not None for each in self.companions[name])
        elif code == "queue_full":
            assert self.options["max_queued_requests"] or self.options["max_queued_tokens"]
        else:
            assert len(self.companions[name]) > 1


# a smaller failing run is seldom worth the minutes that shrinking takes
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
Schedules.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None, phases=PHASES)
TestSchedules = Schedules.TestCase


class ManySchedules(Schedules):
    """The same for longer."""


ManySchedules.TestCase.settings = settings(
    max_examples=2000,
    stateful_step_count=40,
    deadline=None,
    derandomize=False,
    suppress_health_check=list(HealthCheck),
    phases=PHASES,
)
TestManySchedules = pytest.mark.long(pytest.mark.timeout(0)(ManySchedules.TestCase))


@settings(max_examples=60, deadline=None)
@given(
    batch=st.lists(
        st.tuples(prompts(), st.integers(1, 4), st.integers(1, 10), st.integers(0, 3)), min_size=2, max_size=12
    ),
    depth=st.integers(1, 3),
    num_blocks=st.integers(3, 30),
    caching=st.booleans(),
)
def test_a_batch_under_pressure_gives_what_each_request_gives_alone(
    batch: list[tuple[list[int], int, int, int]], depth: int, num_blocks: int, caching: bool
) -> None:
    core = make_core(num_blocks=num_blocks, depth=depth, enable_prefix_caching=caching)
    requests = [
        make_request(f"r{i}", prompt, n=n, max_tokens=max_tokens, seed=seed)
        for i, (prompt, n, max_tokens, seed) in enumerate(batch)
    ]
    for request in requests:
        core.add_request(request)
    seen = Collected()
    for _ in range(5000):
        if not core.has_unfinished():
            break
        seen.add(core.step().outputs)
        check_scheduler(core.scheduler)
    for request in requests:
        name = request.request_id
        if core.scheduler.refusal(request) is None:
            assert seen.token_ids[name] == run_alone(request).token_ids[name]
        else:
            assert seen.finals[name].error is not None
