"""Packed weights on disk: mapped when they are exactly what is wanted, packed again in every other case."""

from __future__ import annotations

import json
import logging
import mmap
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.attention.reference import ReferenceBackend
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.errors import ConfigError
from octavo.models import packed_cache
from octavo.models.causal_lm import CausalLM
from octavo.models.loader import load_model
from octavo.models.packed_cache import PackedCache, identity_of
from octavo.ops.prepare_linear import TensorSpec
from octavo.ops.registry import Ops, bind, open_runtime
from octavo.platform import Platform
from octavo.quantization.registry import method_named
from tests.fakes.checkpoints import edit_tensors, make_checkpoint
from tests.fakes.padded_format import padded_ops
from tests.models.paged_run import PagedRun, Stream

IDENTITY = {"checkpoint": "/models/one", "files": {"model.safetensors": [10, 20]}, "dtype": "float32"}
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


def load(path: Path, directory: Path, ops: Ops, **options: Any) -> CausalLM:
    settings: dict[str, Any] = {"dtype": torch.float32, "mesh": Mesh.single(), "backend": ReferenceBackend(), **options}
    return load_model(Checkpoint.open(path), ops=ops, packed_cache=directory, threads=2, **settings)


def logits(model: CausalLM) -> Tensor:
    run, stream = PagedRun(model), Stream([5, 6, 7])
    run.step([(stream, 3)])
    run.decode([stream], 3)
    return torch.stack(stream.logits)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_the_second_start_packs_nothing_and_answers_the_same(family: str, tied: bool, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path / "model", tie_word_embeddings=tied)
    first_ops, second_ops = padded_ops(), padded_ops()
    first, second = (load(path, tmp_path / "cache", ops) for ops in (first_ops, second_ops))
    assert first_ops.prepare_linear.made > 0
    assert second_ops.prepare_linear.made == 0
    assert same(second.state(), first.state())
    assert torch.equal(logits(second), logits(first))
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("name", [None, "int8", "int4"])
def test_every_format_of_this_machine_is_restored_to_the_same_bits(
    name: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "tie_word_embeddings": True}
    path = make_checkpoint("qwen2", tmp_path / "model", **sizes)
    platform = Platform.detect()
    ops = bind(platform, runtime=open_runtime(platform, threads=2))
    options: dict[str, Any] = {"dtype": torch.bfloat16, "method": method_named(name)}
    with caplog.at_level(logging.INFO, "octavo"):
        first, second = (load(path, tmp_path / "cache", ops, **options) for _ in range(2))
    assert [message.split(" in ")[0].split(" from ")[0] for message in caplog.messages] == [
        "packed weights kept",
        "packed weights mapped",
    ]
    assert same(second.state(), first.state())
    assert torch.equal(logits(second), logits(first))


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
    PackedCache(tmp_path, "one", IDENTITY).write(STATE)
    newer = PackedCache(tmp_path, "one", {**IDENTITY, "files": {"model.safetensors": [10, 21]}})
    with caplog.at_level(logging.INFO, "octavo"):
        assert newer.read(SPECS) is None
    (line,) = caplog.messages
    assert line.endswith("is stale: its files is another; the checkpoint is packed again")
    newer.write(STATE)
    assert same(newer.read(SPECS), STATE)
    assert len(list(tmp_path.iterdir())) == 1


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
    monkeypatch.setattr(packed_cache, "_PIECE_BYTES", piece_bytes)
    cache = PackedCache(tmp_path, "one", IDENTITY)
    cache.write(STATE)
    sound = cache.path.read_bytes()
    assert same(cache.read(SPECS), STATE)
    for name, damage in damages(len(sound)).items():
        cache.path.write_bytes(damage(bytearray(sound)))
        caplog.clear()
        assert cache.read(SPECS) is None, name
        assert len(caplog.messages) == 1, name
        assert "the checkpoint is packed again" in caplog.messages[0]
    cache.write(STATE)
    assert cache.path.read_bytes() == sound


def test_other_tensors_than_wanted_are_not_taken(tmp_path: Path) -> None:
    cache = PackedCache(tmp_path, "one", IDENTITY)
    cache.write(STATE)
    assert cache.read({**SPECS, "a.bias": TensorSpec((6,), torch.bfloat16)}) is None
    assert cache.read({**SPECS, "c": TensorSpec((6,), torch.bfloat16)}) is None


def test_a_disk_that_cannot_be_mapped_costs_the_cache_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(19, "No such device")

    cache = PackedCache(tmp_path, "one", IDENTITY)
    cache.write(STATE)
    monkeypatch.setattr(mmap, "mmap", refuse)
    assert cache.read(SPECS) is None
    assert caplog.messages[-1].endswith("cannot be mapped (No such device); the checkpoint is packed again")


def test_writers_at_the_same_time_leave_one_whole_file(tmp_path: Path) -> None:
    caches = [PackedCache(tmp_path, "one", IDENTITY) for _ in range(4)]
    seen: list[bool] = []

    def write(cache: PackedCache) -> None:
        for _ in range(5):
            cache.write(STATE)
            seen.append(same(cache.read(SPECS), STATE))

    writers = [threading.Thread(target=write, args=(cache,)) for cache in caches]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert seen == [True] * 20
    assert [path.name for path in tmp_path.iterdir()] == [caches[0].path.name]


def test_what_is_mapped_survives_its_replacement(tmp_path: Path) -> None:
    cache = PackedCache(tmp_path, "one", IDENTITY)
    cache.write(STATE)
    mapped = cache.read(SPECS)
    cache.write({name: torch.ones_like(tensor) for name, tensor in STATE.items()})
    assert same(mapped, STATE)


def test_tensors_start_where_kernels_want_them(tmp_path: Path) -> None:
    cache = PackedCache(tmp_path, "one", IDENTITY)
    cache.write(STATE)
    mapped = cache.read(SPECS)
    assert mapped is not None
    assert all(tensor.data_ptr() % 4096 == 0 for tensor in mapped.values() if tensor.numel())


def test_files_of_writers_that_were_killed_are_removed(tmp_path: Path) -> None:
    cache = PackedCache(tmp_path, "one", IDENTITY)
    old, new = (tmp_path / f"{cache.path.name}.{name}.partial" for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    cache.write(STATE)
    assert sorted(tmp_path.iterdir()) == sorted([cache.path, new])


def test_a_disk_that_takes_nothing_is_logged_and_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    cache = PackedCache(tmp_path, "one", IDENTITY)
    monkeypatch.setattr(os, "fsync", fail)
    cache.write(STATE)
    assert [message.rpartition(": ")[2] for message in caplog.messages] == ["No space left on device"]
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = make_checkpoint("llama", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"packed_cache is .*file.* name a directory"):
        load(path, tmp_path / "file", padded_ops())


def test_identity_tells_checkpoints_and_what_is_made_of_them_apart(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_checkpoint("llama", tmp_path))
    base: dict[str, Any] = {"dtype": torch.float32, "method": "unquantized", "layout": "x/1", "ranks": "0 of 1"}
    identity = identity_of(checkpoint, **base)
    assert identity_of(checkpoint, **base) == identity
    others = {"dtype": torch.bfloat16, "method": "int8", "layout": "x/2", "ranks": "1 of 2"}
    names = {PackedCache(tmp_path, "one", identity).path}
    for key, value in others.items():
        other = identity_of(checkpoint, **{**base, key: value})
        assert other != identity
        names.add(PackedCache(tmp_path, "one", other).path)
    assert len(names) == 5
