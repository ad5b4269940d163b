"""The assistant of Gemma 4 guesses what transformers' does from the model's keys and values, and changes no bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from tests.conformance.runtimes import LEVELS
from tests.e2e.test_draft_models import USUAL, check_that_guesses_change_nothing, proposals, take_all
from tests.e2e.test_drafts import PROMPTS, VOCABULARY
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import edit_config, load_oracle, make_checkpoint

pytestmark = pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")

WINDOW = 7


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and an assistant of it."""
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

    model = make_checkpoint("gemma4", tmp_path_factory.mktemp("model"), vocab_size=VOCABULARY)
    text = Gemma4TextConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, global_head_dim=16, sliding_window=WINDOW, max_position_embeddings=256,
        layer_types=["sliding_attention", "full_attention"], hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0, num_kv_shared_layers=2,
    )  # fmt: skip
    torch.manual_seed(4)
    assistant = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(text_config=text, backbone_hidden_size=32))
    with torch.no_grad():
        for parameter in assistant.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    folder = tmp_path_factory.mktemp("assistant")
    assistant.save_pretrained(folder)
    return write_byte_tokenizer(model), folder


def load(paths: tuple[Path, Path], **options: Any) -> LLM:
    own = USUAL | options
    config = {"method": "mtp", "model": str(paths[1]), "num_speculative_tokens": 3}
    llm = LLM(str(paths[0]), speculative_config=config, **own)
    take_all(llm, own.get("seed"))
    return llm


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"seed": 1, "kv_cache_dtype": "int8", "max_steps_in_flight": 3},
        {"num_gpu_blocks_override": 24, "preemption_mode": "swap", "swap_space": 0.01, "max_num_batched_tokens": 16},
    ],
)
def test_an_assistant_changes_no_bit(options: dict[str, Any], paths: tuple[Path, Path]) -> None:
    plain = {name: options[name] for name in ("kv_cache_dtype",) if name in options}
    with load(paths, max_num_seqs=8, **options) as llm:
        check_that_guesses_change_nothing(llm, paths[0], **plain)


def test_it_guesses_what_that_of_transformers_does(paths: tuple[Path, Path]) -> None:
    from transformers import Gemma4AssistantForCausalLM

    library = load_oracle(paths[0])
    assistant = Gemma4AssistantForCausalLM.from_pretrained(paths[1], dtype=torch.float32, attn_implementation="eager")
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    with load(paths, dtype="float32", max_num_batched_tokens=16, max_num_seqs=8) as llm:
        seen = proposals(llm)
        tokens = [*PROMPTS[3], *llm.generate([PROMPTS[3]], params, use_tqdm=False)[0].outputs[0].token_ids]
    assert len(seen) > 3
    for num_known, proposed in seen:
        with torch.inference_mode():
            out = library(
                torch.tensor([tokens[: num_known - 1]]), output_hidden_states=True, return_shared_kv_states=True
            )
            window = torch.zeros(1, 1, 1, num_known - 1)
            window[..., : max(0, num_known - 1 - WINDOW)] = -torch.inf
            masks = {"full_attention": None, "sliding_attention": window}
            assistant.create_attention_masks = lambda *_, masks=masks: masks
            state, last = out.hidden_states[-1][:, -1:], tokens[num_known - 1]
            for token in proposed:
                embedded = library.get_input_embeddings()(torch.tensor([[last]]))
                made = assistant(
                    inputs_embeds=torch.cat((embedded, state), -1),
                    position_ids=torch.tensor([[num_known - 1]]),
                    shared_kv_states=out.shared_kv_states,
                )
                state, last = made.last_hidden_state, int(made.logits.argmax())
                assert token == last


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"backbone_hidden_size": 48}, {}, "hidden_size is 48 in .*, and 32 in that of the model"),
        ({"architectures": ["LlamaForCausalLM"]}, {}, "whose architecture is LlamaForCausalLM; mtp guesses with"),
        ({}, {"tensor_parallel_size": 2}, "of which each rank has a part, and tensor_parallel_size is 2"),
        (
            {"text_config": {"sliding_window": 5}},
            {},
            "layer 0 of the assistant reads 2 heads of 8 with the window 5, and no layer",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], options: dict[str, Any], message: str, paths: tuple[Path, Path], tmp_path: Path
) -> None:
    other = shutil.copytree(paths[1], tmp_path / "other")
    text = json.loads((other / "config.json").read_text())["text_config"] | changes.pop("text_config", {})
    edit_config(other, text_config=text, **changes)
    with pytest.raises(ConfigError, match=message):
        load((paths[0], other), **options)
