"""A prompt that one engine computes and another one fetches is continued with the bits of one engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest

from octavo.core.process import frames
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import NewSequence, RowOutput, ScheduledSequence
from octavo.devices.cpu.recorded_model import RecordedModel
from octavo.kv_transfer.messages import FetchBlocks, PeerRank, RankCommands, RankNotes, SendBlocks
from tests.distributed.threads import thread_meshes
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.families import ALTERNATING
from tests.fakes.rank_threads import ThreadRanks
from tests.worker.engine_config import make_config
from tests.worker.prefix_model import row, step

PROMPT = [7 * position % 101 + 3 for position in range(45)]
PARAMS = SamplingParams(temperature=0.8, seed=5, logprobs=3, max_tokens=10)
NUM_DECODED = 9
SECRET, EPOCH, TRANSFER = "ab" * 32, "cd" * 16, b"t" * 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has layers with a window of 7 tokens, and layers that see all."""
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("transfer") / "model", **ALTERNATING)


class Engine:
    """The ranks of a model, without a scheduler, and one sequence in them."""

    def __init__(self, path: Path, tensor: int, pipeline: int, arguments: dict[str, Any]) -> None:
        self.notes: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
        config = make_config(path, num_gpu_blocks_override=64, block_size=16, threads=1, **sizes, **arguments)
        self.executor = ThreadRanks(config, thread_meshes(tensor, pipeline), lambda *note: self.notes.put(note))
        plan = self.executor.call("prepare")[0]
        self.num_groups = len(plan.cache.groups)
        self.executor.call("load", plan.max_model_len, [0] * self.num_groups)
        self.executor.call("allocate", [16] * self.num_groups, [0] * self.num_groups)

    def open(self, host: str) -> list[PeerRank]:
        return self.executor.call("open_transfer", host, SECRET, EPOCH)

    def run(
        self, new: Sequence[NewSequence] = (), rows: Sequence[ScheduledSequence] = (), **commands: Any
    ) -> list[RowOutput]:
        payload = frames.encode(RankCommands(**commands)) if commands else None
        whole = msgspec.structs.replace(step(new, rows), connector=payload)
        return self.executor.submit(whole).result().rows

    def sequence(self, tables: list[list[int]]) -> NewSequence:
        return NewSequence(
            seq_id=1,
            index=0,
            epoch=0,
            token_ids=PROMPT,
            num_prompt_tokens=len(PROMPT),
            block_tables=tables,
            params=PARAMS,
        )

    def decode(self, first: RowOutput) -> list[RowOutput]:
        """Return the results from the first drawn token on."""
        outputs = [first]
        for position in range(len(PROMPT), len(PROMPT) + NUM_DECODED):
            last = outputs[-1].tokens[0].token_id
            token_ids = (last,) if self.executor.sends_tokens else ()
            outputs += self.run(rows=[row(1, position, 1, token_ids=token_ids)])
        return outputs


def one_engine(engine: Engine, chunks: Sequence[int] = (len(PROMPT),)) -> list[RowOutput]:
    new, start, outputs = [engine.sequence([[4, 5, 6, 7]] * engine.num_groups)], 0, []
    for chunk in chunks:
        outputs = engine.run(new, [row(1, start, chunk, int(start + chunk == len(PROMPT)))])
        new, start = [], start + chunk
    return engine.decode(outputs[0])


def handed_over(prefill: Engine, decode: Engine, host: str, chunks: Sequence[int]) -> list[RowOutput]:
    """Compute the prompt in chunks on one engine; fetch it, compute its last token and decode on the other."""
    peers = prefill.open(host)
    decode.open("")
    tables = [[9 - group, 2, 14, 11] for group in range(prefill.num_groups)]
    # of the first group, whose layers have a window, only the last two blocks are needed
    ours = [[0, 12, 1, 2], [3, 8, 5, 6]]
    fetch = FetchBlocks(1, TRANSFER, 0, [table[:3] for table in ours], peers, bytes.fromhex(EPOCH))
    decode.run(fetches=[fetch])
    new, start, num_sent = [prefill.sequence(tables)], 0, 0
    for chunk in chunks:
        end = start + chunk
        num_there = 3 if end == len(PROMPT) else end // 16
        sends = SendBlocks(TRANSFER, num_sent, [table[num_sent:num_there] for table in tables], is_fresh=True)
        num_samples = int(end == len(PROMPT))
        prefill.run(new, [row(1, start, chunk, num_samples)], sends=[sends] if num_there > num_sent else [])
        new, start, num_sent = [], end, num_there
    for _ in decode.executor.workers:
        (fetched,) = msgspec.msgpack.decode(decode.notes.get(timeout=200)[1], type=RankNotes).fetched
        assert not fetched.error
    for worker in prefill.executor.workers:  # what is there now came over the network
        for cache in worker._runner.cache.caches:
            cache.zero_()
    (first,) = decode.run([decode.sequence(ours)], [row(1, len(PROMPT) - 1, 1)])
    return decode.decode(first)


ONE, TWO = (1, 1), (2, 1)
CASES = {
    "1 to 1": (ONE, ONE, {}),
    "1 to TP 2": (ONE, TWO, {}),
    "TP 2 to 1": (TWO, ONE, {}),
    "PP 2 to 1": ((1, 2), ONE, {}),
    "TP 2 x PP 2 to 1": ((2, 2), ONE, {}),
    "1 to TP 2 x PP 2": (ONE, (2, 2), {}),
    "bfloat16": (ONE, TWO, {"dtype": "bfloat16"}),
    "int8": (TWO, ONE, {"kv_cache_dtype": "int8"}),
    "fp8": (TWO, ONE, {"kv_cache_dtype": "fp8", "dtype": "bfloat16"}),
    "reference": (ONE, ONE, {"device": "reference"}),
    "reference, int8": (ONE, ONE, {"device": "reference", "kv_cache_dtype": "int8"}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_fetched_gives_the_bits_of_one_engine(case: str, checkpoint: Path, tmp_path: Path) -> None:
    giving, fetching, arguments = CASES[case]
    with ExitStack() as stack:
        engines = [Engine(checkpoint, *sizes, arguments) for sizes in (ONE, giving, fetching)]
        for engine in engines:
            stack.callback(engine.executor.shutdown)
        alone, prefill, decode = engines
        host = str(tmp_path) if giving == ONE else "127.0.0.1"
        if alone.executor.workers[0]._device.name == "reference":
            # its products depend on how a prompt is cut
            same = 20, 24, 1
            assert handed_over(prefill, decode, host, same) == one_engine(alone, same)
        else:
            assert handed_over(prefill, decode, host, [20, 25]) == one_engine(alone)


def test_steps_that_are_recorded_send_what_they_compute(checkpoint: Path) -> None:
    with ExitStack() as stack:
        engines = [Engine(checkpoint, *ONE, {}) for _ in range(3)]
        for engine in engines:
            stack.callback(engine.executor.shutdown)
        alone, prefill, decode = engines
        outputs = handed_over(prefill, decode, "127.0.0.1", [5] * 9)
        model = prefill.executor.workers[0]._runner.model
        if isinstance(model, RecordedModel):  # of the device with compiled kernels
            assert any(model._recordings.values())
        assert outputs == one_engine(alone, [5] * 8 + [4, 1])
