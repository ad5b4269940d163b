"""Decoders of ModernBERT are read as their releases have them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo.errors import CheckpointError
from tests.fakes.checkpoints import edit_config, make_checkpoint
from tests.models.paged_run import load, logits_of


def logits(path: Path) -> torch.Tensor:
    return logits_of(load(path), [5, 9, 77, 30])


def test_ettin_as_the_hub_has_it(tmp_path: Path) -> None:
    """Its layers follow from a number, and the bases of both kinds of layers stand beside each other."""
    path = make_checkpoint("modernbert-decoder", tmp_path)
    expected = logits(path)
    released = {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    edit_config(path, ("layer_types", "rope_parameters", "sliding_window"), **released)
    assert torch.equal(logits(path), expected)
    edit_config(path, local_rope_theta=160000.0)
    assert not torch.equal(logits(path), expected)
    edit_config(path, decoder_bias=False)
    with pytest.raises(CheckpointError, match=r"decoder\.bias|token_bias\.bias"):
        load(path)
