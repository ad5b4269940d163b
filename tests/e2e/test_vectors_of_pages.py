"""Models for pages make the vectors of transformers' classes, with the positions and masks of the models within."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM
from octavo.config.args import EngineArgs
from octavo.config.checkpoint import Checkpoint
from octavo.config.media.images import image_settings
from octavo.config.pooling.read_pooling import pooling_config
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.multimodal.image_prompts import ImagePrompts
from tests.fakes.checkpoints import edit_config, edit_tensors, rename_tensors
from tests.fakes.vision import fill_randomly, image, make_vision_checkpoint, write_tokenizer
from tests.fakes.vision_families import FAMILIES

LONG = pytest.mark.long
ARGS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 64}
PAGE: dict[str, Any] = {"prompt": "w1 <image> w2", "multi_modal_data": {"image": image(0)}}


def make_retriever(path: Path, family: str, architecture: str) -> Any:
    """Write a random model of a class of transformers, and return it."""
    import transformers

    config, processor = FAMILIES[family][0]()
    around = getattr(transformers, architecture.replace("ForRetrieval", "Config"))(vlm_config=config, embedding_dim=24)
    model = getattr(transformers, architecture)._from_config(around, attn_implementation="eager").eval()
    fill_randomly(model)
    model.save_pretrained(path)
    processor.save_pretrained(path)
    write_tokenizer(path)
    edit_config(path, architectures=[architecture])
    return model


def given_to(model: Any, path: Path, ids: torch.Tensor, has_image: bool) -> dict[str, Any]:
    """What transformers' class is given beside the tokens."""
    checkpoint = Checkpoint.open(path)
    inputs: dict[str, Any] = {}
    if has_image:
        settings = image_settings(checkpoint)
        assert settings is not None
        processor = ImagePrompts(checkpoint, settings, lambda _: [], {"image": 16})
        arrays = processor.arrays(image(0))
        inputs = {name: torch.from_numpy(arrays[name]) for name in processor.writer.reads}
    if checkpoint.architecture.startswith("PaliGemma"):
        return inputs | {"token_type_ids": torch.zeros_like(ids)}
    if has_image:  # positions are left out by transformers 5.24, and are there in training
        kinds = (ids == checkpoint.stored.int("image_token_id")).int()
        grid = inputs["image_grid_thw"]
        inputs["position_ids"] = model.vlm.get_rope_index(ids, image_grid_thw=grid, mm_token_type_ids=kinds)[0]
        inputs["pixel_values"] = inputs["pixel_values"][None]
    return inputs


@pytest.mark.parametrize(
    ("family", "architecture", "end"),
    [
        ("qwen2_vl", "ColQwen2ForRetrieval", [0] * 10),
        pytest.param("qwen2_5_vl", "ColQwen2ForRetrieval", [0] * 10, marks=LONG),
        pytest.param("paligemma", "ColPaliForRetrieval", [0] * 10, marks=LONG),
    ],
)
def test_vectors_of_texts_and_pages_are_those_of_transformers(
    tmp_path: Path, family: str, architecture: str, end: list[int]
) -> None:
    model = make_retriever(tmp_path, family, architecture)
    with LLM(str(tmp_path), **ARGS) as llm:
        together = llm.encode(["w1 w2 w3", PAGE])
        for output in together:
            ids = torch.tensor([output.prompt_token_ids])
            inputs = given_to(model, tmp_path, ids, output is together[1])
            with torch.inference_mode():
                want = model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).embeddings[0]
            np.testing.assert_allclose(output.outputs.data, want.numpy(), rtol=1e-4, atol=1e-5)
        alone = [llm.encode([each])[0].outputs.data for each in ("w1 w2 w3", PAGE)]
        assert all((one == output.outputs.data).all() for one, output in zip(alone, together, strict=True))
        (query,) = llm.encode(["w1 w2"], prompt_name="query")
        w1, w2 = (llm.get_tokenizer().token_id(word) for word in ("w1", "w2"))
        found = query.prompt_token_ids
        assert found[found.index(w1) :][: 2 + len(end)] == [w1, w2, *end]
        assert llm.score("w1 w2", "w3")[0].outputs.score == pytest.approx(
            float((query.outputs.data @ llm.encode(["w3"], prompt_name="document")[0].outputs.data.T).max(1).sum())
        )


@pytest.mark.parametrize(
    ("architecture", "prefix", "layer"),
    [
        ("ColQwen3", "vlm.model.", "embedding_proj_layer"),
        pytest.param("OpsColQwen3Model", "", "custom_text_proj", marks=LONG),
        pytest.param("Qwen3VLNemotronEmbedModel", "model.", None, marks=LONG),
    ],
)
def test_relatives_store_a_model_that_reads_images_under_other_names(
    tmp_path: Path, architecture: str, prefix: str, layer: str | None
) -> None:
    path = make_vision_checkpoint("qwen3_vl", tmp_path)
    rows: dict[str, Any] = {"task": "token_embed", "use_activation": False}
    with LLM(str(path), **ARGS, runner="pooling", pooler_config=rows) as llm:
        hidden = [torch.tensor(output.outputs.data) for output in llm.encode(["w1 w2 w3", PAGE])]
    rename_tensors(path, "model.", prefix)
    projection = torch.eye(hidden[0].shape[1])
    if layer is not None:
        projection, bias = torch.randn(24, hidden[0].shape[1]) / 6, torch.randn(24)
        edit_tensors(path, **{f"{layer}.weight": projection, f"{layer}.bias": bias})
        hidden = [each + torch.linalg.lstsq(projection, bias[:, None]).solution[:, 0] for each in hidden]
    edit_config(path, architectures=[architecture], model_type="colqwen3", dims=24)
    with LLM(str(path), **ARGS) as llm:
        for output, states in zip(llm.encode(["w1 w2 w3", PAGE]), hidden, strict=True):
            want = torch.nn.functional.normalize(states @ projection.T, dim=-1)
            np.testing.assert_allclose(output.outputs.data, want.numpy(), rtol=1e-4, atol=1e-5)


def test_colqwen_3_5_says_which_tokens_see_each_other(tmp_path: Path) -> None:
    config = {"architectures": ["ColQwen3_5"], "text_config": {"model_type": "qwen3_5_text", "hidden_size": 8}}
    save_file({"custom_text_proj.weight": torch.zeros(24, 8)}, tmp_path / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors")
    for contract, is_causal in (("causal", True), ("bidirectional", False)):
        written = {**config, "retrieval_attention_contract": contract}
        (tmp_path / "config.json").write_text(json.dumps(written))
        found = pooling_config(EngineArgs(model=str(tmp_path)), Checkpoint.open(tmp_path))
        assert found is not None
        assert (found.task, found.is_causal, found.size) == ("token_embed", is_causal, 24)
    for wrong in (None, "both"):
        (tmp_path / "config.json").write_text(json.dumps({**config, "retrieval_attention_contract": wrong}))
        with pytest.raises(CheckpointError, match="retrieval_attention_contract .* expected causal or bidirectional"):
            Checkpoint.open(tmp_path)


def test_other_models_within_are_refused_by_name(tmp_path: Path) -> None:
    config = {"architectures": ["ColQwen2ForRetrieval"], "vlm_config": {"model_type": "modernvbert"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r'vlm_config.model_type is "modernvbert", expected one of paligemma'):
        Checkpoint.open(tmp_path)
