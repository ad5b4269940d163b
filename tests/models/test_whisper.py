"""Whisper computes what transformers computes, however rows are cut and whatever runs beside them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.config.checkpoint import Checkpoint
from octavo.devices.cpu.runtime import CpuRuntime
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.models.encoder import library_config
from tests.conformance.runtimes import LEVELS
from tests.distributed.threads import run_ranks
from tests.fakes.checkpoints import edit_config, edit_tensors, make_checkpoint
from tests.models.loading import open_model
from tests.models.paged_run import PagedRun, Stream, load
from tests.models.test_against_transformers import assert_same_as_oracle
from tests.models.test_tensor_parallel import Rank


def sound(seed: int) -> Tensor:
    return torch.randn(8, 74, generator=torch.Generator().manual_seed(seed))


def make_stream(seed: int, length: int) -> Stream:
    ids = torch.randint(3, 130, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Stream(ids, sound=sound(seed))


class Oracle:
    """transformers, asked for the logits of a text over one sound."""

    def __init__(self, path: Path, features: Tensor) -> None:
        from transformers import WhisperForConditionalGeneration

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = WhisperForConditionalGeneration.from_pretrained(
                path, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        self.features = features

    def __call__(self, ids: Tensor) -> Any:
        return self.model(input_features=self.features[None], decoder_input_ids=ids)


@pytest.mark.parametrize("overrides", [{}, {"activation_function": "relu", "tie_word_embeddings": False}])
def test_prompts_and_greedy_text_agree(overrides: dict[str, Any], tmp_path: Path) -> None:
    path = make_checkpoint("whisper", tmp_path, **overrides)
    run, streams = PagedRun(load(path)), [make_stream(seed, length) for seed, length in enumerate((1, 9, 30, 17))]
    run.step([(stream, len(stream.token_ids)) for stream in streams[:3]])
    run.step([(streams[3], 5)])
    run.step([(streams[3], 12)])
    run.decode(streams, 12)
    for seed, stream in enumerate(streams):
        assert_same_as_oracle(Oracle(path, sound(seed)), stream)


def test_a_row_has_the_same_bits_alone_and_beside_others_that_are_encoded(tmp_path: Path) -> None:
    path = make_checkpoint("whisper", tmp_path)
    together, alone = PagedRun(load(path)), PagedRun(load(path))
    streams = [make_stream(seed, 5) for seed in range(3)]
    together.step([(stream, 5) for stream in streams[:2]])
    together.step([(streams[2], 5)])
    together.decode(streams, 4)
    single = make_stream(1, 5)
    alone.step([(single, 2)])
    alone.step([(single, 3)])
    alone.decode([single], 4)
    assert torch.equal(torch.stack(single.logits), torch.stack(streams[1].logits))


@pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")
@pytest.mark.parametrize(("dtype", "method", "size"), [(torch.float32, "int8", 2), (torch.bfloat16, None, 4)])
def test_ranks_compute_the_bits_of_one_rank(dtype: torch.dtype, method: str | None, size: int, tmp_path: Path) -> None:
    path = make_checkpoint("whisper", tmp_path)

    def work(mesh: Mesh) -> Tensor:
        rank = Rank(path, mesh, CpuRuntime.open(1, LEVELS[0]).bind(), dtype, method)
        rank.encode = rank._model.encode  # type: ignore[attr-defined]
        run, stream = PagedRun(rank, dtype=dtype), make_stream(0, 9)
        run.step([(stream, 9)])
        run.decode([stream], 5)
        return torch.stack(stream.logits)

    logits = work(Mesh.single())
    assert all(torch.equal(found, logits) for found in run_ranks(size, work))


def test_a_config_that_contradicts_its_tensors_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint("whisper", tmp_path)
    edit_config(path, max_source_positions=36)
    with pytest.raises(CheckpointError, match=r"model.encoder.embed_positions.weight has shape \[37, 32\]"):
        load(path)
    edit_config(path, max_source_positions=37, num_mel_bins=0)
    with pytest.raises(CheckpointError, match="num_mel_bins is 0"):
        open_model(Checkpoint.open(path))


def test_a_checkpoint_without_its_encoder_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint("whisper", tmp_path)
    edit_tensors(path, remove=("model.encoder.conv1.bias",))
    with pytest.raises(CheckpointError, match=r"encoder\.conv1\.bias is missing"):
        load(path)


@pytest.mark.parametrize(
    ("architecture", "extra"),
    [
        ("WhisperForConditionalGeneration", "audio"),
        ("Qwen3ASRForConditionalGeneration", "audio"),
        ("Gemma3nForConditionalGeneration", "audio,images"),
        ("LlavaForConditionalGeneration", "images"),
    ],
)
def test_without_transformers_the_extra_that_reads_the_files_is_named(
    architecture: str, extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("octavo.models.encoder.library_version", lambda: None)
    with pytest.raises(UnsupportedModel, match=rf"pip install 'octavo\[{extra}\]'"):
        library_config(Checkpoint(tmp_path, {"architectures": [architecture]}), "AnyConfig")
