"""CLIP and SigLIP: vectors of texts and of images as transformers' classes make them, whatever runs beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.engine.text.chat_template import ChatOptions
from octavo.errors import ConfigError
from octavo.models.loader import LoadedModel
from tests.fakes.rank_threads import llm_of_ranks
from tests.fakes.vector_models import write_tokenizer
from tests.fakes.vision import fill_randomly, image

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TEXT = {**SIZES, **IDS, "vocab_size": 100, "intermediate_size": 96, "max_position_embeddings": 24}
VISION = {**SIZES, "intermediate_size": 80, "image_size": 56, "patch_size": 14}
PROMPTS: list[Any] = [
    "w1 w2 w3",
    {"prompt": "", "multi_modal_data": {"image": image(0)}},
    "w90",
    {"prompt": "", "multi_modal_data": {"image": image(1, 70, 90)}},
]
ARGS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 64}


def make(path: Path, family: str) -> tuple[Any, Any]:
    """Write a random model, and return it with its image processor."""
    import transformers as tf

    own = {"projection_dim": 40} if family == "CLIP" else {}
    config = getattr(tf, f"{family}Config")(text_config=TEXT, vision_config=VISION, **own)
    model = getattr(tf, f"{family}Model")._from_config(config, attn_implementation="eager").eval()
    fill_randomly(model)
    if family == "CLIP":
        processor = tf.CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size=56)
    else:
        processor = tf.SiglipImageProcessorPil(size={"height": 56, "width": 56})
    for part in (model, processor):
        part.save_pretrained(path)
    write_tokenizer(path)
    return model, processor


def expected(model: Any, processor: Any, prompt: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        if isinstance(prompt, dict):
            pixels = processor(images=[prompt["multi_modal_data"]["image"]], return_tensors="pt")["pixel_values"]
            made = model.get_image_features(pixel_values=pixels).pooler_output[0]
        else:  # transformers takes the largest id of a text where the id of its end is 2
            states = model.text_model(input_ids=torch.tensor([token_ids])).last_hidden_state[0, -1]
            project = model.text_projection if hasattr(model, "text_projection") else model.text_model.head
            made = project(states)
    return torch.nn.functional.normalize(made, dim=-1)


@pytest.mark.parametrize("family", ["CLIP", "Siglip"])
def test_vectors_of_texts_and_images(tmp_path: Path, family: str) -> None:
    model, processor = make(tmp_path, family)
    with LLM(str(tmp_path), **ARGS) as llm:
        together = llm.embed(PROMPTS)
        for prompt, output in zip(PROMPTS, together, strict=True):
            assert output.error is None
            want = expected(model, processor, prompt, output.prompt_token_ids)
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), want, rtol=1e-4, atol=1e-5)
        alone = [llm.embed([prompt])[0].outputs for prompt in PROMPTS]
        assert [output.outputs for output in together] == alone
        if family == "Siglip":
            assert together[0].prompt_token_ids == [1, 5, 6, 7, 2, *[0] * 19]
        (refused,) = llm.embed([{**PROMPTS[1], "prompt": "w1"}])
        assert "this model makes a vector of one of them; send two prompts" in str(refused.error)
        parts = [{"type": "image_pil", "image_pil": image(0)}]
        rendered = llm.engine.input.render_chat(
            [{"role": "user", "content": parts}], ChatOptions(add_generation_prompt=False)
        )
        assert llm.embed([rendered])[0].outputs == alone[1]
        assert llm.score("w1", "w1")[0].outputs.score == pytest.approx(1.0)


@pytest.mark.long
@pytest.mark.parametrize("family", ["CLIP", "Siglip"])
def test_two_ranks_make_the_bits_of_one(tmp_path: Path, family: str) -> None:
    make(tmp_path, family)
    with LLM(str(tmp_path), **ARGS) as llm:
        want = [output.outputs for output in llm.embed(PROMPTS)]
    with llm_of_ranks(tmp_path, 2, **ARGS) as llm:
        assert [output.outputs for output in llm.embed(PROMPTS)] == want
    with pytest.raises(ConfigError, match="pipeline_parallel_size: the vectors of images go around the layers"):
        LoadedModel.open(Checkpoint.open(tmp_path), Mesh.of_rank(0, pipeline=2))
