"""The memory tables of the PagedAttention paper from our own scheduler: `python -m benchmarks.paged_attention_paper`.

Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention",
https://arxiv.org/abs/2309.06180: how full the KV cache is (figure 2), and the blocks that parallel sampling and beam
search save by sharing (figure 15, section 6.3). The scheduler and the block manager are those that serve; the device is
simulated, which memory does not notice. Lengths are log-normal with the means of the paper's data sets.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from octavo.cli.report import report
from octavo.config.schema import CacheConfig, SchedulerConfig
from octavo.scheduler.build import SchedulerSettings
from octavo.simulate.cost_model import preset
from octavo.simulate.replica import Replica
from octavo.simulate.traces import Trace, TraceRequest, Workload, generate

BLOCK_SIZE = 16
NUM_SLOTS = 15_700
"""Tokens that the cache holds for OPT-13B on an A100 with 40 GB (the paper's table 1)."""
MAX_LEN = 2048
WIDTHS = (2, 4, 6)


class DataSet(NamedTuple):
    """Mean lengths (the paper's figure 11), and the savings in per cent that it reports for widths 2 to 6."""

    input_len: float
    output_len: float
    parallel: str
    beam: str


DATA_SETS = {
    "ShareGPT": DataSet(161.31, 337.99, "16.2 - 30.5", "44.3 - 66.3"),
    "Alpaca": DataSet(19.31, 58.45, "6.1 - 9.8", "37.6 - 55.2"),
}


class Shares(NamedTuple):
    """Of all slots of the cache, the mean over steps with a queue. They add up to 1.

    tokens: keys and values. reserved: for tokens to come. internal: given to a request that will never fill them.
    external: given to nobody.
    """

    tokens: float
    reserved: float
    internal: float
    external: float


# ---- paged: the scheduler that serves ----


def make_replica(candidate_spread: float, num_slots: int) -> Replica:
    """An engine with the paper's cache. Without prefix caching, which the paper's system did not have, and with a
    budget of tokens that never binds: memory alone decides who runs."""
    settings = SchedulerSettings(
        cache=CacheConfig(dtype="float16", block_size=BLOCK_SIZE, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=1024, max_num_batched_tokens=1 << 16, max_model_len=MAX_LEN),
        num_blocks=num_slots // BLOCK_SIZE,
    )
    return Replica(0, settings, preset("a100-40g/opt-13b"), candidate_spread=candidate_spread)


def run(
    requests: list[TraceRequest],
    after_step: Callable[[Replica], None],
    candidate_spread: float = 0.5,
    num_slots: int = NUM_SLOTS,
) -> None:
    """Hand everything in at once, and look after every step."""
    trace, replica = Trace(requests), make_replica(candidate_spread, num_slots)
    for number in range(len(trace)):
        replica.submit(*trace.request(number, 0.0))
    now = 0.0
    while (ends_at := replica.begin_step(now)) is not None:
        after_step(replica)
        for output in replica.end_step():
            assert output.error is None, output.error
        now = ends_at


def paged_shares(requests: list[TraceRequest]) -> Shares:
    """How the blocks are used while requests wait for memory. Nothing is reserved; internal is the end of each last
    block."""
    tokens = given = available = 0

    def after_step(replica: Replica) -> None:
        nonlocal tokens, given, available
        if replica.num_waiting:
            scheduler = replica.scheduler
            tokens += sum(sequence.num_computed_tokens for group in scheduler.running for sequence in group.live)
            given += scheduler.block_manager.pool.num_used_blocks * BLOCK_SIZE
            available += NUM_SLOTS

    run(requests, after_step)
    return Shares(tokens / available, 0.0, (given - tokens) / available, 1 - given / available)


def saving(requests: list[TraceRequest], candidate_spread: float = 0.5, num_slots: int = NUM_SLOTS) -> float:
    """Blocks saved by sharing, as a share of those that the same tables would need without: the mean over steps in
    which requests wait for memory."""
    shared = total = 0

    def after_step(replica: Replica) -> None:
        nonlocal shared, total
        if not replica.num_waiting:
            return
        manager = replica.scheduler.block_manager
        entries = sum(
            len(manager.table(sequence))
            for group in replica.scheduler.running
            for sequence in (group.live if group.refork_at is None else group.live[:1])
        )
        total += entries
        shared += entries - manager.pool.num_used_blocks

    run(requests, after_step, candidate_spread, num_slots)
    return shared / total


# ---- contiguous: the systems that the paper compares with ----


class Buddies:
    """Contiguous chunks, each a power of two of slots, halved and joined again (Knowlton 1965)."""

    def __init__(self, num_slots: int) -> None:
        self._free: dict[int, set[int]] = {}
        start = 0
        for exponent in range(num_slots.bit_length() - 1, -1, -1):
            if num_slots >> exponent & 1:
                self._free.setdefault(1 << exponent, set()).add(start)
                start += 1 << exponent
        self._largest = max(self._free)

    def allocate(self, size: int) -> tuple[int, int] | None:
        """A chunk (start, length) of at least `size` slots; None when there is none."""
        length = wanted = 1 << (size - 1).bit_length()
        while not self._free.get(length):
            length *= 2
            if length > self._largest:
                return None
        start = min(self._free[length])
        self._free[length].remove(start)
        while length > wanted:
            length //= 2
            self._free.setdefault(length, set()).add(start + length)
        return start, length

    def free(self, chunk: tuple[int, int]) -> None:
        """Give a chunk back, and join it with its free neighbours."""
        start, length = chunk
        while (buddy := start ^ length) in self._free.get(length, ()):
            self._free[length].remove(buddy)
            start, length = min(start, buddy), 2 * length
        self._free.setdefault(length, set()).add(start)


class Held(NamedTuple):
    """A running request of a contiguous system."""

    chunk: tuple[int, int]
    asked: int
    prompt_len: int
    output_len: int
    began_at: int


def contiguous_shares(requests: Iterable[TraceRequest], slots_for: Callable[[int, int], int]) -> Shares:
    """First come, first served, a token per step and request; each holds `slots_for(prompt, output)` from begin to end.
    External is also what rounding up to a power of two takes."""
    waiting = deque((request.prompt_len, request.output_len) for request in requests)
    buddies, running, step = Buddies(NUM_SLOTS), list[Held](), 0
    sums = [0, 0, 0, 0]
    while waiting:
        while waiting:
            asked = slots_for(*waiting[0])
            chunk = buddies.allocate(asked)
            if chunk is None:
                break
            running.append(Held(chunk, asked, *waiting.popleft(), began_at=step))
        if not waiting:
            break
        step += 1
        num_asked = sum(held.asked for held in running)
        tokens = sum(held.prompt_len + step - held.began_at - 1 for held in running)
        final = sum(held.prompt_len + held.output_len - 1 for held in running)
        for place, amount in enumerate((tokens, final - tokens, num_asked - final, NUM_SLOTS - num_asked)):
            sums[place] += amount
        for held in running:
            if step - held.began_at == held.output_len:
                buddies.free(held.chunk)
        running = [held for held in running if step - held.began_at < held.output_len]
    return Shares(*(each / sum(sums) for each in sums))


BASELINES: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "contiguous, max": ("20.4", lambda prompt, output: MAX_LEN),
    "contiguous, pow2": ("26.8", lambda prompt, output: min(MAX_LEN, prompt + (1 << (output - 1).bit_length()))),
    "contiguous, oracle": ("38.2", lambda prompt, output: prompt + output),
}
"""What the paper calls Orca (Max), (Pow2) and (Oracle), with the per cent of tokens that its figure 2 shows."""


