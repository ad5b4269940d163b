"""What ranks do in the tests of collectives: functions of a mesh, which processes find by name."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from typing import Any

import torch
from torch import Tensor

from octavo.distributed.mesh import Mesh
from octavo.errors import EngineDeadError

SHAPES = ((), (5,), (1, 3), (7, 33), (2, 3, 5), (2, 70_001), (100, 1024))
"""The largest do not fit into a buffer of shared memory, in a row and in many."""

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers that every rank can make for all others."""
    source = torch.Generator().manual_seed(100 * rank + len(shape))
    numbers = torch.randn(shape, generator=source) * 10
    return numbers.abs().to(dtype) if dtype == torch.uint8 else numbers.to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.numpy(force=True).tobytes() == b.numpy(force=True).tobytes()


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def _expect(given: Tensor, expected: Tensor, what: Any) -> None:
    assert same(_bits(given), _bits(expected)), what


def gathers(mesh: Mesh) -> None:
    size, rank = mesh.tensor.size, mesh.tensor.rank
    for shape in SHAPES[1:]:
        for dtype in TYPES:
            shares = [values(each, shape, dtype) for each in range(size)]
            _expect(mesh.gather(shares[rank]), torch.cat(shares, -1), (shape, dtype))
    # the columns of a wider tensor
    wide = [values(each, (6, 40), torch.float32) for each in range(size)]
    _expect(mesh.gather(wide[rank][:, 8:16]), torch.cat([each[:, 8:16] for each in wide], -1), "columns")
    _expect(mesh.gather(wide[rank].t()), torch.cat([each.t() for each in wide], -1), "transposed")


def sums(mesh: Mesh) -> None:
    for shape in SHAPES:
        for dtype in TYPES[:3]:
            partials = [values(each, shape, dtype) for each in range(mesh.tensor.size)]
            expected = partials[0].float()
            for each in partials[1:]:
                expected = expected + each.float()
            _expect(mesh.sum(partials[mesh.tensor.rank].clone()), expected.to(dtype), (shape, dtype))


def broadcasts(mesh: Mesh) -> None:
    for source in range(mesh.tensor.size):
        for shape in SHAPES:
            for dtype in TYPES[1::2]:
                tensor = values(mesh.tensor.rank, shape, dtype)
                mesh.broadcast(tensor, source)
                _expect(tensor, values(source, shape, dtype), (source, shape, dtype))


def computes(mesh: Mesh) -> None:
    """All that ranks compute together, in one group: to open it takes longer than the calls."""
    for work in (gathers, sums, broadcasts):
        work(mesh)


def sends(mesh: Mesh) -> None:
    """Each stage sends to the next before it receives, two tensors at once."""
    stages, stage = mesh.pipeline.size, mesh.pipeline.rank
    before, after = (stage - 1) % stages, (stage + 1) % stages
    for shape in SHAPES:
        for dtype in TYPES:
            mesh.send(values(stage, shape, dtype), after)
            mesh.send(values(stage, shape, dtype).add_(1), after)
            for added in (0, 1):
                received = torch.zeros(shape, dtype=dtype)
                mesh.receive(received, before)
                _expect(received, values(before, shape, dtype).add_(added), (shape, dtype))


def rows_at_other_places(mesh: Mesh) -> None:
    """A row's sum has the same bits alone, behind others, and in a larger tensor."""
    rows = torch.randn(64, 96, generator=torch.Generator().manual_seed(mesh.tensor.rank))
    for dtype in TYPES[:3]:
        alone = mesh.sum(rows.to(dtype).clone())
        for offset, count in ((0, 1), (0, 3), (1, 7), (1000, 64)):
            around = torch.randn(offset + count + 5, 96).to(dtype)
            around[offset : offset + count] = rows[:count].to(dtype)
            _expect(mesh.sum(around)[offset : offset + count].contiguous(), alone[:count].contiguous(), (offset, dtype))


def misses_rank_1(mesh: Mesh) -> None:
    mesh.gather(torch.ones(1))
    if mesh.tensor.rank != 1:
        mesh.gather(torch.ones(1))
    else:
        # its connections stay open beyond the deadline
        time.sleep(2)


def poisoned(mesh: Mesh) -> None:
    if mesh.tensor.rank == 1:
        time.sleep(0.4)
    else:
        timer = threading.Timer(0.1, mesh.poison, ("a rank is gone",))
        timer.start()
    try:
        mesh.gather(torch.ones(1))
    except EngineDeadError:
        mesh.check()
        raise AssertionError("a group that has failed passes its check") from None


def kills_rank_1(mesh: Mesh) -> None:
    """Each rank watches over the processes of the others, as an executor does."""
    pids = mesh.gather(torch.tensor([os.getpid()]))
    if mesh.tensor.rank == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)

    def watch() -> None:
        descriptor = os.pidfd_open(int(pids[1]))
        select.select([descriptor], [], [], 20)
        os.close(descriptor)
        mesh.poison("rank 1 was killed")

    threading.Thread(target=watch).start()
    mesh.gather(torch.ones(1))


def differs(mesh: Mesh) -> None:
    x = torch.ones(4)
    if mesh.tensor.rank == 0:
        mesh.gather(x)
    else:
        mesh.sum(x)
