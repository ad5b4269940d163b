"""The memory tables of the PagedAttention paper from our own scheduler: `python -m benchmarks.paged_attention_paper`.

Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention",
https://arxiv.org/abs/2309.06180: what fills the KV cache (figure 2), how many requests fit into it (figure 13), what
blocks of other sizes waste (section 7.2), and the blocks that parallel sampling and beam search save by sharing (figure
15, section 6.3). The scheduler and the block manager are those that serve; the device is simulated, which memory does
not notice. Lengths are log-normal with the means of the paper's data sets. As in the paper's runs a request has one
output length, which all its sequences have.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from octavo.cli.report import report
from octavo.config.schema import CacheConfig, SchedulerConfig
from octavo.core.cache_limits import CacheLimits
from octavo.scheduler.build import SchedulerSettings
from octavo.simulate.presets import preset
from octavo.simulate.replica import SimulatedReplica
from octavo.simulate.traces import Trace, TraceRequest, Workload, generate

BLOCK_SIZE = 16
BLOCK_SIZES = (4, 8, 16, 32)
NUM_SLOTS = 15_700
"""Tokens that the cache holds for OPT-13B on an A100 with 40 GB (the paper's table 1)."""
MAX_LEN = 2048
WIDTHS = (2, 4, 6)


class DataSet(NamedTuple):
    """Mean lengths (the paper's figure 11), and what it reports: savings in per cent for `WIDTHS` (of ShareGPT only the
    ends, in its text), and requests in a batch by system (figure 13)."""

    input_len: float
    output_len: float
    parallel: tuple[str, str, str]
    beam: tuple[str, str, str]
    batched: dict[str, str]


DATA_SETS = {
    "ShareGPT": DataSet(
        161.31,
        337.99,
        ("16.2", "", "30.5"),
        ("44.3", "", "66.3"),
        {"max": "7.00", "pow2": "9.81", "oracle": "13.62", "paged": "30.42"},
    ),
    "Alpaca": DataSet(
        19.31,
        58.45,
        ("6.09", "8.53", "9.79"),
        ("37.56", "53.13", "55.16"),
        {"max": "7.00", "pow2": "43.24", "oracle": "72.75", "paged": "132.44"},
    ),
}
FIGURE_2 = {
    "max": ("20.4", "13.3", "57.3", "8.9"),
    "pow2": ("26.8", "17.9", "13.6", "41.6"),
    "oracle": ("38.2", "25.2", "", "36.6"),
    "paged": ("96.3", "", "", ""),
}
"""Per cent of token states, reservation, internal fragmentation, external fragmentation and others."""


NOTES = """\
Where ours differ, and why:
- Figure 2 does not say whose lengths it shows; ours agree with it for ShareGPT's. Half a block is lost at the end of
  each sequence: of blocks of 16 that is 2 % of ShareGPT's sequences and 9 % of Alpaca's, which hold 75 tokens on
  average.
- Figure 13 averages over an experiment at 2 and 30 requests a second; ours counts the steps with a queue, so more run.
- Only mean lengths are published. The spread of ours (--spread) decides how long those run that take most of the
  memory: the wider, the less of it is prompt that can be shared.
- Where beams part is a property of a model. Ours is a stand-in with two settings (--candidates), and all published
  figures lie between them."""


class Shares(NamedTuple):
    """Of all slots of the cache, the mean over steps with a queue. The first four add up to 1.

    tokens: keys and values. reserved: for tokens to come. internal: given to a request that will never fill them.
    external: given to nobody. num_running: requests that run.
    """

    tokens: float
    reserved: float
    internal: float
    external: float
    num_running: float

    @property
    def waste(self) -> float:
        """Of what is given out."""
        return self.internal / (self.internal + self.tokens)


class Saving(NamedTuple):
    """Blocks saved by sharing, as a share of those that the same tables would need without: over all steps of a cache
    in which nobody has to wait, and over the steps with a queue of the paper's cache."""

    unbound: float
    bound: float


# ---- paged: the scheduler that serves ----


def make_replica(candidate_spread: float, num_slots: int, block_size: int) -> SimulatedReplica:
    """An engine with the paper's cache. Without prefix caching, which the paper's system did not have, and with a
    budget of tokens that never binds: memory alone decides who runs."""
    settings = SchedulerSettings(
        cache=CacheConfig(dtype="float16", block_size=block_size, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=1 << 16, max_num_batched_tokens=1 << 24, max_model_len=MAX_LEN),
        limits=CacheLimits.of_one_group(num_slots // block_size, block_size),
    )
    return SimulatedReplica(0, settings, preset("a100-40g/opt-13b"), candidate_spread=candidate_spread)


def run(requests: Sequence[TraceRequest], replica: SimulatedReplica, after_step: Callable[[], None]) -> None:
    """Hand everything in at once, and look after every step."""
    trace = Trace(requests)
    for number in range(len(trace)):
        replica.submit(*trace.request(number, 0.0))
    now = 0.0
    while (ends_at := replica.begin_step(now)) is not None:
        after_step()
        for output in replica.end_step():
            assert output.error is None, output.error
        now = ends_at


def paged_shares(requests: Sequence[TraceRequest], block_size: int = BLOCK_SIZE) -> Shares:
    """How the blocks are used while requests wait for memory. Nothing is reserved; internal is the end of each last
    block."""
    replica = make_replica(0.5, NUM_SLOTS, block_size)
    scheduler = replica.scheduler
    num_steps = tokens = given = running = 0

    def after_step() -> None:
        nonlocal num_steps, tokens, given, running
        if replica.sample(0.0).num_waiting:
            num_steps += 1
            tokens += sum(sequence.num_computed_tokens for group in scheduler.running for sequence in group.live)
            given += scheduler.block_manager.num_used_blocks * block_size
            running += len(scheduler.running)

    run(requests, replica, after_step)
    available = num_steps * NUM_SLOTS
    return Shares(tokens / available, 0.0, (given - tokens) / available, 1 - given / available, running / num_steps)


def saving(requests: Sequence[TraceRequest], candidate_spread: float = 0.5, num_slots: int = NUM_SLOTS) -> Saving:
    """What sharing saves, with room for all requests and in a cache of `num_slots`."""
    room = sum((request.prompt_len + request.output_len + 2 * BLOCK_SIZE) * request.width for request in requests)
    return Saving(
        _saving(requests, candidate_spread, 2 * room), _saving(requests, candidate_spread, num_slots, with_queue=True)
    )


def _saving(
    requests: Sequence[TraceRequest], candidate_spread: float, num_slots: int, *, with_queue: bool = False
) -> float:
    replica = make_replica(candidate_spread, num_slots, BLOCK_SIZE)
    scheduler, manager = replica.scheduler, replica.scheduler.block_manager
    shared = total = 0

    def after_step() -> None:
        nonlocal shared, total
        if with_queue and not replica.sample(0.0).num_waiting:
            return
        entries = sum(
            len(manager.block_ids(sequence)[0])
            for group in scheduler.running
            for sequence in (group.live if group.refork_at is None else group.live[:1])
        )
        total += entries
        shared += entries - manager.num_used_blocks

    run(requests, replica, after_step)
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
    num_running = 0
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
        num_running += len(running)
        num_asked = sum(held.asked for held in running)
        tokens = sum(held.prompt_len + step - held.began_at - 1 for held in running)
        final = sum(held.prompt_len + held.output_len - 1 for held in running)
        for place, amount in enumerate((tokens, final - tokens, num_asked - final, NUM_SLOTS - num_asked)):
            sums[place] += amount
        for held in running:
            if step - held.began_at == held.output_len:
                buddies.free(held.chunk)
        running = [held for held in running if step - held.began_at < held.output_len]
    return Shares(*(each / sum(sums) for each in sums), num_running / step)


BASELINES: dict[str, Callable[[int, int], int]] = {
    "max": lambda prompt, output: MAX_LEN,
    "pow2": lambda prompt, output: min(MAX_LEN, prompt + (1 << (output - 1).bit_length())),
    "oracle": lambda prompt, output: prompt + output,
}
"""What the paper calls Orca (Max), (Pow2) and (Oracle)."""


# ---- tables ----


def make_requests(data_set: DataSet, num_requests: int, spread: float, seed: int = 0) -> list[TraceRequest]:
    """As many tokens of either data set: `num_requests` of 500 on average."""
    workload = Workload(
        arrivals="at-once",
        num_requests=round(num_requests * 500 / (data_set.input_len + data_set.output_len)),
        input_len=data_set.input_len,
        output_len=data_set.output_len,
        length_spread=spread,
        max_len=MAX_LEN,
    )
    return generate(workload, seed)


def widened(requests: Sequence[TraceRequest], width: int, *, beam: bool) -> list[TraceRequest]:
    """The same requests with `width` sequences each, all as long as the one was."""
    return [msgspec.structs.replace(request, n=width, use_beam_search=beam) for request in requests]


def print_shares(name: str, rows: dict[str, Shares]) -> None:
    """Figures 2 and 13 beside ours; figure 2 does not say whose lengths it shows, ours agree with it for ShareGPT's."""
    batched = DATA_SETS[name].batched
    for label, shares in rows.items():
        ours = "".join(f"{100 * value:10.1f}" for value in shares[:4])
        print(f"{name:10}{label:10}{'octavo' if label == 'paged' else 'ours':8}{ours}{shares.num_running:12.1f}")
        paper = "".join(f"{value:>10}" for value in (FIGURE_2[label] if name == "ShareGPT" else ("",) * 4))
        print(f"{'':20}{'paper':8}{paper}{batched[label]:>12}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300, help="of 500 tokens on average; a third for beams")
    parser.add_argument("--spread", type=float, default=0.9, help="standard deviation of the logarithm of lengths")
    parser.add_argument("--candidates", type=float, nargs="+", default=[0.5, 0.15], help="how flat beams' choices are")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    figures: dict[str, object] = {}

    print("What fills the KV cache while requests wait, %, and how many run\n")
    print(f"{'':28}{'tokens':>10}{'reserved':>10}{'internal':>10}{'external':>10}{'running':>12}")
    for name, data_set in DATA_SETS.items():
        requests = make_requests(data_set, args.requests, args.spread, args.seed)
        rows = {label: contiguous_shares(requests, slots) for label, slots in BASELINES.items()}
        rows["paged"] = paged_shares(requests)
        print_shares(name, rows)
        figures |= {f"{name} {label}": shares._asdict() for label, shares in rows.items()}

    print("\nWasted within blocks that are in use, % (paper: 3.7 of the whole cache; its announcement: under 4)\n")
    print(f"{'':28}" + "".join(f"{f'blocks of {size}':>14}" for size in BLOCK_SIZES))
    for name, data_set in DATA_SETS.items():
        requests = make_requests(data_set, args.requests, args.spread, args.seed)
        wastes = [paged_shares(requests, size).waste for size in BLOCK_SIZES]
        print(f"{name:28}" + "".join(f"{100 * waste:14.1f}" for waste in wastes))
        figures[f"{name} waste"] = dict(zip(map(str, BLOCK_SIZES), wastes, strict=True))

    print("\nBlocks saved by sharing, %: without a queue (in brackets: while requests wait)\n")
    print(f"{'':44}" + "".join(f"{f'width {width}':>16}" for width in WIDTHS))
    for name, data_set in DATA_SETS.items():
        kinds = [("parallel sampling", False, 0.5)]
        kinds += [(f"beam search, likeliest {1 / (1 + spread):.0%}", True, spread) for spread in args.candidates]
        for label, beam, spread in kinds:
            num_requests = args.requests // 3 if beam else args.requests
            requests = make_requests(data_set, num_requests, args.spread, args.seed)
            savings = [saving(widened(requests, width, beam=beam), spread) for width in WIDTHS]
            ours = "".join(f"{f'{100 * each.unbound:.1f} ({100 * each.bound:.1f})':>16}" for each in savings)
            print(f"{name:10}{label:34}{ours}", flush=True)
            figures[f"{name} {label}"] = [each._asdict() for each in savings]
            if (label, beam, spread) == kinds[0] or (label, beam, spread) == kinds[-1]:
                paper = data_set.beam if beam else data_set.parallel
                print(f"{'':10}{'  paper':34}" + "".join(f"{value:>16}" for value in paper))
    print(f"\n{NOTES}")
    report("paged_attention_paper", {"arguments": vars(args)}, figures)


if __name__ == "__main__":
    main()
