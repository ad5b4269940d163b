"""The training of a head that guesses for octavo-tiny."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from octavo.config.checkpoint import Checkpoint
from octavo.models.draft_heads import EagleHead
from training.octavo_tiny.batches import RowShape
from training.octavo_tiny.draft_head import Head, loss_of, train
from training.octavo_tiny.export import load_exported

MODEL = Path(__file__).parents[2] / "octavo" / "builtin" / "octavo-tiny"
TRAINED = Path(__file__).parents[1] / "data" / "octavo-tiny-eagle"


def test_what_is_written_is_a_head_that_the_engine_reads(tmp_path: Path) -> None:
    # processors without products of bfloat16 take a minute for a batch of the usual size
    train(MODEL, tmp_path / "head", minutes=0.001, intermediate_size=32, rows=RowShape(rows=1, length=128))
    config = EagleHead.read(Checkpoint.open(tmp_path / "head"))
    assert (config.hidden_size, config.intermediate_size, config.has_embedding) == (256, 32, False)


def test_the_shipped_head_was_trained() -> None:
    model, tokenizer = load_exported(MODEL)
    ids = torch.tensor([tokenizer.encode("Once upon a time there was a little girl who had a dog.").ids])
    shape = replace(model.shape, intermediate_size=256)
    losses = []
    for is_trained in (False, True):
        head = Head(shape)
        if is_trained:
            head.load_state_dict(
                {name: each.float() for name, each in load_file(TRAINED / "model.safetensors").items()}
            )
        with torch.no_grad():
            losses.append(loss_of(head, model, ids, torch.ones_like(ids, dtype=torch.bool)).item())
    assert losses[1] < 0.5 * losses[0]


def test_the_loss_leaves_out_what_only_fills_a_row() -> None:
    model, _ = load_exported(MODEL)
    torch.manual_seed(0)
    head = Head(model.shape)
    ids, counted = torch.randint(0, 3072, (1, 12)), torch.ones(1, 12, dtype=torch.bool)
    counted[0, 8:] = False
    with torch.no_grad():
        changed = ids.clone()
        changed[0, 9:] = 5
        losses = [loss_of(head, model, each, counted).item() for each in (ids, changed)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
