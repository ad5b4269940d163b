"""KV blocks of a GPU to and from other engines: behind the steps that were launched, with the bits of one engine."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from octavo.core.model_shape import CacheGroup, KeysAndValues
from octavo.devices import DEVICES
from octavo.devices.cuda.swaps import done_behind
from octavo.worker.transfer.block_io import BlockIO, Place
from tests.devices.cuda.apart import ApartMode, open_apart
from tests.devices.cuda.interpreted import NAME, InterpretedCuda
from tests.devices.cuda.streams import HostStream, LateStream
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.families import ALTERNATING
from tests.worker.transfer import test_exactness
from tests.worker.transfer.test_exactness import ONE, Engine, handed_over, one_engine


def test_blocks_are_read_and_written_behind_what_was_launched() -> None:
    compute = LateStream()
    cache, seen = torch.zeros(2, 3, 1, 2, 4), torch.zeros(2, 3, 1, 2, 4)
    group = CacheGroup((0,), KeysAndValues(1, 4))
    blocks = BlockIO([cache], [group], [range(1)], range(1), partial(done_behind, compute, HostStream()))
    compute.run(lambda: cache.fill_(1.0))
    content = blocks.read(Place(0, 0), [2], range(1))
    assert content.view(torch.float32).eq(1.0).all()
    compute.run(lambda: seen.copy_(cache))
    blocks.write(Place(0, 0), [1], range(1), torch.zeros_like(content))
    assert seen.eq(1.0).all()
    assert cache[:, :, 0, 0, 0].tolist() == [[1.0, 0.0, 1.0]] * 2


def test_content_is_in_the_memory_of_the_host() -> None:
    there = open_apart()
    group = CacheGroup((0,), KeysAndValues(1, 4))
    with ApartMode():
        caches = [torch.arange(48.0).view(2, 3, 1, 2, 4).to(there), torch.zeros(2, 3, 1, 2, 4, device=there)]
        ours, theirs = (BlockIO([cache], [group], [range(1)], range(1)) for cache in caches)
        content = ours.read(Place(0, 0), [2, 0], range(1))
        assert content.view(torch.float32).numpy()[:, :, 0, 0].tolist() == [[16.0, 0.0], [40.0, 24.0]]
        theirs.write(Place(0, 0), [1, 2], range(1), content)
        assert torch.equal(caches[1][:, 1:].cpu(), caches[0][:, [2, 0]].cpu())


@pytest.mark.parametrize(
    ("cache_dtype", "chunks"), [("auto", [20, 25]), pytest.param("int8", [44, 1], marks=pytest.mark.long)]
)
def test_what_is_fetched_gives_the_bits_of_one_engine(
    cache_dtype: str, chunks: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DEVICES, "cuda", NAME)
    monkeypatch.setattr(test_exactness, "NUM_DECODED", 1)
    path = make_checkpoint("qwen3", tmp_path / "model", **ALTERNATING)
    arguments: dict[str, Any] = {"device": "cuda", "batch_invariant": True, "kv_cache_dtype": cache_dtype}
    with ExitStack() as stack:
        engines = [Engine(path, *ONE, arguments) for _ in range(3)]
        for engine in engines:
            stack.callback(engine.executor.shutdown)
        alone, prefill, decode = engines
        assert isinstance(decode.executor.workers[0]._device, InterpretedCuda)
        # layers that are launched have computed nothing: blocks are sent at the end of a step
        assert not prefill.executor.workers[0]._transfer._layers
        assert handed_over(prefill, decode, str(tmp_path), chunks) == one_engine(alone)
