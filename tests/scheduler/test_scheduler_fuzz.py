"""Any schedule gives what one request at a time gives: random arrivals, lengths, forks, aborts, pools and depths."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from octavo.core.messages import EngineCoreRequest
from tests.fakes.engine import Collected, make_core, make_request, run_alone

WIDTHS = [(1, None, False), (1, None, False), (2, None, False), (3, None, False), (1, 3, True), (2, 2, True)]
"""n, best_of, use_beam_search."""
PREFIXES = [[7] * 9, [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9]]


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    prefix = draw(st.sampled_from([[], *PREFIXES]))
    tail = draw(st.lists(st.integers(0, 5), min_size=0 if prefix else 1, max_size=14))
    return prefix + tail


class Schedules(RuleBasedStateMachine):
    """Requests arrive, abort, and stop while the core steps; each survivor must match its lonely run."""

    requests: Bundle[EngineCoreRequest] = Bundle("requests")

    @initialize(
        num_blocks=st.integers(3, 40),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(3, 8),
        max_num_batched_tokens=st.integers(8, 40),
        watermark=st.sampled_from([0.0, 0.01, 0.3]),
        enable_prefix_caching=st.booleans(),
        depth=st.integers(1, 3),
        num_host_blocks=st.sampled_from([0, 4, 40]),
        preemption_mode=st.sampled_from(["recompute", "swap", "classic", "auto"]),
        num_lookahead_slots=st.sampled_from([0, 0, 3]),
        policy=st.sampled_from(["fcfs", "priority", "fair-share", "deadline", "prefix-match"]),
        enable_chunked_prefill=st.sampled_from([True, True, False]),
        delay_factor=st.sampled_from([0.0, 0.5]),
        max_bypasses=st.sampled_from([0, 2]),
        priority_ageing_s=st.sampled_from([0.0, 5.0]),
        sliding_window=st.sampled_from([None, None, 1, 2, 4, 5, 11]),
    )
    def build(self, block_size: int, num_blocks: int, sliding_window: int | None, **options: object) -> None:
        self.sliding_window = sliding_window
        self.core = make_core(
            num_blocks=num_blocks * 4 // block_size,
            block_size=block_size,
            sliding_window=sliding_window,
            **options,  # type: ignore[arg-type]
        )
        self.seen = Collected()
        self.expected: dict[str, EngineCoreRequest] = {}
        self.cut: dict[str, set[int]] = {}
        self.count = 0

    @rule(
        target=requests,
        prompt=prompts(),
        width=st.sampled_from(WIDTHS),
        max_tokens=st.integers(1, 12),
        seed=st.integers(0, 3),
        end=st.sampled_from([(), (3,), tuple(range(0, 50, 7))]),
        stop=st.sampled_from([(), (5, 6)]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        salt=st.sampled_from([None, None, "a"]),
        priority=st.integers(0, 2),
        tenant=st.sampled_from([None, "x", "y"]),
        due=st.sampled_from([None, 5.0, 500.0]),
    )
    def arrive(
        self, prompt: list[int], width: tuple[int, int | None, bool], max_tokens: int, seed: int, end: tuple[int, ...],
        stop: tuple[int, ...], prompt_logprobs: int | None, salt: str | None,
        priority: int, tenant: str | None, due: float | None,
    ) -> EngineCoreRequest:  # fmt: skip
        self.count += 1
        request = make_request(
            f"r{self.count}", prompt, n=width[0], best_of=width[1], use_beam_search=width[2], max_tokens=max_tokens,
            seed=seed, end_token_ids=end, stop_token_ids=stop, prompt_logprobs=prompt_logprobs,
        )  # fmt: skip
        request.cache_salt, request.priority, request.tenant = salt, priority, tenant
        request.first_token_deadline = due and due + 1e6  # never so soon that the door refuses it
        self.core.add_request(request)
        self.expected[request.request_id] = request
        return request

    @rule(request=requests)
    def abort(self, request: EngineCoreRequest) -> None:
        self.core.abort_requests([request.request_id])
        if request.request_id not in self.seen.finals:
            self.expected.pop(request.request_id, None)

    @rule(request=requests, index=st.integers(0, 2))
    def stop(self, request: EngineCoreRequest, index: int) -> None:
        group = self.core.scheduler.groups.get(request.request_id)
        if group is None or group.beams is not None:
            return
        if any(s.index == index and s.num_output_tokens for s in group.live):
            self.core.stop_sequence(request.request_id, index)
            self.cut.setdefault(request.request_id, set()).add(index)
            if request.request_id not in self.core.scheduler.groups:
                self.expected.pop(request.request_id)

    @rule(prompt=prompts(), ttl_s=st.sampled_from([3.0, 1e9]), salt=st.sampled_from([None, None, "a"]))
    def pin(self, prompt: list[int], ttl_s: float, salt: str | None) -> None:
        self.core.pin_prefix(prompt, ttl_s, salt)

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.seen.add(self.core.step().outputs)

    @invariant()
    def accounts_agree(self) -> None:
        if hasattr(self, "core"):
            self.core.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(3000):
            if not self.core.has_unfinished():
                break
            self.seen.add(self.core.step().outputs)
        assert not self.core.has_unfinished()
        self.core.scheduler.block_manager.clear_pins()
        assert self.core.scheduler.block_manager.pool.num_used_blocks == 0
        self.core.scheduler.check()
        for name, request in self.expected.items():
            self._compare(name, request)

    def _compare(self, name: str, request: EngineCoreRequest) -> None:
        final = self.seen.finals[name]
        refusal = self.core.scheduler.refusal(request)
        if refusal is not None:
            assert final.error == refusal
            return
        assert final.error is None
        alone = run_alone(request, self.sliding_window)
        cut = self.cut.get(name, set())
        for index, token_ids in alone.token_ids[name].items():
            have = self.seen.token_ids[name][index]
            assert have == (token_ids[: len(have)] if index in cut else token_ids)
            logprobs = alone.logprobs[name][index]
            assert self.seen.logprobs[name][index] == logprobs[: len(have)]
            if index not in cut:
                assert self.seen.finish[name][index] == alone.finish[name][index]
        assert self.seen.prompt_logprobs.get(name) == alone.prompt_logprobs.get(name)


Schedules.TestCase.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
TestSchedules = Schedules.TestCase


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
        core.scheduler.check()
    for request in requests:
        name = request.request_id
        if core.scheduler.refusal(request) is None:
            assert seen.token_ids[name] == run_alone(request).token_ids[name]
        else:
            assert seen.finals[name].error is not None
