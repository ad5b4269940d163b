"""HunyuanOCR as its release states it is what transformers writes; sections that fit no head are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError
from octavo.layers.rope import BaseScaling
from octavo.models.loader import LoadedModel
from tests.fakes.vision import image, make_vision_checkpoint

PARAMS = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, ignore_eos=True)


def flattened(path: Path) -> dict[str, Any]:
    """Return the config at `path` with the keys of the text model beside the others, under their older names."""
    config = json.loads((path / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"alpha": rope["alpha"], "type": "xdrope", "factor": 1.0, "xdrope_section": rope["mrope_section"]}
    text |= {"attention_head_dim": text["head_dim"], "use_qk_norm": True, "use_cla": False, "pad_token_id": -1}
    return {**text, **config, "rope_scaling": scaling, "rope_theta": rope["rope_theta"]}


def test_a_config_on_one_level_gives_the_same_bits(tmp_path: Path) -> None:
    path = make_vision_checkpoint("hunyuan_vl", tmp_path)
    prompt: Any = {"prompt": "w1 <image> w2", "multi_modal_data": {"image": image(0)}}
    found = []
    for config in (None, flattened(path)):
        if config is not None:
            (path / "config.json").write_text(json.dumps(config))
        with LLM(str(path), dtype="float32", num_gpu_blocks_override=64) as llm:
            found.append([(each.token_ids, each.logprobs) for each in llm.generate([prompt], PARAMS)[0].outputs])
    assert found[0] == found[1]


def test_the_released_sections_turn_halves_of_pairs_by_two_positions(tmp_path: Path) -> None:
    path = make_vision_checkpoint("hunyuan_vl", tmp_path)
    rope = LoadedModel.open(Checkpoint(path, flattened(path)), Mesh.single(), torch.float32).model.config.rope
    assert rope is not None
    assert (rope.scaling, rope.axes, rope.second_axes) == (BaseScaling(10.0), (0, 0, 2, 2), (1, 1, 3, 3))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ([2, 1, 1, 1], "xdrope_section is .*, expected numbers of pairs that are 4 together"),
        ([5, -1, 0, 0], "xdrope_section is .*, expected numbers of pairs that are 4 together"),
        ([2, 2], "xdrope_section is .*, expected three or four numbers of pairs"),
        ("4", "xdrope_section is .*, expected three or four numbers of pairs"),
    ],
)
def test_sections_that_do_not_fit_are_refused(sections: Any, said: str, tmp_path: Path) -> None:
    config = flattened(path := make_vision_checkpoint("hunyuan_vl", tmp_path))
    config["rope_scaling"]["xdrope_section"] = sections
    with pytest.raises(CheckpointError, match=said):
        LoadedModel.open(Checkpoint(path, config), Mesh.single(), torch.float32, reads_images=False)
