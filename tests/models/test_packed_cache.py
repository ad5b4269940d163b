"""Packed weights on disk: mapped when they are exactly what is wanted, packed again in every other case."""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.config.checkpoint import Checkpoint
from octavo.devices.cpu.runtime import CpuRuntime
from octavo.devices.reference.attention import ReferenceBackend
from octavo.distributed.mesh import Mesh
from octavo.distributed.parts import part_name
from octavo.errors import ConfigError
from octavo.models import content, packed_file
from octavo.models.content import WeightContent
from octavo.models.decoder import DecoderStack
from octavo.models.packed_cache import PackedCache, made_of
from octavo.models.packed_folder import PackedFolder
from octavo.ops.prepare_linear import TensorSpec
from octavo.ops.registry import Ops
from octavo.quantization.registry import method_named
from tests.fakes.checkpoints import edit_tensors, make_checkpoint
from tests.fakes.padded_format import padded_ops
from tests.models.loading import load_model
from tests.models.paged_run import logits_of

MADE = {"checkpoint": "/models/one", "dtype": "float32"}
STATE = {
    "a.packed": torch.arange(70_000.0).view(7, -1),
    "a.bias": torch.arange(5, dtype=torch.bfloat16),
    "b.packed": torch.arange(24, dtype=torch.int8).view(2, 3, 4),
    "b.none": torch.empty(0, 4),
}
SPECS = {name: TensorSpec.of(tensor) for name, tensor in STATE.items()}


