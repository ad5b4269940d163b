"""A decoder in stages computes what the whole one computes; embeddings may come from outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.attention.metadata import AttentionMetadata, EmbeddingOverride, ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.devices.reference.attention import ReferenceBackend
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, ConfigError
from octavo.models.decoder import DecoderStack
from octavo.models.loader import LoadedModel
from octavo.ops.registry import bind
from tests.conformance.runtimes import LEVELS, ops
from tests.fakes.checkpoints import edit_tensors, make_checkpoint
from tests.fakes.families import ALWAYS
from tests.layers.bound import apart, random
from tests.models.loading import load_model
from tests.models.paged_run import BLOCK_SIZE, PagedRun, Stream, generated, load

WINDOW_IN_ONE = ["full_attention", "sliding_attention", "full_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 with a window in one layer": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 7, "layer_types": WINDOW_IN_ONE},
    ),
    "granite": ("granite", {"tie_word_embeddings": True}),
    "jamba": ("jamba", {}),
    "kimi_linear": ("kimi_linear", {}),
    "mamba": ("mamba", {}),
    "minimax": ("minimax", {}),
    "olmo2": ("olmo2", {}),
    "olmo_hybrid": ("olmo_hybrid", {}),
    "phi": ("phi", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "gpt2": ("gpt2", {}),
    "gpt2 untied": ("gpt2", {"tie_word_embeddings": False}),
    "opt": ("opt", {}),
    "opt with late norms and projections": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
}
CUTS = [(0, 1, 3), (0, 2, 3), (0, 1, 2, 3)]
each_family = pytest.mark.parametrize(("family", "overrides"), FAMILIES.values(), ids=FAMILIES.keys())


@dataclass(frozen=True, slots=True)
class Stage(Mesh):
    """The rank of a stage with the layers from `first` to `last`, this one excluded."""

    first: int = 0
    last: int = 1

    def layer_range(self, num_layers: int) -> range:
        return range(self.first, self.last)


class Stages:
    """Stages of one model in one process, called like a model."""

    def __init__(self, stages: Sequence[DecoderStack]) -> None:
        self._stages = stages
        self.config = stages[0].config
        self.compute_logits = stages[-1].compute_logits

    def __call__(self, batch: ModelInput) -> Tensor:
        result: Any = None
        for stage in self._stages:
            own = stage.layer_range
            result = stage(replace(batch, kv_caches=batch.kv_caches[own.start : own.stop], received=result))
        assert isinstance(result, Tensor)
        return result


def load_stages(path: Path, *cuts: int) -> list[DecoderStack]:
    return [load(path, mesh=Stage(first=first, last=last)) for first, last in pairwise(cuts)]


@pytest.mark.parametrize(
    ("family", "overrides", "cuts"),
    [
        pytest.param(family, overrides, cuts, id=f"{name} {cuts}")
        for place, (name, (family, overrides)) in enumerate(FAMILIES.items())
        for cuts in (CUTS if name in ALWAYS else [CUTS[place % len(CUTS)]])
    ],
)
def test_stages_compute_what_one_stage_computes(
    family: str, overrides: dict[str, Any], cuts: tuple[int, ...], tmp_path: Path
) -> None:
    path = make_checkpoint(family, tmp_path, num_hidden_layers=3, **overrides)
    tokens, logits = generated(load(path))
    found_tokens, found_logits = generated(Stages(load_stages(path, *cuts)))
    assert found_tokens == tokens
    assert torch.equal(found_logits, logits)


@pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_stages_of_compiled_kernels_compute_what_one_stage_computes(family: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_checkpoint(family, tmp_path, num_hidden_layers=3))
    whole, first, last = (
        load_model(checkpoint, mesh=mesh, dtype=torch.bfloat16, backend=ReferenceBackend(), ops=ops(LEVELS[0]))
        for mesh in (Mesh.single(), Mesh.of_rank(0, pipeline=2), Mesh.of_rank(1, pipeline=2))
    )
    tokens, logits = generated(whole, torch.bfloat16)
    found_tokens, found_logits = generated(Stages([first, last]), torch.bfloat16)
    assert (len(first.layer_range), len(last.layer_range)) == (2, 1)
    assert found_tokens == tokens
    assert torch.equal(found_logits, logits)


@each_family
def test_a_stage_keeps_its_own_tensors_alone(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path, num_hidden_layers=3, **overrides)
    whole = load(path).state()
    held = [stage.state() for stage in load_stages(path, 0, 1, 2, 3)]
    assert {name for state in held for name in state} == set(whole)
    for state in held:
        assert all(torch.equal(tensor, whole[name]) for name, tensor in state.items())
    twice = sum(len(state) for state in held) - len(whole)
    assert twice == (1 if load(path).config.tied else 0)  # the last stage multiplies by the table of a tied embedding
    assert sum(each.nbytes for each in held[1].values()) < sum(each.nbytes for each in whole.values()) / 2


def test_a_stage_looks_after_its_own_layers(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, num_hidden_layers=3)
    edit_tensors(path, **{"model.layers.0.extra.weight": torch.ones(2)})
    load_stages(path, 1, 3)
    with pytest.raises(CheckpointError, match=r"model.layers.0.extra.weight is left over"):
        load_stages(path, 0, 1)
    edit_tensors(path, remove=("model.layers.0.extra.weight", "model.layers.2.mlp.up_proj.weight"))
    load_stages(path, 0, 2)
    with pytest.raises(CheckpointError, match=r"layers.2.mlp.up_proj.weight is missing"):
        load_stages(path, 1, 3)
    edit_tensors(path, **{"model.layers.3.mlp.up_proj.weight": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"model.layers.3.mlp.up_proj.weight is left over"):
        load_stages(path, 0, 2)


def batch_of(model: DecoderStack, tokens: Sequence[int], embeddings: EmbeddingOverride | None = None) -> ModelInput:
    attention = AttentionMetadata.build([len(tokens)], [len(tokens)], [list(range(1, 9))], BLOCK_SIZE)
    groups = len(model.config.shape().cache_groups)
    return ModelInput(
        torch.tensor(tokens),
        torch.arange(len(tokens)),
        [attention] * groups,
        PagedRun(model).caches,
        embeddings=embeddings,
    )


@each_family
def test_embeddings_may_come_from_outside(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    (model,) = load_stages(make_checkpoint(family, tmp_path, num_hidden_layers=3, **overrides), 0, 3)
    assert model.embed_tokens is not None
    tokens, places = [5, 9, 77, 31, 8], torch.tensor([3, 1])
    expected = model(batch_of(model, tokens))
    override = EmbeddingOverride(places, model.embed_tokens(torch.tensor([31, 9])))
    assert torch.equal(model(batch_of(model, [5, 0, 77, 0, 8], override)), expected)
    other = EmbeddingOverride(places, override.values.flip(0))
    assert torch.equal(model(batch_of(model, tokens, other)), model(batch_of(model, [5, 31, 77, 9, 8])))


def test_narrow_embeddings_are_projected_whole_on_each_of_two_ranks(tmp_path: Path) -> None:
    path = make_checkpoint("opt", tmp_path, do_layer_norm_before=False, word_embed_proj_dim=16)
    narrow, wide = random(3, 16), random(3, 32)
    alone: Any = load(path)
    for rank in range(2):
        model: Any = load(path, mesh=apart(rank, 2))
        assert torch.equal(model.project_in(narrow), alone.project_in(narrow))
        assert torch.equal(model.project_out(wide), alone.project_out(wide))
        assert model.layers["0"].mlp.up_proj(wide).shape == (3, 24)
        assert model.compute_logits(wide).shape == (3, 65)


def test_the_noted_stream_is_that_of_layers_which_hand_on_something_else(tmp_path: Path) -> None:
    opened = LoadedModel.open(Checkpoint.open(make_checkpoint("gemma4", tmp_path)), Mesh.single(), torch.float32)
    opened.model.note_layers((1,))
    model, found = opened.load(bind(), ReferenceBackend()), []
    forward, first = model.forward, model.layers["0"].forward
    model.layers["0"].forward = lambda *inputs: found.append(first(*inputs)) or found[0]  # type: ignore[func-returns-value,method-assign]
    model.forward = lambda batch: found.append(forward(batch)) or found[1].hidden  # type: ignore[func-returns-value,method-assign]
    PagedRun(model).step([(Stream([5, 9, 77]), 3)])
    assert torch.equal(found[1].streams[0], found[0][0])


def test_a_model_of_several_streams_has_none_for_a_head(tmp_path: Path) -> None:
    opened = LoadedModel.open(Checkpoint.open(make_checkpoint("gemma3n", tmp_path)), Mesh.single(), torch.float32)
    with pytest.raises(ConfigError, match="speculative_config"):
        opened.model.note_layers((1,))
