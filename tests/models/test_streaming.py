"""Loading layer by layer: the same model in the memory of its packed weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError
from octavo.models.decoder import DecoderStack
from octavo.ops.registry import bind
from tests.fakes.checkpoints import edit_tensors, make_checkpoint, to_pytorch_archive
from tests.fakes.padded_format import padded_ops
from tests.models.loading import open_model
from tests.models.paged_run import load, logits_of
from tests.models.peak import needs_peak, peak_of_loading

FAMILIES = ("llama", "qwen3", "mistral", "opt", "gpt2")
PLAIN = bind()


@pytest.mark.parametrize("dummy_seed", [None, 0], ids=["checkpoint", "dummy"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_model_answers_as_the_plain_one_and_takes_what_was_planned(
    family: str, dummy_seed: int | None, tmp_path: Path
) -> None:
    path = make_checkpoint(family, tmp_path)
    plain, packed = (load(path, ops=ops, dummy_seed=dummy_seed) for ops in (PLAIN, padded_ops()))
    assert torch.equal(logits_of(packed, num_decoded=3), logits_of(plain, num_decoded=3))
    skeleton = open_model(Checkpoint.open(path), Mesh.single())
    for ops, model in ((PLAIN, plain), (padded_ops(), packed)):
        assert skeleton.planned_bytes(ops) == sum(tensor.nbytes for tensor in model.state().values())
    assert skeleton.planned_bytes(padded_ops()) > skeleton.planned_bytes(PLAIN) == skeleton.plain_bytes()


@pytest.mark.parametrize("archive", [False, True], ids=["safetensors", "archive"])
def test_layers_whose_tensors_lie_in_different_files_wait_for_them(archive: bool, tmp_path: Path) -> None:
    whole = make_checkpoint("llama", tmp_path / "whole")
    pieces = make_checkpoint("llama", tmp_path / "pieces", max_shard_size="9KB")
    assert len(list(pieces.glob("*.safetensors"))) > 5
    if archive:
        to_pytorch_archive(whole)
    expected, found = load(whole, ops=padded_ops()).state(), load(pieces, ops=padded_ops()).state()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_nothing_of_the_file_is_kept(tmp_path: Path) -> None:
    path = make_checkpoint("opt", tmp_path)
    model = load(path, ops=PLAIN)
    before = logits_of(model, num_decoded=3)
    with (path / "model.safetensors").open("r+b") as file:
        file.write(bytes((path / "model.safetensors").stat().st_size))
    assert torch.equal(logits_of(model, num_decoded=3), before)


@pytest.mark.parametrize("is_last", [False, True])
def test_a_repeated_table_is_compared_whether_it_comes_first_or_last(is_last: bool, tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, tie_word_embeddings=True)
    file = path / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    table = tensors["model.embed_tokens.weight"]

    def store(head: torch.Tensor) -> None:
        files = [("1.safetensors", tensors), ("2.safetensors", {"lm_head.weight": head})]
        places = {
            name: place for place, (_, part) in zip("12" if is_last else "21", files, strict=True) for name in part
        }
        for _, part in files:
            save_file(part, path / f"{places[next(iter(part))]}.safetensors")
        index = {"weight_map": {name: f"{place}.safetensors" for name, place in places.items()}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))

    store(table.clone())
    assert "lm_head.packed" not in load(path, ops=padded_ops()).state()
    store(table + 1)
    with pytest.raises(CheckpointError, match=rf"{path}: lm_head\.weight differs .* tie_word_embeddings"):
        load(path, ops=padded_ops())


def test_a_tensor_that_is_stored_twice_is_named(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    edit_tensors(path, **{"norm.weight": torch.ones(32)})
    with pytest.raises(
        CheckpointError, match=r"holds (model\.)?norm\.weight, which came before as (model\.)?norm\.weight"
    ):
        load(path, ops=PLAIN)


def load_for_peak(path: Path, dummy_seed: str = "") -> DecoderStack:
    return load(path, ops=padded_ops(), dummy_seed=int(dummy_seed) if dummy_seed else None)


@needs_peak
@pytest.mark.parametrize(
    "options", [pytest.param((), id="checkpoint"), pytest.param(("0",), id="dummy", marks=pytest.mark.long)]
)
def test_the_peak_is_the_packed_weights_and_the_layers_in_between(options: tuple[str, ...], tmp_path: Path) -> None:
    _, weights, peak, after = peak_of_loading(tmp_path, __name__, *options)
    assert weights > 120 << 20
    largest = 4 * 4096 * 512 * 4  # gate and up, plain and packed
    assert peak <= weights + largest + (16 << 20), f"{peak - weights:,} above the packed weights"
    assert after <= weights + (24 << 20), f"{after - weights:,} above the packed weights"
