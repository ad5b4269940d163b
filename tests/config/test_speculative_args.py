"""What may be set about speculative decoding, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.config.args import EngineArgs
from octavo.config.checkpoint import Checkpoint
from octavo.config.draft_config import draft_config
from octavo.config.speculative_args import DraftConfig, SpeculativeConfig, speculative_config
from octavo.errors import ConfigError
from tests.fakes.tekken import write_tekken


def test_without_it_nothing_speculates() -> None:
    assert speculative_config(EngineArgs()) is None


def test_a_text_of_json_is_a_mapping() -> None:
    expected = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    for value in ('{"method": "ngram", "num_speculative_tokens": 4}', {"method": "ngram", "num_speculative_tokens": 4}):
        assert speculative_config(EngineArgs(speculative_config=value)) == expected  # type: ignore[arg-type]


def test_vllms_older_names_of_prediction_layers_are_known() -> None:
    without_effect = {"draft_tensor_parallel_size": 1, "rejection_sample_method": "standard"}
    args = EngineArgs(speculative_config={"method": "deepseek_mtp", **without_effect})
    config = speculative_config(args)
    assert config is not None
    assert config.method == "mtp"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens is 0, expected `int` >= 1$"),
        ({"method": "ngram", "num_speculative_tokens": "4"}, "_tokens is '4', expected `int`, got `str`$"),
        ({"method": "oracle"}, "method is 'oracle', expected one of ngram, suffix, .*draft_model, .*, mtp$"),
        ({"method": "ngrm"}, "method is 'ngrm', expected one of .*; did you mean ngram[?]$"),
        ({"method": ["ngram"]}, "method is .'ngram'., expected one of ngram"),
        ({}, "method is not set; give one of"),
        ({"num_speculative_tokens": 3}, "method is not set; give one of ngram, .* as model$"),
        ({"method": "ngram", "k": 3}, "has the unknown field 'k', expected some of method, .*, step_ms$"),
        ({"method": "ngram", "modle": "x"}, "has the unknown field 'modle', .*; did you mean model[?]$"),
        (
            {"method": "ngram", "step_ms": [[4, 1.0], [2, 1.0]]},
            r"step_ms is \(\(4, 1.0\), .* expected pairs",
        ),
        ({"method": "ngram", "step_ms": [[1, 0]]}, "step_ms is .* expected pairs"),
        ({"method": "ngram", "step_ms": [[1, float("nan")]]}, "step_ms is .* expected pairs"),
        ({"method": "ngram", "step_ms": [[1, float("inf")]]}, "step_ms is .* expected pairs"),
        ({"method": "ngram", "step_ms": [[10**25, 1]]}, "step_ms is .* from 1 to 1,048,576 in rising order"),
        ({"method": "draft_model"}, "method is draft_model, and model is not set"),
        ({"method": "draft_model", "model": ""}, "method is draft_model, and model is not set"),
        (
            {"method": "draft_model", "model": "x", "quantization": "fp3"},
            "quantization is 'fp3', expected one of int8, int4",
        ),
        ({"method": "eagle", "model": "x", "draft_tensor_parallel_size": 2}, "_parallel_size is 2, expected 1$"),
        ({"method": "ngram", "rejection_sample_method": "fly"}, "rejection_sample_method is 'fly', expected standard$"),
        ({"method": "ngram", "model": "x"}, "model is set, but method is ngram, which runs no model"),
        ({"method": "ngram", "prompt_lookup_min": 9}, "prompt_lookup_min is 9, must be at most prompt_lookup_max"),
    ],
)
def test_a_wrong_value_is_named(value: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        speculative_config(EngineArgs(speculative_config=value))


@pytest.mark.parametrize("value", ["ngram", "{", 3, ["a", "b"]])
def test_what_is_no_object_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="speculative_config is"):
        EngineArgs(speculative_config=value)


def with_tokens(path: Path, tokens: list[str], added: dict[str, int]) -> Path:
    path.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8}
    (path / "config.json").write_text(json.dumps(config))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    added_tokens = [{"id": number, "content": token} for token, number in added.items()]
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added_tokens}))
    return path


def draft_of(path: Path, draft: Path, **arguments: Any) -> DraftConfig:
    args = EngineArgs(speculative_config={"method": "draft_model", "model": str(draft)}, **arguments)
    speculative = speculative_config(args)
    assert speculative is not None
    return draft_config(args, speculative, Checkpoint.open(path), path, draft)


def test_a_draft_model_has_the_same_tokens(tmp_path: Path) -> None:
    model = with_tokens(tmp_path / "model", ["a", "b"], {"<end>": 5})
    same = with_tokens(tmp_path / "same", ["a", "b"], {"<end>": 5, "<spare>": 6})
    assert draft_of(model, same).path == str(same)
    for name, tokens, end in (("other", ["a", "c"], 5), ("moved", ["a", "b"], 1)):
        other = with_tokens(tmp_path / name, tokens, {"<end>": end})
        with pytest.raises(
            ConfigError, match=r"token \d is '.*' in the tokenizer of the draft model .* and '.*' in that"
        ):
            draft_of(model, other)


def test_a_draft_model_has_the_tokens_of_a_tekken_json(tmp_path: Path) -> None:
    model = with_tokens(tmp_path / "model", [], {"<unk>": 0, "<s>": 1})
    draft = with_tokens(tmp_path / "draft", [], {})
    (write_tekken(draft) / "tokenizer.json").unlink()
    assert draft_of(model, draft).path == str(draft)
    with pytest.raises(
        ConfigError, match=r"token 1 is '<s>' in the tokenizer of the draft model .* and '</s>' in that"
    ):
        draft_of(with_tokens(tmp_path / "other", [], {"</s>": 1}), draft)


def test_a_draft_model_has_no_stages(tmp_path: Path) -> None:
    model = with_tokens(tmp_path / "model", ["a", "b"], {})
    with pytest.raises(ConfigError, match="method is draft_model, and pipeline_parallel_size is 2"):
        draft_of(model, model, pipeline_parallel_size=2)
