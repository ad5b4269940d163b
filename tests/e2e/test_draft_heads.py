"""Heads guess what their formula says, and change no bit of a model's results."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.config.speculative_args import METHODS
from octavo.errors import CheckpointError, ConfigError, UnsupportedModel
from tests.conformance.runtimes import LEVELS
from tests.e2e.test_draft_models import USUAL, check_that_guesses_change_nothing, proposals, take_all
from tests.e2e.test_drafts import PROMPTS, VOCABULARY
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import edit_config, edit_tensors, make_checkpoint
from tests.fakes.draft_heads import (
    HIDDEN,
    WIDTH,
    block_guesses,
    guesses,
    parallel_guesses,
    read_head,
    write_block_head,
    write_head,
    write_latent_head,
    write_markov_head,
    write_normed_head,
    write_speculator,
)
from tests.fakes.state_heads import MOST, state_guesses, write_medusa, write_speculator_head

pytestmark = pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")

NUM_LAYERS = 8


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, and by method a head for it."""
    model = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": WIDTH}
    make_checkpoint("llama", model, num_hidden_layers=NUM_LAYERS, **sizes)
    latents = tmp_path_factory.mktemp("latents")
    make_checkpoint("deepseek_v3", latents, num_hidden_layers=NUM_LAYERS, **sizes)
    eagle, third = (tmp_path_factory.mktemp(name) for name in ("eagle", "eagle3"))
    return {
        "model": write_byte_tokenizer(model),
        "latents": write_byte_tokenizer(latents),
        "latent head": write_latent_head(tmp_path_factory.mktemp("head"), VOCABULARY),
        "eagle": write_head(eagle, VOCABULARY, is_third=False),
        "eagle3": write_head(third, VOCABULARY, is_third=True, draft_vocab=100),
        "medusa": write_medusa(tmp_path_factory.mktemp("medusa"), VOCABULARY),
        "mlp_speculator": write_speculator_head(tmp_path_factory.mktemp("mlp"), VOCABULARY),
        "dflash": write_block_head(tmp_path_factory.mktemp("dflash"), VOCABULARY),
        "dspark": write_markov_head(tmp_path_factory.mktemp("dspark"), VOCABULARY),
        "normed": write_normed_head(tmp_path_factory.mktemp("normed"), VOCABULARY),
        "speculator": write_speculator(tmp_path_factory.mktemp("speculator"), model, VOCABULARY),
        "parallel": write_speculator(tmp_path_factory.mktemp("parallel"), model, VOCABULARY, is_parallel=True),
    }


def load(paths: dict[str, Path], method: str, **options: Any) -> LLM:
    own = USUAL | options
    if method in ("speculator", "parallel"):
        llm = LLM(str(paths[method]), **own)  # which names its model
    else:
        kind = method if method in METHODS else "eagle3"
        config = {"method": kind, "model": str(paths[method]), "num_speculative_tokens": 4}
        llm = LLM(str(paths["model"]), speculative_config=config, **own)
    take_all(llm, own.get("seed"))
    return llm


@pytest.mark.parametrize(
    "method",
    [
        *("eagle", "eagle3", "parallel", "dflash", "medusa", "mlp_speculator"),
        pytest.param("dspark", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"seed": 1, "max_steps_in_flight": 3, "quantization": "int8"},
        {"num_gpu_blocks_override": 13, "preemption_mode": "swap", "swap_space": 0.01, "max_num_batched_tokens": 16},
        pytest.param({"tensor_parallel_size": 2, "threads": 1, "seed": 2}, marks=pytest.mark.long),
    ],
)
def test_heads_change_no_bit(method: str, options: dict[str, Any], paths: dict[str, Path]) -> None:
    with load(paths, method, max_num_seqs=8, **options) as llm:
        check_that_guesses_change_nothing(llm, paths["model"], quantization=options.get("quantization"))


@pytest.mark.parametrize("method", ["eagle3", "latent head"])
def test_heads_of_models_with_latents_change_no_bit(method: str, paths: dict[str, Path]) -> None:
    test_heads_change_no_bit(method, {"max_num_batched_tokens": 16}, {**paths, "model": paths["latents"]})


