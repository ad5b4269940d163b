"""Adapters in a worker: steps that are recorded compute with whatever adapters their rows have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.core.step import ModelRunnerOutput
from octavo.worker.worker import Worker
from tests.conformance.runtimes import LEVELS
from tests.fakes.checkpoints import make_checkpoint
from tests.lora.adapter_folders import LINEAR, digest, make_adapter
from tests.worker.engine_config import make_config, start_worker
from tests.worker.prefix_model import new_sequence, row, step

pytestmark = pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")

PARAMS = SamplingParams(temperature=0.0, max_tokens=30, logprobs=3)
LORA = {"enable_lora": True, "max_loras": 3}


def load(worker: Worker, slot: int, folder: Path) -> None:
    while (state := worker.call("read_adapter", str(folder), digest(folder))[0]) is None:
        pass
    assert state == ""
    worker.call("load_adapter", slot, digest(folder))


def decode(worker: Worker, adapters: Sequence[int], first: int = 0, count: int = 6) -> list[ModelRunnerOutput]:
    """Two sequences with these adapters, their prompts in one step, then one token each in `count` steps."""
    ids = [first, first + 1]
    new = [
        new_sequence(i, [5, 17, 99, 3 + place], [2 * place + 1, 2 * place + 2], params=PARAMS, adapter=adapter)
        for place, (i, adapter) in enumerate(zip(ids, adapters, strict=True))
    ]
    outputs = [worker.submit(step(new, [row(i, 0, 4) for i in ids])).result()]
    return outputs + [worker.submit(step(rows=[row(i, 4 + n, 1) for i in ids])).result() for n in range(count)]


def test_recorded_steps_compute_with_the_adapters_of_their_rows(tmp_path: Path) -> None:
    base = make_checkpoint("qwen3", tmp_path / "base")
    folders = [make_adapter(base, tmp_path / "a"), make_adapter(base, tmp_path / "b", LINEAR, rank=5, seed=2)]
    recorded, eager = (start_worker(make_config(base, enforce_eager=is_eager, **LORA)) for is_eager in (False, True))
    mixes = [(0, 0), (1, 0), (1, 1), (1, 3), (3, 3), (0, 1), (0, 0), (2, 1)]
    for worker in (recorded, eager):
        load(worker, 1, folders[0])
    found = {}
    for number, mix in enumerate(mixes):
        if number == 3:  # layers that had no adapter have one from here on
            for worker in (recorded, eager):
                load(worker, 3, folders[1])
        if number == 7:
            for worker in (recorded, eager):
                load(worker, 2, folders[1])
        found[mix] = [each.rows for each in decode(recorded, mix, 2 * number)]
        assert found[mix] == [each.rows for each in decode(eager, mix, 2 * number)], mix
    assert len({str(each) for each in found.values()}) == len(found)
    kept = recorded._runner.model._adapted._recordings.values()
    assert sum(each is not None for each in kept) == 2, "prompts and decode steps have one each, for every mix"


def test_the_plan_counts_adapters_and_a_worker_without_them_has_none(tmp_path: Path) -> None:
    base = make_checkpoint("qwen3", tmp_path / "base")
    plain, with_adapters = (Worker(make_config(base, **options)).prepare() for options in ({}, LORA))
    assert with_adapters.weights_bytes > plain.weights_bytes
    worker = start_worker(make_config(base))
    assert worker._loaded.adapters is None
    assert type(worker._runner.model).__name__ != "AdaptedModel"
