"""DeepSeek V3.2 and GLM-5: when tokens are chosen, by which layers, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.attention.backend import cache_layout
from octavo.config.args import EngineArgs
from octavo.config.checkpoint import Checkpoint
from octavo.config.resolve import resolve
from octavo.core.model_shape import IndexedLatent, Latent
from octavo.devices.cuda.device import CudaDevice
from octavo.devices.reference.attention import ReferenceBackend
from octavo.devices.support import FEATURES
from octavo.distributed.mesh import Axis, Mesh
from octavo.errors import CheckpointError, ConfigError
from octavo.models.loader import LoadedModel
from tests.config.test_resolve import PLATFORM
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import edit_config, make_checkpoint
from tests.models.loading import read_config
from tests.models.paged_run import load, logits_of

TOKENS = [3 + 7 * each % 120 for each in range(40)]
TOPK = 12
"""`index_topk` of `make_checkpoint`."""


def logits(path: Path) -> torch.Tensor:
    return logits_of(load(path), TOKENS)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_the_choice_counts_from_the_first_token_on_that_is_not_chosen(family: str, tmp_path: Path) -> None:
    chosen = logits(make_checkpoint(family, tmp_path / "chosen"))
    whole = logits(make_checkpoint(family, tmp_path / "whole", index_topk=200))
    assert torch.equal(chosen[:TOPK], whole[:TOPK])
    assert all(not torch.equal(*pair) for pair in zip(chosen[TOPK:], whole[TOPK:], strict=True))


def test_short_contexts_keep_latents_alone_and_have_the_same_text(tmp_path: Path) -> None:
    path = write_byte_tokenizer(make_checkpoint("glm_moe_dsa", tmp_path, vocab_size=300, index_topk=64))
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    found = []
    for length, keeps in ((64, Latent), (65, IndexedLatent)):
        with LLM(str(path), dtype="float32", max_model_len=length, block_size=16) as llm:
            found.append([each.outputs[0].token_ids for each in llm.generate([TOKENS, TOKENS[:5]], params)])
        checkpoint = Checkpoint.open(path)
        checkpoint.served_len = length
        (group,) = LoadedModel.open(checkpoint, Mesh.single()).shape.cache_groups
        assert isinstance(group.keeps, keeps)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"index_topk_pattern": "FSS"},
        {"index_topk_pattern": ["full", "shared", "shared"]},
        {"index_topk_freq": 3, "index_skip_topk_offset": 1},
    ],
)
def test_which_layers_choose_is_stated_in_several_ways(changes: dict[str, Any], tmp_path: Path) -> None:
    path = make_checkpoint("glm_moe_dsa", tmp_path, indexer_types=["full", "shared", "shared"])
    expected = logits(path)
    edit_config(path, remove=("indexer_types",), **changes)
    assert torch.equal(logits(path), expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("index_head_dim", 6),
        ("index_topk", 0),
        ("index_n_heads", 0),
        ("q_lora_rank", None),
        ("indexer_types", ["shared", "full", "full"]),
        ("indexer_types", ["full", "full"]),
        ("indexer_types", ["full", "other", "full"]),
        ("layer_types", ["sliding_attention"] * 3),
    ],
)
def test_what_no_model_has_is_refused_by_name(name: str, value: Any, tmp_path: Path) -> None:
    path = make_checkpoint("glm_moe_dsa", tmp_path)
    edit_config(path, **{name: value})
    with pytest.raises(CheckpointError, match=name):
        read_config(path)


def test_a_stage_begins_with_a_layer_that_chooses(tmp_path: Path) -> None:
    path = make_checkpoint("glm_moe_dsa", tmp_path, indexer_types=["full", "full", "shared"])
    checkpoint = Checkpoint.open(path)
    LoadedModel.open(checkpoint, Mesh(pipeline=Axis(0, 2)))
    with pytest.raises(
        ConfigError, match=r"pipeline_parallel_size: layer 2 attends to the tokens that layer 1 chooses"
    ):
        LoadedModel.open(checkpoint, Mesh(pipeline=Axis(2, 3)))


def test_contexts_beyond_the_choice_are_refused_on_cuda_alone(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_checkpoint("deepseek_v32", tmp_path))
    wanted = FEATURES["chosen_tokens"].wanted
    assert wanted(resolve(EngineArgs(), checkpoint, PLATFORM))
    assert not wanted(resolve(EngineArgs(max_model_len=TOPK), checkpoint, PLATFORM))
    assert "chosen_tokens" in CudaDevice.lacks


def test_latents_of_chosen_tokens_are_not_in_the_codes_of_a_quantised_cache() -> None:
    for dtype, expected in ((torch.float32, torch.float32), (torch.int8, torch.bfloat16)):
        layout = cache_layout(ReferenceBackend(dtype), IndexedLatent(24, 16, 8, 12), 5, 16)
        assert layout.shape == (1, 5, 16 * (24 + 8))
        assert layout.dtype == expected


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4"])
def test_text_is_generated_with_a_quantised_cache(family: str, device: str, tmp_path: Path) -> None:
    path = write_byte_tokenizer(make_checkpoint(family, tmp_path, vocab_size=300))
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with LLM(str(path), device=device, kv_cache_dtype="int8", max_model_len=96, block_size=16) as llm:
        both = llm.generate([TOKENS, TOKENS[:5]], params)
        alone = [llm.generate(each, params)[0] for each in (TOKENS, TOKENS[:5])]
    assert [each.outputs[0].token_ids for each in both] == [each.outputs[0].token_ids for each in alone]
