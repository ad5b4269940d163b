"""Ling 3.0: names of tensors in memory are read too, decays follow the config's bound, and others are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo.errors import CheckpointError, UnsupportedModel
from tests.fakes.checkpoints import edit_config, make_checkpoint, rename_tensors
from tests.models.paged_run import load, logits_of


def logits(path: Path) -> torch.Tensor:
    return logits_of(load(path), [5, 9, 77, 30])


def test_other_names_and_the_bound_of_decays(tmp_path: Path) -> None:
    path = make_checkpoint("bailing_hybrid", tmp_path)
    expected, layer = logits(path), "model.layers.0."
    for name in ("A_log", "dt_bias", "f_proj."):
        rename_tensors(path, f"{layer}attention.{name}", f"{layer}self_attn.forget_gate.{name}")
    rename_tensors(path, f"{layer}attention.dense.", f"{layer}self_attn.o_proj.")
    rename_tensors(path, "model.word_embeddings.", "model.embed_tokens.")
    # the release has the size of these layers' heads alone, and the kinds of layers follow from the size of a group
    left_out = ("layer_types", "linear_conv_kernel_dim", "linear_head_dim", "linear_num_heads", "mlp_layer_types")
    edit_config(path, left_out, head_dim=12)
    assert torch.equal(logits(path), expected)
    edit_config(path, kda_lower_bound=-1.0)
    assert not torch.equal(logits(path), expected)
    edit_config(path, kda_lower_bound=0.0)
    with pytest.raises(CheckpointError, match="kda_lower_bound is 0"):
        load(path)
    edit_config(path, kda_lower_bound=-5.0, kda_safe_gate=False)
    with pytest.raises(UnsupportedModel, match="kda_safe_gate is false, expected true"):
        load(path)
