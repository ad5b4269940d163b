"""A model whose ranks share every layer computes the bits of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.devices.cpu.runtime import CpuRuntime
from octavo.devices.reference.attention import ReferenceBackend
from octavo.distributed.mesh import Mesh
from octavo.errors import ConfigError
from octavo.layers.layer import Binding
from octavo.models.loader import LoadedModel
from octavo.ops.registry import Ops, bind
from octavo.quantization.registry import method_named
from tests.conformance.runtimes import LEVELS
from tests.distributed.threads import ThreadCollectives, run_on, run_ranks, thread_meshes
from tests.fakes import families as fakes
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.families import ALTERNATING
from tests.models.paged_run import generated, logits_of

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 with windows": ("qwen3", ALTERNATING),
    "gpt2 untied": ("gpt2", {"tie_word_embeddings": False}),
    "opt with late norms and projections": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "bamba": ("bamba", {"mamba_n_groups": 4}),
    "cohere": ("cohere", {"use_qk_norm": True}),
    "ernie4_5": ("ernie4_5", {"use_bias": True}),
    "mamba2": ("mamba2", {"n_groups": 4}),
    "stablelm": ("stablelm", {"qk_layernorm": True}),
    "youtu": ("youtu", {"attention_bias": True}),
    "zamba2": ("zamba2", {"mamba_ngroups": 4}),
    "falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
}
PLAIN = (
    *("apertus", "apertus1p5", "arcee", "bitnet", "bloom", "codegen", "cohere2", "cwm", "deepseek_v2", "deepseek_v3"),
    *("deepseek_v32", "exaone", "exaone4", "falcon_h1", "falcon_mamba", "gemma", "gemma2", "gemma3", "gemma3n"),
    *("gemma4", "glm", "glm4", "glm4_moe_lite", "glm_moe_dsa", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox"),
    *("gpt_oss", "gptj", "granite", "granite_swa", "helium", "hunyuan_v1_dense", "hyperclovax", "jais2"),
    *("jamba", "lfm2", "lfm3", "llama", "mamba", "minicpm", "minicpm3", "minimax", "ministral"),
    *("ministral3", "modernbert-decoder"),
    *("mistral", "mixtral", "mpt", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmo_hybrid", "opt"),
    *("phi", "phi3", "qwen2", "qwen2_moe", "qwen3_5", "qwen3_moe", "seed_oss", "smollm3", "starcoder2"),
    *("muse_glimmer", "nemotron-nas", "phi4_multimodal", "vaultgemma"),
)
FAMILIES |= {family: (family, {}) for family in PLAIN}
PLAIN_MIXTURES = (
    *(
        "afmoe",
        "aria_text",
        "axk1",
        "axk2",
        "bailing_hybrid",
        "bailing_moe_v2",
        "bailing_moe_v2_5",
        "cohere2_moe",
        "dbrx",
        "deepseek_v4",
        "dots1",
        "ernie4_5_moe",
        "ernie4_5_vl_moe",
    ),
    *("exaone_moe", "flex_olmo", "flint", "gemma4_moe", "glm4_moe", "glm5_next", "granitemoe", "granitemoe_swa"),
    *("granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hy_v4", "jamba", "kimi_linear", "kolibri1", "laguna", "lfm2_moe"),
    *("inkling", "llama4", "minimax_m3_vl"),
    *("longcat_flash", "mellum", "mimo_v2_flash", "minimax_m2", "mistral4", "mistral_large4", "mixtral", "olmoe"),
    "phimoe",
    *("qwen2_moe", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen4_exp", "sarvam_mla", "solar_open", "step3p5"),
)
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {family: (family, {}) for family in PLAIN_MIXTURES}
MIXTURES["granitemoehybrid"] = ("granitemoehybrid", {"mamba_n_groups": 4})
MIXTURES["nemotron_h"] = ("nemotron_h", {"n_groups": 4})
MIXTURES["nemotron_h with latent experts"] = ("nemotron_h", {"n_groups": 4, "moe_latent_size": 20})
"""Mixtures of experts, whose layer packs each weight when it arrives."""
WAYS = [("float32", None, 2), ("bfloat16", None, 4), ("float32", "int8", 4), ("bfloat16", "int4", 2)]


def each_family(ways: Sequence[Any], families: Mapping[str, tuple[str, dict[str, Any]]] = FAMILIES) -> Any:
    """Every family in one way; some in every way, of which all but llama's are run with the long tests."""
    cases = []
    for place, (name, (family, overrides)) in enumerate(families.items()):
        for number, way in enumerate(ways):
            is_quick = number == place % len(ways) or name == "llama"
            if is_quick or family in fakes.ALWAYS:
                marks = () if is_quick else pytest.mark.long
                cases.append(pytest.param(family, overrides, way, marks=marks, id=f"{name} {way}"))
    return pytest.mark.parametrize(("family", "overrides", "way"), cases)