def same(found: dict[str, Tensor] | None, expected: dict[str, Tensor]) -> bool:
    assert found is not None
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change shows in the times of a file at once, as it does on the file system of these tests."""
    monkeypatch.setattr(content, "_SETTLED_AFTER_NS", 0)


def folder(directory: Path, **options: Any) -> PackedFolder:
    return PackedFolder(directory, **{"max_bytes": 1 << 30, "threads": 2, **options})


def cache_of(directory: Path, weights: bytes = b"weights", **made: Any) -> PackedCache:
    """The cache in `directory` of a checkpoint with one file, which holds `weights`."""
    file = directory.parent / f"{directory.name}.safetensors"
    if not file.exists() or file.read_bytes() != weights:
        file.write_bytes(weights)
    directory.mkdir(exist_ok=True)
    return PackedCache(folder(directory), "one", WeightContent([file]), {**MADE, **made})


def write(cache: PackedCache, state: dict[str, Tensor] | None = None) -> None:
    cache.keep(STATE if state is None else state)
    cache._folder.close(60.0)


def load(path: Path, directory: Path, ops: Ops, packed: PackedFolder | None = None, **options: Any) -> DecoderStack:
    """A loaded model, after what runs in the background has ended."""
    settings: dict[str, Any] = {"dtype": torch.float32, "mesh": Mesh.single(), "backend": ReferenceBackend(), **options}
    packed = packed or folder(directory)
    model = load_model(Checkpoint.open(path), ops=ops, packed=packed, **settings)
    packed.close(60.0)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_the_second_start_packs_nothing_and_answers_the_same(family: str, tied: bool, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path / "model", tie_word_embeddings=tied)
    first_ops, second_ops = padded_ops(), padded_ops()
    first, second = (load(path, tmp_path / "cache", ops) for ops in (first_ops, second_ops))
    assert first_ops.prepare_linear.made > 0
    assert second_ops.prepare_linear.made == 0
    assert same(second.state(), first.state())
    assert torch.equal(logits_of(second, num_decoded=3), logits_of(first, num_decoded=3))
    assert sorted(file.suffix for file in (tmp_path / "cache").iterdir()) == [".json", ".packed"]


def test_each_rank_keeps_a_file_of_its_own_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    path, cache = make_checkpoint("llama", tmp_path / "model"), tmp_path / "cache"
    parts = [(0, 1, "gather"), (0, 2, "gather"), (1, 2, "gather"), (3, 4, "gather"), (1, 2, "sum")]
    states = []
    for is_first in (True, False):
        for rank, size, reduce in parts:
            ops = padded_ops()
            place: Any = replace(Mesh.of_rank(rank, tensor=size), reduce=reduce)
            wanted = {"ranks": part_name(rank, tensor=size, pipeline=1, reduce=reduce)}
            kept = folder(cache)
            assert kept.read_ahead(wanted) != is_first
            states.append(load(path, cache, ops, kept, mesh=place).state())
            assert (ops.prepare_linear.made > 0) == is_first
    assert len(list(cache.glob("*.packed"))) == len(parts)
    assert all(same(again, first) for first, again in zip(states[: len(parts)], states[len(parts) :], strict=True))


@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe"])
@pytest.mark.parametrize("name", [None, "int8", "int4"])
def test_every_format_of_this_machine_is_restored_to_the_same_bits(
    name: str | None, family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "tie_word_embeddings": True}
    path = make_checkpoint(family, tmp_path / "model", **sizes)
    ops = CpuRuntime.open(threads=2).bind()
    options: dict[str, Any] = {"dtype": torch.bfloat16, "method": method_named(name)}
    with caplog.at_level(logging.INFO, "octavo"):
        first, second = (load(path, tmp_path / "cache", ops, **options) for _ in range(2))
    assert [message.split(" in ")[0].split(" from ")[0] for message in caplog.messages] == [
        "packed weights kept",
        "packed weights mapped",
    ]
    assert same(second.state(), first.state())
    assert torch.equal(logits_of(second, num_decoded=3), logits_of(first, num_decoded=3))


@pytest.mark.parametrize("change", ["weights", "config", "dtype", "layout"])
def test_what_was_made_of_something_else_is_not_taken(change: str, tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path / "model")
    load(path, tmp_path / "cache", padded_ops())
    ops, options = padded_ops(), {}
    if change == "weights":
        edit_tensors(path, **{"model.norm.weight": torch.full((32,), 3.0)})
    elif change == "config":
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    elif change == "dtype":
        options = {"dtype": torch.bfloat16}
    else:
        ops.prepare_linear.layout = "padded/2"
    model = load(path, tmp_path / "cache", ops, **options)
    assert ops.prepare_linear.made > 0
    fresh = load(path, tmp_path / "other", padded_ops(), **options)
    assert same(model.state(), fresh.state())


def test_a_stale_file_is_replaced_and_one_line_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(cache_of(tmp_path / "cache"))
    newer = cache_of(tmp_path / "cache", b"others!")
    with caplog.at_level(logging.INFO, "octavo"):
        assert newer.read(SPECS) is None
    (line,) = caplog.messages
    assert line.endswith("is stale: its content is another; the checkpoint is packed again")
    write(newer)
    assert same(newer.read(SPECS), STATE)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def with_times_of(path: Path, change: Callable[[], None]) -> None:
    """Change a file so that its stamp says nothing of it."""
    stamp = content.Stamp.of(path)
    change()
    real = content.Stamp.of
    content.Stamp.of = classmethod(  # type: ignore[method-assign, assignment]
        lambda cls, other: stamp if other.name == path.name else real(other)
    )


@pytest.fixture
def real_stamps() -> Iterator[None]:
    before = content.Stamp.__dict__["of"]
    yield
    content.Stamp.of = before  # type: ignore[method-assign]


@pytest.mark.usefixtures("real_stamps")
def test_a_change_that_no_stamp_shows_is_found_after_the_start_and_the_next_one_packs_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint("llama", tmp_path / "model")
    load(path, tmp_path / "cache", padded_ops())
    with_times_of(
        path / "model.safetensors", lambda: edit_tensors(path, **{"model.norm.weight": torch.full((32,), 3.0)})
    )
    load(path, tmp_path / "cache", second := padded_ops())
    assert second.prepare_linear.made == 0
    assert "model.safetensors has changed since its weights were packed" in caplog.text
    assert list((tmp_path / "cache").iterdir()) == []
    model = load(path, tmp_path / "cache", third := padded_ops())
    assert third.prepare_linear.made > 0
    assert torch.equal(model.state()["norm.weight"], torch.full((32,), 3.0))


def test_size_and_time_of_modification_are_not_enough(tmp_path: Path) -> None:
    write(cache_of(tmp_path / "cache", b"weights"))
    file = tmp_path / "cache.safetensors"
    times = file.stat()
    file.write_bytes(b"WEIGHTS")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert cache_of(tmp_path / "cache", b"WEIGHTS").read(SPECS) is None


@pytest.mark.parametrize("change", ["times", "inode", "no record", "damaged record"])
def test_where_stamps_prove_nothing_the_content_does(change: str, tmp_path: Path) -> None:
    write(cache_of(tmp_path / "cache"))
    file, record = tmp_path / "cache.safetensors", next((tmp_path / "cache").glob("*.files.json"))
    if change == "times":
        os.utime(file)
    elif change == "inode":
        file.rename(tmp_path / "away")
        file.write_bytes((tmp_path / "away").read_bytes())
    elif change == "no record":
        record.unlink()
    else:
        record.write_bytes(b'{"seen_ns": 1, "stamps": {}, "digests": {"\xff": ""}}')
    cache = cache_of(tmp_path / "cache")
    assert same(cache.read(SPECS), STATE)
    found = content.Record.read(record)
    assert found is not None
    assert found.proves(cache._content.stamps)  # so that the next start need not read the checkpoint


def test_a_file_that_changed_a_moment_ago_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "_SETTLED_AFTER_NS", 3600 * 10**9)
    read: list[Path] = []
    real = content._digest_of_piece
    monkeypatch.setattr(content, "_digest_of_piece", lambda path, *rest: read.append(path) or real(path, *rest))
    cache = cache_of(tmp_path / "cache")
    cache.prepare()
    assert len(read) == 1  # before the weights are read, and again before they are kept
    write(cache)
    assert len(read) == 2
    assert same(cache_of(tmp_path / "cache").read(SPECS), STATE)
    assert len(read) == 3


def test_a_checkpoint_that_changes_when_read_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = cache_of(tmp_path / "cache")
    (tmp_path / "cache.safetensors").write_bytes(b"others!")
    write(cache)
    assert "the checkpoint changed while it was read" in caplog.text
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_file_that_is_read_ahead_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(cache_of(tmp_path / "cache"))
    checked: list[None] = []
    real = packed_file.PackedFile._checksums
    monkeypatch.setattr(
        packed_file.PackedFile, "_checksums", lambda self, threads: checked.append(None) or real(self, threads)
    )
    ahead = folder(tmp_path / "cache")
    assert not ahead.read_ahead({"dtype": "bfloat16"})
    assert ahead.read_ahead({"dtype": "float32"})
    cache = PackedCache(ahead, "one", WeightContent([tmp_path / "cache.safetensors"]), MADE)
    assert same(cache.read(SPECS), STATE)
    ahead.close(60.0)
    assert len(checked) == 1


def test_what_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    caches = {dtype: cache_of(tmp_path / "cache", dtype=dtype) for dtype in ("a", "b", "c")}
    for age, dtype in enumerate(("a", "b")):
        write(caches[dtype])
        os.utime(caches[dtype].path, (age, age))
    assert same(caches["a"].read(SPECS), STATE)
    size = caches["a"].path.stat().st_size
    caches["c"]._folder._max_bytes = 2 * size + packed_file.packed_bytes([])
    write(caches["c"])
    assert {dtype for dtype in caches if caches[dtype].path.exists()} == {"a", "c"}
    assert len(list((tmp_path / "cache").iterdir())) == 4


@pytest.mark.parametrize("is_default", [True, False])
@pytest.mark.parametrize("obstacle", ["size", "disk"])
def test_weights_without_room_are_not_kept_and_a_line_says_so(
    obstacle: str, is_default: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_of(tmp_path / "cache")
    cache._folder.is_default = is_default
    if obstacle == "size":
        cache._folder._max_bytes = 1000
    else:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with caplog.at_level(logging.INFO, "octavo"):
        write(cache)
    (record,) = caplog.records
    expected = "packed_cache_size is 1000 B" if obstacle == "size" else "the disk has 1.00 MiB left"
    assert record.message.endswith(expected)
    assert record.levelno == (logging.INFO if is_default else logging.WARNING)
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_engine_that_ends_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(tmp_path / "cache")
    began = threading.Event()

    def slow(*arguments: Any) -> int:
        began.set()
        time.sleep(0.01)
        return os.writev(*arguments)

    monkeypatch.setattr(packed_file, "_PIECE_BYTES", 100)
    monkeypatch.setattr(packed_file, "_writev", slow)
    cache.keep(STATE)
    assert began.wait(60.0)
    cache._folder.close()
    assert list((tmp_path / "cache").iterdir()) == []


def damages(size: int) -> dict[str, Callable[[bytearray], bytes]]:
    def flip(place: int) -> Callable[[bytearray], bytes]:
        def damage(content: bytearray) -> bytes:
            content[place] ^= 1 << random.Random(place).randrange(8)
            return bytes(content)

        return damage

    places = [0, 15, 16, 25, 28, 60, 4096, 8192, size - 4096, *random.Random(0).sample(range(size), 20)]
    cuts = [0, 1, 20, 27, 28, 1000, 5000, size // 2, size - 1]
    return {
        **{f"bit flipped at {place}": flip(place) for place in places},
        **{f"cut at {cut}": lambda content, cut=cut: bytes(content[:cut]) for cut in cuts},
        "longer": lambda content: bytes(content) + b"x",
        "text": lambda content: b"not packed at all" * 100,
    }


@pytest.mark.parametrize("piece_bytes", [5000, 16 << 20])
def test_a_damaged_file_is_never_trusted(
    piece_bytes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_file, "_PIECE_BYTES", piece_bytes)
    cache = cache_of(tmp_path / "cache")
    write(cache)
    sound = cache.path.read_bytes()
    assert same(cache.read(SPECS), STATE)
    for name, damage in damages(len(sound)).items():
        cache.path.write_bytes(damage(bytearray(sound)))
        caplog.clear()
        assert cache.read(SPECS) is None, name
        assert len(caplog.messages) == 1, name
        assert "the checkpoint is packed again" in caplog.messages[0]
    write(cache)
    assert cache.path.read_bytes() == sound


def test_other_tensors_than_wanted_are_not_taken(tmp_path: Path) -> None:
    cache = cache_of(tmp_path / "cache")
    write(cache)
    assert cache.read({**SPECS, "a.bias": TensorSpec((6,), torch.bfloat16)}) is None
    assert cache.read({**SPECS, "c": TensorSpec((6,), torch.bfloat16)}) is None


def test_a_disk_that_cannot_be_mapped_costs_the_cache_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(19, "No such device")

    cache = cache_of(tmp_path / "cache")
    write(cache)
    monkeypatch.setattr(mmap, "mmap", refuse)
    assert cache.read(SPECS) is None
    assert caplog.messages[-1].endswith("cannot be mapped (No such device); the checkpoint is packed again")


def test_writers_at_the_same_time_leave_one_whole_file(tmp_path: Path) -> None:
    cache_of(tmp_path / "cache")
    seen: list[bool] = []

    def write_often() -> None:
        for _ in range(5):
            cache = cache_of(tmp_path / "cache")
            write(cache)
            seen.append(same(cache.read(SPECS), STATE))

    writers = [threading.Thread(target=write_often) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert seen == [True] * 20
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".json", ".packed"]


def test_what_is_mapped_survives_its_replacement(tmp_path: Path) -> None:
    cache = cache_of(tmp_path / "cache")
    write(cache)
    mapped = cache.read(SPECS)
    write(cache, {name: torch.ones_like(tensor) for name, tensor in STATE.items()})
    assert same(mapped, STATE)


def test_tensors_start_where_kernels_want_them(tmp_path: Path) -> None:
    cache = cache_of(tmp_path / "cache")
    write(cache)
    mapped = cache.read(SPECS)
    assert mapped is not None
    assert all(tensor.data_ptr() % 4096 == 0 for tensor in mapped.values() if tensor.numel())


def test_files_of_writers_that_were_killed_are_removed(tmp_path: Path) -> None:
    cache = cache_of(tmp_path / "cache")
    old, new = (tmp_path / "cache" / f"{cache.path.name}.{name}.partial" for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    write(cache)
    assert cache.path.exists()
    assert [path.exists() for path in (old, new)] == [False, True]


def test_a_disk_that_takes_nothing_is_logged_and_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = cache_of(tmp_path / "cache")
    monkeypatch.setattr(packed_file, "_writev", fail)
    write(cache)
    assert [message.rpartition(": ")[2] for message in caplog.messages] == ["No space left on device"]
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_directory_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = make_checkpoint("llama", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"packed_cache is .*file.* name a directory"):
        load(path, tmp_path / "file", padded_ops())


def test_a_default_directory_that_cannot_be_made_is_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    path = make_checkpoint("llama", tmp_path / "model")
    with caplog.at_level(logging.INFO, "octavo"):
        load(path, tmp_path / "file", padded_ops(), folder(tmp_path / "file", is_default=True))
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "packed weights are not kept" in caplog.text


def test_what_is_made_of_a_checkpoint_tells_files_apart(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_checkpoint("llama", tmp_path))
    base: dict[str, Any] = {"dtype": torch.float32, "method": "unquantized", "layout": "x/1", "ranks": "0 of 1"}
    made = made_of(checkpoint, **base)
    assert made_of(checkpoint, **base) == made
    others = {"dtype": torch.bfloat16, "method": "int8", "layout": "x/2", "ranks": "1 of 2"}
    names = {PackedCache(folder(tmp_path), "one", WeightContent([]), made).path}
    for key, value in others.items():
        other = made_of(checkpoint, **{**base, key: value})
        assert other != made
        names.add(PackedCache(folder(tmp_path), "one", WeightContent([]), other).path)
    assert len(names) == 5
