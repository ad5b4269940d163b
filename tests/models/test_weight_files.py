"""Reading weight files, and the bar beside it."""

from __future__ import annotations

import json
import mmap
import threading
import time
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.layers.layer import WHOLE, Parts
from octavo.models.weight_files import StoredTensor, Wanted, progress_bar, read_ahead, stored_tensors
from tests.fakes.resident import resident_bytes


def test_safetensors_and_archives_hold_the_same(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    torch.save(tensors, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    for name in ("model.safetensors", "pytorch_model.bin", "old.bin"):
        found = {each.name: each.values(WHOLE) for each in stored_tensors(tmp_path / name)}
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[key], tensors[key]) for key in tensors)


def test_the_bar_shows_how_many_bytes_are_loaded() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=120)
    with progress_bar("Loading it", 2048, console) as advance:
        advance(1024)
        advance(1024)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Loading it" in shown
    assert "2.0/2.0 KiB" in shown


def test_views_of_a_file_can_be_released_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(5000.0), "b": torch.arange(7.0), "c": torch.empty(0, 3), "d": torch.tensor(2.5)}, path)
    tensors = {each.name: each for each in stored_tensors(path)}
    views = {name: each.values(WHOLE) for name, each in tensors.items()}
    for each in tensors.values():
        each.release()
    assert torch.equal(views["a"], torch.arange(5000.0))
    assert torch.equal(views["b"], torch.arange(7.0))
    assert views["c"].shape == (0, 3)
    assert views["d"].item() == 2.5


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="needs Linux's account of a process's pages")
def test_parts_of_a_tensor_are_read_alone(tmp_path: Path) -> None:
    rows, dim = 8, 1 << 20
    stored = torch.arange(rows, dtype=torch.float32).unsqueeze(1).expand(rows, dim).contiguous()
    save_file({"a": stored}, tmp_path / "model.safetensors")
    beside = 1 << 19  # which the system maps beside pages that are read
    (tensor,) = stored_tensors(tmp_path / "model.safetensors")
    for parts, share in (
        (((slice(2, 4),),), 1 / 4),
        (((slice(0, 1),), (slice(5, 6),)), 1 / 4),
        (((slice(0, 4), slice(0, dim // 2)),), 1 / 4),
        (((slice(0, 0),),), 0),
        (WHOLE, 1),
    ):
        wanted = Wanted(tensor, parts)
        assert wanted.nbytes == share * stored.nbytes
        values = tensor.values(parts)
        assert 0 <= resident_bytes(values) - share * stored.nbytes <= 4 * beside
        assert all(torch.equal(values[part], stored[part]) for part in parts)
        del values
        tensor.release()


def test_values_at_odd_places_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    before = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    header = json.dumps({"x": before, "a": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]}}).encode()
    values = torch.tensor([1.5, -2.0])
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"x" + values.numpy().tobytes())
    tensor = next(each for each in stored_tensors(path) if each.name == "a")
    assert torch.equal(tensor.values(WHOLE), values)


def test_what_is_written_to_a_view_never_reaches_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(10)}, path)
    before = path.read_bytes()
    next(stored_tensors(path)).values(WHOLE).zero_()
    assert path.read_bytes() == before


def test_a_disk_that_cannot_be_mapped_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(19, "No such device")

    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(10)}, path)
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: cannot be mapped \(No such device\); copy the model"
    ):
        next(stored_tensors(path))


class Shelf:
    """Tensors of given sizes that tell which of them were read."""

    def __init__(self, *sizes: int) -> None:
        self.reads: list[int] = []
        self.wanted = [Wanted(self.tensor(index, size), WHOLE) for index, size in enumerate(sizes)]

    def tensor(self, index: int, size: int) -> StoredTensor:
        def read(parts: Parts) -> Tensor:
            self.reads.append(index)
            return torch.full((size,), index, dtype=torch.uint8)

        return StoredTensor(str(index), "U8", (size,), size, Path("shelf"), read)


def test_reading_goes_on_while_the_caller_works_but_never_too_far() -> None:
    shelf = Shelf(10, 10, 10, 100, 10, 10)
    order = []
    # two small ones fit beside the caller's, the large one is read when nothing else waits
    for (wanted, values), expected in zip(read_ahead(shelf.wanted, limit_bytes=20), (3, 3, 3, 6, 6, 6), strict=True):
        order.append((wanted.tensor.name, int(values[0])))
        deadline = time.monotonic() + 100
        while len(shelf.reads) < expected and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.01)
        assert shelf.reads == list(range(expected))
    assert order == [(str(index), index) for index in range(6)]


def test_what_a_tensor_takes_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[str] = []
    monkeypatch.setattr(Wanted, "nbytes", property(lambda self: computed.append(self.tensor.name) or 10))
    list(read_ahead(Shelf(*[10] * 50).wanted, limit_bytes=1000))
    assert len(computed) == 50


def test_a_caller_that_gives_up_stops_the_reader() -> None:
    shelf = Shelf(*[10] * 100)
    ahead = read_ahead(shelf.wanted, limit_bytes=50)
    next(ahead)
    ahead.close()
    assert len(shelf.reads) <= 6
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("octavo-reader")]