class Rank:
    """The model of one rank, called like a whole one."""

    def __init__(
        self, path: Path, mesh: Mesh, ops: Ops, dtype: torch.dtype = torch.float32, method: str | None = None
    ) -> None:
        opened = LoadedModel.open(Checkpoint.open(path), mesh, dtype, method_named(method))
        self._shape = opened.shape
        self._mesh = mesh
        self._model = opened.load(ops, ReferenceBackend(dtype))
        self.config = self

    def shape(self) -> Any:
        return self._shape

    def __call__(self, batch: ModelInput) -> Tensor:
        return self._model(batch)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._mesh.gather(self._model.compute_logits(hidden))[:, : self._shape.vocab_size]


@pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")
@each_family(WAYS, FAMILIES | MIXTURES)
def test_ranks_compute_the_bits_of_one_rank(
    family: str, overrides: dict[str, Any], way: tuple[str, str | None, int], tmp_path: Path
) -> None:
    dtype, method, size = way
    path, numbers = make_checkpoint(family, tmp_path, **overrides), getattr(torch, dtype)

    def work(mesh: Mesh) -> tuple[list[list[int]], Tensor]:
        runtime = CpuRuntime.open(1, LEVELS[size % 3 % len(LEVELS)])
        return generated(Rank(path, mesh, runtime.bind(), numbers, method), numbers)

    tokens, logits = work(Mesh.single())
    for found_tokens, found_logits in run_ranks(size, work):
        assert found_tokens == tokens
        assert torch.equal(found_logits, logits)


@pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")
@pytest.mark.parametrize(
    ("family", "overrides", "way"),
    [
        ("qwen2_moe", {}, ("bfloat16", "int8", 2)),
        ("deepseek_v3", {}, ("float32", "int4", 2)),
        ("gpt_oss", {}, ("bfloat16", None, 2)),
        ("mixtral", {"num_local_experts": 8}, ("float32", None, 4)),
    ],
)
def test_ranks_that_share_whole_experts_compute_the_bits_of_one_rank(
    family: str, overrides: dict[str, Any], way: tuple[str, str | None, int], tmp_path: Path
) -> None:
    dtype, method, size = way
    path, numbers = make_checkpoint(family, tmp_path, **overrides), getattr(torch, dtype)

    def work(mesh: Mesh) -> tuple[list[list[int]], Tensor]:
        return generated(Rank(path, mesh, CpuRuntime.open(1, LEVELS[-1]).bind(), numbers, method), numbers)

    tokens, logits = work(Mesh.single())
    for found_tokens, found_logits in run_on(thread_meshes(size, whole_experts=True), work):
        assert found_tokens == tokens
        assert torch.equal(found_logits, logits)


def test_whole_experts_are_named_by_rank_and_refused_where_there_are_none(tmp_path: Path) -> None:
    places = [Mesh.of_rank(rank, tensor=2, whole_experts=True) for rank in range(2)]
    checkpoint = Checkpoint.open(make_checkpoint("mixtral", tmp_path / "sparse", num_local_experts=8))
    shares = [LoadedModel.open(checkpoint, place).share() for place in places]
    assert [share.render().rpartition(", ")[2] for share in shares if share] == ["experts 0-3 of 8", "experts 4-7 of 8"]
    assert places[1].description == "1 of 2, whole experts"
    with pytest.raises(ConfigError, match="tensor_parallel_size is 3, must divide the .* of this model"):
        LoadedModel.open(checkpoint, Mesh.of_rank(0, tensor=3, whole_experts=True))
    with pytest.raises(ConfigError, match="enable_expert_parallel is set, but this model has no experts"):
        LoadedModel.open(Checkpoint.open(make_checkpoint("llama", tmp_path / "dense")), places[0])


