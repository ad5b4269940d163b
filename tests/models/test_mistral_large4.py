"""Mistral Large 4: shared latents, learned frequencies, names of the release, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from octavo.config.checkpoint import Checkpoint
from octavo.core.model_shape import IndexedLatent
from octavo.distributed.mesh import Axis, Mesh
from octavo.errors import CheckpointError, ConfigError
from octavo.models.loader import LoadedModel
from octavo.models.registry import resolve_model
from tests.fakes.checkpoints import edit_tensors, family_config, make_checkpoint
from tests.models.paged_run import load, logits_of

TOKENS = [3 + 7 * each % 120 for each in range(40)]


def test_layers_that_read_the_latents_of_others_keep_small_keys_alone(tmp_path: Path) -> None:
    path = make_checkpoint("mistral_large4", tmp_path)
    groups = LoadedModel.open(Checkpoint.open(path), Mesh.single()).shape.cache_groups
    kept = {layer: group.keeps for group in groups for layer in group.layers}
    assert kept == {
        0: IndexedLatent(32, 24, 8, 12),
        1: IndexedLatent(24, 24, 8, 12),  # nothing turns
        3: IndexedLatent(0, 0, 8, 12),
    }
    assert [group.keeps.render() for group in groups] == [
        "a latent of 32 and a key of 8 per token",
        "a latent of 24 and a key of 8 per token",
        "a key of 8 per token",
    ]


def test_learned_numbers_change_the_frequencies_of_all_layers_that_turn(tmp_path: Path) -> None:
    path = make_checkpoint("mistral_large4", tmp_path)
    expected = logits_of(load(path), TOKENS)
    alpha = load_file(path / "model.safetensors")["lerope.alpha"]
    edit_tensors(path, **{"lerope.alpha": alpha + 0.1})
    changed = logits_of(load(path), TOKENS)
    assert torch.equal(changed[0], expected[0])  # the first position turns by nothing
    assert not torch.allclose(changed[1:], expected[1:], atol=1e-3)


def test_draft_layers_of_the_release_are_left_out(tmp_path: Path) -> None:
    path = make_checkpoint("mistral_large4", tmp_path)
    expected = logits_of(load(path), TOKENS)
    edit_tensors(path, **{"mtp_dspark.layers.0.attention_norm.weight": torch.ones(32)})
    assert torch.equal(logits_of(load(path), TOKENS), expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_source_layers", [0, 1, 1, 1, 1]),  # whose key does not turn
        ("kv_source_layers", [0, 1, 0, 3, 4, 5]),
        ("kv_source_layers", [0, 1, 2, 4, 4]),
        ("kv_source_layers", [0, 1, 0, 1, 3]),
        ("kv_source_layers", [0, -4, 2, 3, 4]),
        ("no_rope_layers", [1, 0, 1]),
        ("no_rope_layers", [1, 0, 1, 0, 2]),
        ("index_topk", 0),
        ("index_head_dim", 4),
        ("indexer_types", ["shared", "full", "full", "full", "full"]),
        ("layer_types", ["full_attention"] * 5),
        ("final_logit_softcapping", 0.0),
        ("rope_parameters", None),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(name: str, value: Any) -> None:
    def read() -> None:
        checkpoint = Checkpoint(Path(), {**family_config("mistral_large4").to_dict(), name: value})
        resolve_model(checkpoint, reads_images=False).read(checkpoint)

    with pytest.raises(CheckpointError, match=name):
        read()


def test_a_stage_has_the_latents_that_its_layers_read(tmp_path: Path) -> None:
    path = make_checkpoint("mistral_large4", tmp_path, indexer_types=["full"] * 5)
    with pytest.raises(ConfigError, match="layer 3 reads the keys and values of layer 1"):
        LoadedModel.open(Checkpoint.open(path), Mesh(pipeline=Axis(1, 2)))