@pytest.mark.parametrize(
    ("method", "model"),
    [
        *((method, "model") for method in ("eagle", "eagle3", "normed", "speculator", "parallel", "dflash", "dspark")),
        *((method, "latents") for method in ("eagle3", "latent head")),
    ],
)
def test_a_head_guesses_what_its_formula_says(method: str, model: str, paths: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM

    paths = {**paths, "model": paths[model]}
    library = AutoModelForCausalLM.from_pretrained(paths["model"], dtype=torch.float32)

    def guessed(known: list[int], count: int) -> list[int]:
        if method in ("dflash", "dspark"):
            return block_guesses(paths[method], library, known, count)
        head = read_head(paths[method], library.lm_head.weight.detach(), is_third=method != "eagle")
        found = library(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states
        noted = (2, NUM_LAYERS // 2, NUM_LAYERS - 3) if method != "eagle" else (-1,)
        states = torch.cat([found[layer][0] for layer in noted], 1)
        make = parallel_guesses if method == "parallel" else guesses
        return make(head, library.model.embed_tokens.weight, states, known, count)

    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 16, "max_num_seqs": 8}
    with load(paths, method, enable_prefix_caching=False, **options) as llm, torch.inference_mode():
        seen = proposals(llm)
        for prompt in PROMPTS[1:4]:
            seen.clear()
            tokens = [*prompt, *llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids]
            assert len(seen) > 3
            for num_known, proposed in seen:
                assert list(proposed) == guessed(tokens[:num_known], len(proposed))


@pytest.mark.parametrize(
    ("write", "config"),
    [
        (write_medusa, {}),
        (write_medusa, {"medusa_fc_bias": True, "original_lm_head": True}),
        (write_speculator_head, {}),
        (write_speculator_head, {"tie_weights": True, "scale_input": True}),
    ],
)
def test_a_head_guesses_from_one_state_what_its_formula_says(
    write: Callable[..., Path], config: dict[str, Any], paths: dict[str, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    library = AutoModelForCausalLM.from_pretrained(paths["model"], dtype=torch.float32)
    head = write(tmp_path / "head", VOCABULARY, **config)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    method = "medusa" if write is write_medusa else "mlp_speculator"
    with load({**paths, method: head}, method, dtype="float32", max_num_batched_tokens=16, max_num_seqs=8) as llm:
        assert llm.config.speculative is not None
        assert llm.config.speculative.num_speculative_tokens == MOST
        seen = proposals(llm)
        tokens = [*PROMPTS[3], *llm.generate([PROMPTS[3]], params, use_tqdm=False)[0].outputs[0].token_ids]
    assert max(len(proposed) for _, proposed in seen) == MOST
    for num_known, proposed in seen:
        with torch.inference_mode():
            states = library(torch.tensor([tokens[: num_known - 1]]), output_hidden_states=True).hidden_states[-1]
            expected = state_guesses(head, states[0, -1], tokens[num_known - 1], len(proposed))
        assert list(proposed) == expected


@pytest.mark.parametrize(
    ("method", "values", "message"),
    [
        ("dflash", {"mask_token_id": -1}, "dflash_config.mask_token_id is -1, expected a token from 0 to 299"),
        ("dspark", {"markov_rank": 0}, "markov_rank is 0, expected an integer of at least 1"),
        ("dspark", {"markov_head_type": "gated"}, 'markov_head_type is "gated", expected "vanilla"'),
        ("parallel", {"mask_token_id": 300}, "mask_token_id is 300, expected a token from 0 to 299"),
        ("parallel", {"mask_hidden": torch.zeros(1, 1, 5)}, "mask_hidden has 5 values, expected 192"),
        ("medusa", {"truncated_vocab_size": 100}, "truncated_vocab_size is 100, expected 300"),
        ("medusa", {"num_heads": 0}, "num_heads is 0, expected an integer of at least 1"),
        ("speculator", {"d2t": torch.full((100,), 201)}, "d2t .* each with its place a token from 0 to 299"),
        ("speculator", {"d2t": torch.zeros(99)}, r"d2t has the shape \[99\], expected \[100\]"),
    ],
)
def test_a_head_that_names_what_is_not_there_is_refused(
    method: str, values: dict[str, Any], message: str, paths: dict[str, Path], tmp_path: Path
) -> None:
    head = tmp_path / "head"
    shutil.copytree(paths[method], head)
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            edit_tensors(head, **{name: value})
        elif method == "dflash":
            edit_config(head, dflash_config={name: value, "target_layer_ids": [0, 2, 4]})
        else:
            edit_config(head, **{name: value})
    with pytest.raises(CheckpointError, match=message):
        load({**paths, method: head}, method)


def test_a_head_of_another_model_is_refused(paths: dict[str, Path], tmp_path: Path) -> None:
    other = write_head(tmp_path / "other", 200, is_third=False)
    with pytest.raises(ConfigError, match=r"vocab_size is 200 in .*, and 300 in that of the model"):
        load({**paths, "eagle": other}, "eagle")
    deep = write_head(
        tmp_path / "deep", VOCABULARY, is_third=True, draft_vocab=50,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 40]},
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"before layers \(1, 2, 40\), and this model has 8 layers"):
        load({**paths, "eagle3": deep}, "eagle3")
    for family, message in (("gemma3n", "reads one stream"), ("longcat_flash", "mixtures bypass them")):
        make_checkpoint(family, tmp_path / family, vocab_size=VOCABULARY, hidden_size=HIDDEN)
        with pytest.raises(ConfigError, match=message):
            load({**paths, "model": write_byte_tokenizer(tmp_path / family)}, "eagle3")
    with pytest.raises(UnsupportedModel, match="num_nextn_predict_layers is 0, expected at least 1"):
        LLM(str(paths["model"]), speculative_config={"method": "mtp"})
