"""The method follows from the checkpoint of what guesses, where it is not given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.config.args import EngineArgs
from octavo.config.draft_method import with_method


@pytest.mark.parametrize(
    ("name", "config", "method"),
    [
        ("draft", {"architectures": ["Qwen3ForCausalLM"]}, "draft_model"),
        ("medusa", {"architectures": ["MedusaModel"]}, "medusa"),
        ("mlp", {"architectures": ["MLPSpeculatorPreTrainedModel"]}, "mlp_speculator"),
        ("assistant", {"architectures": ["Gemma4AssistantForCausalLM"]}, "mtp"),
        ("block", {"architectures": ["DFlashDraftModel"]}, "dflash"),
        ("block", {"architectures": ["Qwen3DSparkModel"], "draft_vocab_size": 32}, "dspark"),
        ("head", {"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ("head", {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "eagle3"),
        ("head", {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32}, "eagle3"),
        ("head", {"architectures": ["Speculator"], "speculators_model_type": "peagle"}, "eagle3"),
        ("EAGLE-LLaMA3", {"architectures": ["LlamaForCausalLM"]}, "eagle"),
    ],
)
def test_the_method_follows_from_the_checkpoint(name: str, config: dict[str, Any], method: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    args = with_method(EngineArgs(model="x", speculative_config={"model": str(folder), "num_speculative_tokens": 2}))
    assert args.speculative_config == {"method": method, "model": str(folder), "num_speculative_tokens": 2}


def test_a_method_that_is_given_stays() -> None:
    for given in ({"method": "eagle", "model": "/nowhere"}, {"method": "ngram"}, {}, {"num_speculative_tokens": 2}):
        args = EngineArgs(model="x", speculative_config=given)
        assert with_method(args) is args