@each_family(["gather", "sum"])
def test_a_rank_reads_only_its_shares(family: str, overrides: dict[str, Any], way: Any, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_checkpoint(family, tmp_path, **overrides))
    read = dict.fromkeys((1, 4), 0)
    for size in read:
        opened = LoadedModel.open(
            checkpoint, replace(Mesh.of_rank(1, tensor=size) if size > 1 else Mesh.single(), reduce=way)
        )
        for path, layer in opened.model.layers_by_path():
            layer.bind(Binding(bind(), ReferenceBackend()))
            for slot in layer.tensor_slots(path):
                stored = torch.full(slot.shape, torch.nan)
                for part in slot.parts:
                    stored[part] = 1.0
                read[size] += int((stored == 1).sum())
                if slot.required:
                    slot.fill(stored)
            kept = (each for each in layer.parameters(recurse=False) if not each.is_meta)
            assert not any(each.isnan().any() for each in kept)
    # norms, positions, projections of narrow embeddings and indexers are whole on every rank
    wholes = ("gpt_oss", "opt", "gpt2", "gpt_bigcode", "gpt_neo", "deepseek_v32", "glm_moe_dsa")
    assert read[4] < read[1] * (0.75 if family in wholes else 0.35)


def test_every_family_is_shared_by_ranks() -> None:
    assert {family for family, _ in (FAMILIES | MIXTURES).values()} == set(fakes.FAMILIES)


def test_partial_sums_of_ranks_agree_with_one_rank(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)

    def work(mesh: Mesh) -> Tensor:
        return logits_of(Rank(path, mesh, bind()), range(3, 24), dtype=torch.float32)

    summed = run_on([replace(mesh, reduce="sum") for mesh in thread_meshes(2)], work)
    torch.testing.assert_close(summed[0], work(Mesh.single()))
    assert torch.equal(*summed)


@pytest.mark.parametrize(
    ("size", "overrides", "message"),
    [
        (3, {}, "tensor_parallel_size is 3, must divide the 4 attention heads of this model; choose a size that does"),
        (
            4,
            {"intermediate_size": 58},
            "tensor_parallel_size is 4, must divide the 58 outputs of a layer of this model",
        ),
    ],
)
def test_unshareable_models_are_refused(size: int, overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_checkpoint("llama", tmp_path, **overrides))
    with pytest.raises(ConfigError, match=message):
        LoadedModel.open(checkpoint, Mesh.of_rank(0, tensor=size))


class Dropping(ThreadCollectives):
    """A group whose call number `drop` returns this rank's own part in place of the result."""

    drop = -1
    count = 0

    def gather(self, share: Tensor) -> Tensor:
        found = super().gather(share)
        return torch.cat([share] * self.size, -1) if self._drops() else found

    def sum(self, partial: Tensor) -> Tensor:
        found = super().sum(partial)
        return partial if self._drops() else found

    def _drops(self) -> bool:
        self.count += 1
        return self.count == self.drop


def test_every_collective_is_needed(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, num_hidden_layers=1)

    def work(mesh: Mesh) -> Tensor:
        return logits_of(Rank(path, mesh, bind()), range(3, 24), dtype=torch.float32)

    def dropped(number: int) -> Tensor:
        meshes = thread_meshes(2)
        for mesh in meshes:
            assert isinstance(mesh.tensor_group, ThreadCollectives)
            mesh.tensor_group.__class__ = Dropping
            mesh.tensor_group.drop = number  # type: ignore[attr-defined]
        return run_on(meshes, work)[0]

    whole = dropped(0)
    calls = 1 + 4 + 1  # the embedding, four gathers of the layer, the logits
    assert all(not torch.equal(dropped(number), whole) for number in range(1, calls + 1))
    assert torch.equal(dropped(calls + 1), whole)
