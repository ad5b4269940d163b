"""One engine inserts the KV of a prompt and its last hidden state, another takes them and goes on, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from octavo.attention.metadata import ModelInput
from octavo.builtin import model_directory
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import TokenLogprobs
from octavo.devices.device import LanguageModel
from octavo.pipes.lookup_buffer import LookupBuffer, LookupServer, RemoteLookupBuffer
from octavo.pipes.pipe import Listener, connect
from octavo.worker.transfer.block_io import BlockIO
from octavo.worker.worker import Worker
from tests.conformance.runtimes import LEVELS
from tests.pipes.ends import SECRET, fresh_address
from tests.worker.engine_config import make_config, start_worker
from tests.worker.prefix_model import new_sequence, row, step

PROMPT = [(37 * i) % 400 + 3 for i in range(45)]
"""Two full blocks and one that is partly filled."""
PARAMS = SamplingParams(temperature=0.8, seed=11, logprobs=2, presence_penalty=0.4, max_tokens=12, ignore_eos=True)
NUM_TOKENS = 12


class KeepsHidden:
    """A model whose last hidden states are kept."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.hidden = torch.empty(0)

    def __call__(self, batch: ModelInput) -> Tensor:
        return self._model(batch)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        self.hidden = hidden.clone()
        return self._model.compute_logits(hidden)


class GivenHidden(KeepsHidden):
    """A model that computes nothing but logits, of a hidden state that it was given."""

    def __init__(self, model: LanguageModel, hidden: Tensor) -> None:
        super().__init__(model)
        self._given = hidden

    def __call__(self, batch: ModelInput) -> Tensor:
        return self._given


@pytest.fixture(params=["cpu", "reference"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu" and not LEVELS:
        pytest.skip("needs the compiled kernels")
    return str(request.param)


@pytest.fixture(params=["bfloat16", "float32"])
def engines(request: pytest.FixtureRequest, device: str) -> Iterator[tuple[Worker, Worker]]:
    options = {"device": device, "dtype": request.param, "num_gpu_blocks_override": 16, "block_size": 16}
    workers = [start_worker(make_config(model_directory(), threads=1, **options)) for _ in range(2)]
    yield workers[0], workers[1]
    for worker in workers:
        worker.shutdown()


def blocks_of(worker: Worker) -> BlockIO:
    shape = worker._parts.opened.shape
    return BlockIO(
        worker._runner.cache.caches, shape.cache_groups, [range(shape.num_kv_heads)], range(shape.num_layers)
    )


def prefill(worker: Worker, block_ids: list[int]) -> tuple[TokenLogprobs, Tensor]:
    """The first token, and the hidden state that it was drawn from."""
    model = worker._runner.model = KeepsHidden(worker._runner.model)
    new = new_sequence(1, PROMPT, block_ids, params=PARAMS)
    output = worker.submit(step([new], [row(1, 0, len(PROMPT))])).result()
    return output.rows[0].tokens[0], model.hidden


def decode(worker: Worker, seq_id: int) -> list[TokenLogprobs]:
    """The tokens after the first."""
    outputs = [worker.submit(step(rows=[row(seq_id, len(PROMPT) + i, 1)])).result() for i in range(NUM_TOKENS - 1)]
    return [output.rows[0].tokens[0] for output in outputs]


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_the_decode_engine_draws_what_the_prefill_engine_would(engines: tuple[Worker, Worker], scheme: str) -> None:
    producer, consumer = engines
    listener = Listener(fresh_address(scheme), SECRET)
    server = LookupServer(LookupBuffer(1 << 26), listener)
    inserting, taking = (RemoteLookupBuffer(connect(listener.address, SECRET)) for _ in range(2))

    first, hidden = prefill(producer, [4, 9, 2])
    blocks = blocks_of(producer)
    read = torch.stack([blocks.read(place, [4, 9, 2], blocks.heads[0]) for place in blocks.places])
    # [layers, planes, blocks, heads, bytes]: keys and values have a plane each, or share one
    values = read[:, 1] if read.shape[1] == 2 else None
    assert inserting.insert(torch.tensor(PROMPT), None, read[:, 0], values, hidden)

    found = taking.drop_select(torch.tensor(PROMPT), None)
    assert found is not None
    assert found.keys is not None
    assert found.hidden is not None
    planes = [found.keys] if found.values is None else [found.keys, found.values]
    contents = torch.stack(planes, 1)
    blocks = blocks_of(consumer)
    for place in blocks.places:
        blocks.write(place, [3, 7, 11], blocks.heads[0], contents[place.layer])
    runner = consumer._runner
    computing, runner.model = runner.model, GivenHidden(runner.model, found.hidden)
    new = new_sequence(5, PROMPT, [3, 7, 11], params=PARAMS)
    drawn = consumer.submit(step([new], [row(5, len(PROMPT) - 1, 1)])).result().rows[0].tokens
    runner.model = computing

    assert drawn == [first]
    assert decode(consumer, 5) == decode(producer, 1)
    for each in (inserting, taking, server):
        each.close()
