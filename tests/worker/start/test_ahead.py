"""What is begun before torch is imported."""

from __future__ import annotations

import dataclasses
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from octavo.gguf.reader import read_gguf
from octavo.worker.start import ahead
from octavo.worker.start.ahead import Ahead, read_ahead
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.gguf_files import convert
from tests.worker.engine_config import make_config, start_worker


@pytest.fixture
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_PAGES_FROM_BYTES", 1)


@pytest.mark.usefixtures("small_is_large")
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_weights_packed_into_pages_fetched_ahead_are_the_same(quantization: str | None, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
    path = make_checkpoint("llama", tmp_path / "model", dtype="bfloat16", **sizes)
    config = make_config(path, num_gpu_blocks_override=30, quantization=quantization)
    begun = read_ahead(config)
    assert begun.pages is not None
    states = []
    for worker in (start_worker(config, begun), start_worker(config)):
        model: Any = worker._runner.model
        states.append(getattr(model, "_model", model).state())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.usefixtures("small_is_large")
@pytest.mark.parametrize(
    "arguments",
    [{"load_format": "dummy"}, {"instruction_set": "reference"}, {"op_overrides": {"prepare_linear": "reference"}}],
)
def test_no_memory_is_taken_for_weights_that_are_kept_elsewhere(arguments: dict[str, Any], tmp_path: Path) -> None:
    config = make_config(make_checkpoint("llama", tmp_path / "model"), **arguments)
    assert read_ahead(config) == Ahead()


@pytest.mark.usefixtures("small_is_large")
def test_where_a_gpu_is_expected_its_context_is_opened_and_no_memory_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    monkeypatch.setattr(ahead, "open_ahead", opened.append)
    config = make_config(make_checkpoint("llama", tmp_path / "model"))
    assert read_ahead(config).pages is not None
    assert opened == []
    with_gpu = dataclasses.replace(config.device, has_gpus=True)
    third = msgspec.structs.replace(config, device=with_gpu, replicas=dataclasses.replace(config.replicas, number=3))
    assert read_ahead(third).pages is None
    assert opened == [3]
    by_ray = msgspec.structs.replace(third, device=dataclasses.replace(with_gpu, executor="ray"))
    assert read_ahead(by_ray).pages is None
    assert opened == [3]


def test_small_models_take_no_memory_ahead(tmp_path: Path) -> None:
    assert read_ahead(make_config(make_checkpoint("llama", tmp_path / "model"))) == Ahead()


@pytest.mark.usefixtures("small_is_large")
@pytest.mark.parametrize(("quantization", "weight_bytes"), [(None, 4.0), ("int8", 1.0), ("int4", 0.5)])
def test_memory_for_a_file_of_floats_is_that_of_what_they_become(
    quantization: str | None, weight_bytes: float, tmp_path: Path
) -> None:
    path = convert(make_checkpoint("llama", tmp_path / "model"), "llama")
    config = make_config(path, quantization=quantization, dtype="float32")
    pages = read_ahead(config).pages
    assert pages is not None
    assert pages.num_bytes == int(sum(prod(each.shape) for each in read_gguf(path).tensors) * weight_bytes)


@pytest.mark.usefixtures("small_is_large")
def test_a_rank_takes_memory_for_its_share(tmp_path: Path) -> None:
    config = make_config(make_checkpoint("llama", tmp_path / "model"), dtype="float32")
    whole = read_ahead(config).pages
    device = dataclasses.replace(config.device, tensor_parallel_size=2, pipeline_parallel_size=2)
    share = read_ahead(msgspec.structs.replace(config, device=device), rank=3).pages
    assert whole is not None
    assert share is not None
    assert share.num_bytes == whole.num_bytes // 4
