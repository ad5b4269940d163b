"""Fetches between ranks of two engines: any numbers of ranks, windows, fresh blocks, and what can be wrong."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from octavo.core.model_shape import Latent, State
from octavo.core.process import frames
from octavo.distributed.mesh import Axis, Mesh
from octavo.errors import PipeClosed
from octavo.kv_transfer.messages import FetchBlocks, Fetched, PeerRank, RankCommands, RankNotes, SendBlocks
from octavo.pipes.pipe import Listener, Pipe
from octavo.worker.transfer import pieces
from octavo.worker.transfer.block_io import BlockIO, Place, held_heads
from octavo.worker.transfer.pieces import Piece
from octavo.worker.transfer.rank_transfer import RankTransfer
from tests.fakes.shapes import group

SECRET, EPOCH, TRANSFER = b"s" * 32, b"e" * 16, b"t" * 16
LAYERS, HEADS, BLOCKS = 4, 4, 12
GROUPS = [group(0, 2), group(1, 3, window=8)]


def whole_caches(*, is_filled: bool) -> list[Tensor]:
    caches = [torch.zeros(2, BLOCKS, HEADS, 4, 8, dtype=torch.bfloat16) for _ in range(LAYERS)]
    for cache in caches if is_filled else ():
        cache.view(torch.uint8).random_(256)
    return caches


class Rank:
    """Has some layers and heads of the whole caches, which are copied in and out."""

    def __init__(self, layers: tuple[int, int], heads: tuple[int, int], host: str = "127.0.0.1") -> None:
        self.layers, self.heads = layers, heads
        self.caches = [torch.zeros(2, BLOCKS, heads[1] - heads[0], 4, 8, dtype=torch.bfloat16) for _ in range(*layers)]
        groups = [group.of_range(range(*layers)) for group in GROUPS]
        blocks = BlockIO(self.caches, groups, [range(*heads)] * len(groups), range(*layers))
        self.modules = [nn.Identity() for _ in range(*layers)]
        self.notes: SimpleQueue[bytes] = SimpleQueue()
        self.transfer = RankTransfer(blocks, self.modules, self.notes.put, no_tiers)
        peer = self.transfer.open(host, SECRET, EPOCH)
        assert peer is not None
        self.peer = peer

    def step(self, *, compute: Callable[[], Any] = lambda: None, **commands: Any) -> None:
        with self.transfer.step(frames.encode(RankCommands(**commands))):
            compute()

    def note(self) -> RankNotes:
        return msgspec.msgpack.decode(self.notes.get(timeout=200), type=RankNotes)


def no_tiers() -> Any:
    raise AssertionError("there is no tier")


Open = Callable[[int, int], list[Rank]]


@pytest.fixture
def open_ranks() -> Iterator[Open]:
    opened = []

    def open_all(tensor: int, pipeline: int) -> list[Rank]:
        layers, heads = LAYERS // pipeline, HEADS // tensor
        ranks = [
            Rank((stage * layers, (stage + 1) * layers), (place * heads, (place + 1) * heads))
            for stage in range(pipeline)
            for place in range(tensor)
        ]
        opened.extend(ranks)
        return ranks

    yield open_all
    for rank in opened:
        rank.transfer.close()
    for thread in threading.enumerate():
        if thread.name.startswith("octavo-kv"):
            thread.join(100)
            assert not thread.is_alive()


def fill(ranks: list[Rank]) -> list[Tensor]:
    whole = whole_caches(is_filled=True)
    for rank in ranks:
        for layer, cache in zip(range(*rank.layers), rank.caches, strict=True):
            cache.copy_(whole[layer][:, :, slice(*rank.heads)])
    return whole


def gathered(ranks: list[Rank]) -> list[Tensor]:
    whole = whole_caches(is_filled=False)
    for rank in ranks:
        for layer, cache in zip(range(*rank.layers), rank.caches, strict=True):
            whole[layer][:, :, slice(*rank.heads)] = cache
    return whole


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def fetch_of(givers: list[Rank], block_ids: list[list[int]], first: int = 0, **fields: Any) -> FetchBlocks:
    command = FetchBlocks(1, TRANSFER, first, block_ids, [rank.peer for rank in givers], EPOCH)
    return msgspec.structs.replace(command, **fields)


# blocks 0 to 4 of the transfer; those of the window's layers begin with null blocks
SOURCES = [[1, 2, 3, 4, 5], [0, 0, 8, 9, 10]]
TARGETS = [[11, 3, 6, 1, 9], [0, 0, 4, 2, 8]]


@pytest.mark.parametrize(
    ("name", "num_good"), [("octavo-kv-serve", 0), ("octavo-kv-send", 0), ("octavo-kv-receive", 1)]
)
def test_ranks_that_can_have_no_more_threads_for_a_moment_go_on(
    open_ranks: Open, monkeypatch: pytest.MonkeyPatch, name: str, num_good: int
) -> None:
    start, results = threading.Thread.start, [True] * num_good + [False]

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name and results and not results.pop(0):
            raise RuntimeError("can't start new thread")
        start(thread)

    givers, (taker,) = open_ranks(2, 1), open_ranks(1, 1)
    source = fill(givers)
    for rank in givers:
        rank.step(sends=[SendBlocks(TRANSFER, 0, SOURCES, is_fresh=False)])
    monkeypatch.setattr(threading.Thread, "start", refuse)
    taker.step(fetches=[fetch_of(givers, TARGETS)])
    assert taker.note().fetched[0].error
    assert "octavo-kv-receive" not in [thread.name for thread in threading.enumerate()]
    taker.step(fetches=[fetch_of(givers, TARGETS)])
    assert not taker.note().fetched[0].error
    assert same(gathered([taker])[0][:, TARGETS[0]], source[0][:, SOURCES[0]])


KINDS = [group(0, 2, keeps=State(6)), group(0, 1), group(2, keeps=Latent(8, 6))]
"""The first layer has a state beside its keys and values."""


class MixedRank(Rank):
    """One rank of several that share every layer, with caches of all kinds; of states each has a share of its own."""

    def __init__(self, mesh: Mesh) -> None:
        torch.manual_seed(mesh.tensor.rank)
        heads = [held_heads(each.keeps, mesh) for each in KINDS]
        shapes = [(1, BLOCKS, 6 // mesh.tensor.size), (2, BLOCKS, len(heads[1]), 4, 8), (1, BLOCKS, 1, 4, 8)]
        self.caches = [torch.randn(shapes[number]) for number in (0, 1, 1, 0)]
        torch.manual_seed(2)
        self.caches.append(torch.randn(shapes[2]))  # latents are the same on all ranks
        self.modules = [nn.Identity() for _ in range(3)]
        self.notes = SimpleQueue()
        self.transfer = RankTransfer(
            BlockIO(self.caches, KINDS, heads, range(3)), self.modules, self.notes.put, no_tiers
        )
        peer = self.transfer.open("127.0.0.1", SECRET, EPOCH)
        assert peer is not None
        self.peer = peer


def test_every_kind_of_cache_moves_between_engines_with_as_many_ranks() -> None:
    givers, takers = ([MixedRank(Mesh(Axis(place, 2))) for place in range(2)] for _ in range(2))
    alone = MixedRank(Mesh.single())
    sources, targets = [[0, 3, 0], [1, 2, 3], [4, 5, 6]], [[0, 7, 0], [7, 8, 9], [1, 2, 3]]
    for taker in takers:
        for cache in taker.caches:
            cache.zero_()
        taker.step(fetches=[fetch_of(givers, targets)])
    for giver in givers:
        giver.step(sends=[SendBlocks(TRANSFER, 0, sources, is_fresh=False)])
    for giver, taker in zip(givers, takers, strict=True):
        assert not taker.note().fetched[0].error
        for number, there, here in zip((0, 1, 1, 0, 2), giver.caches, taker.caches, strict=True):
            moved = [(a, b) for a, b in zip(sources[number], targets[number], strict=True) if a]
            assert all(same(there[:, a], here[:, b]) for a, b in moved)
            assert here.any(dim=tuple(range(2, here.dim()))).sum() == len(moved) * here.shape[0]
    # a state is not put together from those of several ranks
    before = alone.caches[0].clone()
    alone.step(fetches=[fetch_of(givers, targets)])
    assert "torch.uint8" in alone.note().fetched[0].error
    assert same(alone.caches[0], before)
    for rank in (*givers, *takers, alone):
        rank.transfer.close()


@pytest.mark.parametrize("fetching", [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("giving", [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)], ids=str)
def test_any_ranks_fetch_from_any_ranks(open_ranks: Open, giving: tuple[int, int], fetching: tuple[int, int]) -> None:
    givers, takers = open_ranks(*giving), open_ranks(*fetching)
    source = fill(givers)
    for rank in takers:  # they subscribe before anything is there
        rank.step(fetches=[fetch_of(givers, TARGETS)])
    for rank in givers:
        rank.step(sends=[SendBlocks(TRANSFER, 0, [ids[:2] for ids in SOURCES], is_fresh=False)])
        rank.step(sends=[SendBlocks(TRANSFER, 2, [ids[2:] for ids in SOURCES], is_fresh=False)])
    for rank in takers:
        (fetched,) = rank.note().fetched
        assert fetched == Fetched(1, "", fetched.num_bytes, fetched.seconds)
    target = gathered(takers)
    expected = whole_caches(is_filled=False)
    for layer in range(LAYERS):
        group = layer % 2
        for theirs, ours in zip(SOURCES[group], TARGETS[group], strict=True):
            expected[layer][:, ours] = source[layer][:, theirs]
        expected[layer][:, 0] = 0
        assert same(target[layer], expected[layer])


def test_ranks_that_share_heads_send_them_once(open_ranks: Open) -> None:
    givers, (taker,) = open_ranks(2, 1), open_ranks(1, 1)
    twice = [giver.peer for giver in givers for _ in range(2)]
    fill(givers)
    taker.step(fetches=[fetch_of(givers, TARGETS, peers=twice)])
    for rank in givers:
        rank.step(sends=[SendBlocks(TRANSFER, 0, SOURCES, is_fresh=False)])
    (fetched,) = taker.note().fetched
    assert not fetched.error
    assert fetched.num_bytes == (5 + 3) * 2 * taker.caches[0][:, 0].nbytes


def test_fresh_blocks_come_layer_by_layer_while_the_step_computes(open_ranks: Open) -> None:
    (giver,), (taker,) = open_ranks(1, 1), open_ranks(1, 1)
    source = whole_caches(is_filled=True)
    taker.step(fetches=[fetch_of([giver], TARGETS)])

    def compute() -> None:
        for layer, module in enumerate(giver.modules):
            giver.caches[layer].copy_(source[layer])
            module(source[layer])
            group = layer % 2
            deadline = time.monotonic() + 200
            while not same(taker.caches[layer][:, TARGETS[group][4]], source[layer][:, SOURCES[group][4]]):
                assert time.monotonic() < deadline, "this layer arrives before the next one is computed"
                time.sleep(0.001)

    giver.step(sends=[SendBlocks(TRANSFER, 0, SOURCES, is_fresh=True)], compute=compute)
    assert not taker.note().fetched[0].error
    assert not any(module._forward_hooks for module in giver.modules)


def test_a_step_that_is_repeated_without_its_layers_sends_at_its_end(open_ranks: Open) -> None:
    (giver,), (taker,) = open_ranks(1, 1), open_ranks(1, 1)
    source = fill([giver])
    giver.step(sends=[SendBlocks(TRANSFER, 0, SOURCES, is_fresh=True)])
    taker.step(fetches=[fetch_of([giver], TARGETS)])
    assert not taker.note().fetched[0].error
    assert same(taker.caches[2][:, 9], source[2][:, 5])


def test_nothing_is_sent_that_is_not_needed(open_ranks: Open) -> None:
    (giver,), (taker,) = open_ranks(1, 1), open_ranks(1, 1)
    fill([giver])
    giver.step(sends=[SendBlocks(TRANSFER, 0, SOURCES, is_fresh=False)])
    giver.step(sends=[SendBlocks(TRANSFER, 2, [ids[2:] for ids in SOURCES], is_fresh=False)])  # again
    taker.step(fetches=[fetch_of([giver], [[7, 0], [0, 7]], first=3)])
    (fetched,) = taker.note().fetched
    assert (fetched.error, fetched.num_bytes) == ("", LAYERS * taker.caches[0][:, 0].nbytes)


def test_blocks_that_left_a_window_end_the_fetch(open_ranks: Open) -> None:
    (giver,), (taker,) = open_ranks(1, 1), open_ranks(1, 1)
    giver.step(sends=[SendBlocks(TRANSFER, 0, SOURCES, is_fresh=False)])
    taker.step(fetches=[fetch_of([giver], [[1, 2], [3, 4]])])
    assert "its layers have not kept it" in taker.note().fetched[0].error


def test_a_transfer_that_ends_ends_its_fetch_now_and_later(open_ranks: Open) -> None:
    (giver,), (taker,) = open_ranks(1, 1), open_ranks(1, 1)
    for _ in range(2):
        taker.step(fetches=[fetch_of([giver], TARGETS)])
        giver.step(ends=[TRANSFER])
        assert giver.note().ended == [TRANSFER]
        assert "the transfer has ended" in taker.note().fetched[0].error


def test_a_rank_that_sends_nothing_ends_the_fetch(open_ranks: Open) -> None:
    (giver,), (taker,) = open_ranks(1, 1), open_ranks(1, 1)
    taker.step(fetches=[fetch_of([giver], TARGETS, patience_s=0.05)])
    assert "the other end of the pipe has sent nothing within the deadline" in taker.note().fetched[0].error


def test_ended_follows_when_no_thread_reads(open_ranks: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    (giver,), (taker,) = open_ranks(1, 1), open_ranks(1, 1)
    is_reading, may_read = threading.Event(), threading.Event()
    read = BlockIO.read

    def wait_and_read(self: BlockIO, place: Place, block_ids: list[int], heads: range) -> Tensor:
        is_reading.set()
        assert may_read.wait(200)
        return read(self, place, block_ids, heads)

    monkeypatch.setattr(BlockIO, "read", wait_and_read)
    giver.step(sends=[SendBlocks(TRANSFER, 0, SOURCES, is_fresh=False)])
    taker.step(fetches=[fetch_of([giver], TARGETS)])
    assert is_reading.wait(200)
    giver.step(ends=[TRANSFER])
    with pytest.raises(Empty):
        giver.notes.get(timeout=0.05)
    may_read.set()
    assert giver.note().ended == [TRANSFER]
    assert "the transfer has ended" in taker.note().fetched[0].error


def test_the_side_that_fetches_ends_a_transfer_with_its_fetches(open_ranks: Open) -> None:
    (giver,), (taker,) = open_ranks(1, 1), open_ranks(1, 1)
    taker.step(fetches=[fetch_of([giver], TARGETS)])
    taker.step(ends=[TRANSFER])
    note = taker.note()
    assert (note.ended, note.fetched[0].error) == ([TRANSFER], "the transfer has ended")
    taker.step(ends=[b"another"])
    assert taker.note().ended == [b"another"]


def test_a_rank_that_ends_in_a_transfer_ends_the_fetch(open_ranks: Open) -> None:
    givers, (taker,) = open_ranks(2, 1), open_ranks(1, 1)
    fill(givers)
    taker.step(fetches=[fetch_of(givers, TARGETS)])
    givers[0].step(sends=[SendBlocks(TRANSFER, 0, SOURCES, is_fresh=False)])
    givers[1].transfer.close()
    assert "Pipe" in taker.note().fetched[0].error


def test_a_rank_that_is_not_there_and_one_without_a_secret_are_errors(open_ranks: Open) -> None:
    (giver,), (taker,) = open_ranks(1, 1), open_ranks(1, 1)
    giver.transfer.close()
    taker.step(fetches=[fetch_of([giver], TARGETS)])
    assert "cannot be reached" in taker.note().fetched[0].error
    taker.step(fetches=[fetch_of([], TARGETS)])
    assert "do not have layers 0 to 3, heads 0 to 3 once" in taker.note().fetched[0].error


Change = Callable[[Piece, Tensor], tuple[Piece, Tensor | None]]


def signed(piece: Piece, content: Tensor, **fields: Any) -> tuple[Piece, Tensor]:
    piece = msgspec.structs.replace(piece, **fields)
    return msgspec.structs.replace(piece, checksum=piece.checksum_of(content)), content


def flipped(piece: Piece, content: Tensor) -> tuple[Piece, Tensor]:
    content.view(-1)[17] ^= 1
    return piece, content


WRONG: dict[str, tuple[Change, str]] = {
    "bit": (flipped, "corrupted"),
    "number": (lambda p, t: (msgspec.structs.replace(p, blocks=[2, 1]), t), "corrupted"),
    "epoch": (lambda p, t: signed(p, t, epoch=b"x" * 16), "started again"),
    "twice": (lambda p, t: signed(p, t, blocks=[1, 1]), "came twice"),
    "unknown": (lambda p, t: signed(p, t, blocks=[1, 77]), "not needed"),
    "layer": (lambda p, t: signed(p, t, layer=9), "not needed"),
    "group": (lambda p, t: signed(p, t, group=1), "not needed"),
    "no group": (lambda p, t: signed(p, t, group=7), "not needed"),
    "transfer": (lambda p, t: signed(p, t, transfer=b"x" * 16), "not of the subscription"),
    "heads": (lambda p, t: signed(p, t, heads=(0, 1)), "not of the subscription"),
    "half": (lambda p, t: signed(p, t[:, :1].contiguous()), "must be torch.uint8"),
    "type": (lambda p, t: signed(p, t.view(torch.int8)), "must be torch.uint8"),
    "nothing": (lambda p, _: (p, None), "no piece"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_piece_ends_the_fetch_unwritten(open_ranks: Open, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, message = WRONG[name]
    (taker,) = open_ranks(1, 1)
    listener = Listener("tcp://127.0.0.1:0", SECRET)
    peer = PeerRank("127.0.0.1", int(listener.address.rpartition(":")[2]), (0, LAYERS), [(0, HEADS)] * 2)
    taker.step(fetches=[fetch_of([], [[1, 2, 3], [0, 0, 0]], peers=[peer])])
    pipe = listener.accept(30)
    content = torch.zeros(2, 2, HEADS, 64, dtype=torch.uint8).random_(1, 256)
    piece, changed = change(*signed(Piece(TRANSFER, 2, 0, (0, HEADS), [1, 2], EPOCH), content))
    send(pipe, piece, changed)
    fetched = taker.note().fetched[0]
    assert message in fetched.error
    assert not any(cache.any() for cache in taker.caches)
    pipe.close()
    listener.close()


def send(pipe: Pipe, piece: Piece, content: Tensor | None) -> None:
    pipe.send_tensor(content, msgspec.msgpack.encode(piece))


def test_a_piece_that_comes_twice_ends_the_fetch(open_ranks: Open) -> None:
    (taker,) = open_ranks(1, 1)
    listener = Listener("tcp://127.0.0.1:0", SECRET)
    peer = PeerRank("127.0.0.1", int(listener.address.rpartition(":")[2]), (0, LAYERS), [(0, HEADS)] * 2)
    taker.step(fetches=[fetch_of([], [[1, 2, 3], [0, 0, 0]], peers=[peer])])
    pipe = listener.accept(30)
    for _ in range(2):
        send(
            pipe, *signed(Piece(TRANSFER, 0, 0, (0, HEADS), [0], EPOCH), torch.ones(2, 1, HEADS, 64, dtype=torch.uint8))
        )
    assert "came twice" in taker.note().fetched[0].error
    pipe.close()
    listener.close()


@pytest.mark.parametrize("layers", [(0, 9), (-1, 4), (2, 2)], ids=str)
def test_a_subscription_for_what_a_rank_does_not_have_is_cut(open_ranks: Open, layers: tuple[int, int]) -> None:
    (giver,) = open_ranks(1, 1)
    from octavo.worker.transfer.receiving import connect_to

    pipe = connect_to(giver.peer, SECRET)
    pipe.send_tensor(None, msgspec.msgpack.encode(pieces.Subscribe(TRANSFER, layers, [(0, HEADS)] * 2, [[1], [1]])))
    with pytest.raises(PipeClosed):
        pipe.recv_tensor(30)
    pipe.close()


def test_large_blocks_come_in_several_pieces(open_ranks: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 3 * 2 * HEADS * 64)
    (giver,), (taker,) = open_ranks(1, 1), open_ranks(1, 1)
    source = fill([giver])
    giver.step(sends=[SendBlocks(TRANSFER, 0, SOURCES, is_fresh=False)])
    taker.step(fetches=[fetch_of([giver], TARGETS)])
    assert not taker.note().fetched[0].error
    assert same(taker.caches[0][:, TARGETS[0]], source[0][:, SOURCES[0]])


def test_transfers_leave_no_descriptor_and_no_thread(open_ranks: Open) -> None:
    (giver,), (taker,) = open_ranks(1, 1), open_ranks(1, 1)
    fill([giver])

    def transfer() -> None:
        giver.step(sends=[SendBlocks(TRANSFER, 0, SOURCES, is_fresh=True)])
        for epoch in (EPOCH, b"x" * 16):
            taker.step(fetches=[fetch_of([giver], TARGETS, epoch=epoch)])
            assert bool(taker.note().fetched[0].error) == (epoch != EPOCH)

    def used() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    transfer()
    most = used()
    for _ in range(10):
        transfer()
    deadline = time.monotonic() + 200
    while any(now > before for now, before in zip(used(), most, strict=True)):
        assert time.monotonic() < deadline, used()
        time.sleep(0.01)  # connections end on the other side