# ---- tables ----


def workload(data_set: DataSet, num_requests: int, spread: float, *, width: int = 1, beam: bool = False) -> Workload:
    return Workload(
        arrivals="at-once",
        # as many tokens of either data set
        num_requests=round(num_requests * 500 / (data_set.input_len + data_set.output_len)),
        input_len=data_set.input_len,
        output_len=data_set.output_len,
        length_spread=spread,
        max_len=MAX_LEN,
        n=width,
        use_beam_search=beam,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300, help="of 500 tokens on average; a third of it for sharing")
    parser.add_argument("--spread", type=float, default=0.8, help="standard deviation of the logarithm of lengths")
    parser.add_argument("--candidates", type=float, nargs="+", default=[0.5, 0.15], help="how flat beams' choices are")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    figures: dict[str, object] = {}
    print("Share of the KV cache while requests wait, % (paper: figure 2)\n")
    print(f"{'':10}{'':20}{'tokens':>9}{'reserved':>10}{'internal':>10}{'external':>10}{'tokens in the paper':>22}")
    for name, data_set in DATA_SETS.items():
        requests = generate(workload(data_set, args.requests, args.spread), args.seed)
        rows = {label: (paper, contiguous_shares(requests, slots)) for label, (paper, slots) in BASELINES.items()}
        rows["paged"] = ("96.3", paged_shares(requests))
        for label, (paper, shares) in rows.items():
            values = "".join(f"{100 * value:{9 if place == 0 else 10}.1f}" for place, value in enumerate(shares))
            print(f"{name:10}{label:20}{values}{paper if name == 'ShareGPT' else '':>22}")
            figures[f"{name} {label}"] = shares._asdict()
        paged = rows["paged"][1]
        waste = paged.internal / (paged.tokens + paged.internal)
        print(f"{name:10}waste within blocks that are in use: {waste:.1%} (paper: under 4%)\n")
        figures[f"{name} waste"] = waste
    print("Blocks saved by sharing, % (paper: figure 15)\n")
    print(f"{'':10}{'':38}" + "".join(f"{f'width {width}':>9}" for width in WIDTHS) + f"{'paper, 2 to 6':>18}")
    for name, data_set in DATA_SETS.items():

        def row(label: str, paper: str, spread: float, *, beam: bool) -> None:
            saved = []
            for width in WIDTHS:
                made = workload(data_set, args.requests // 3, args.spread, width=width, beam=beam)  # noqa: B023
                saved.append(saving(generate(made, args.seed), spread))
            shown = "".join(f"{100 * value:9.1f}" for value in saved)
            print(f"{name:10}{label:38}{shown}{paper:>18}")  # noqa: B023
            figures[f"{name} {label}"] = saved  # noqa: B023

        row("parallel sampling", data_set.parallel, 0.5, beam=False)
        for spread in args.candidates:
            row(f"beam search, likeliest token {1 / (1 + spread):.0%}", data_set.beam, spread, beam=True)
    report("paged_attention_paper", {"arguments": vars(args)}, figures)


if __name__ == "__main__":
    main()
