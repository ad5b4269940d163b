"""The layer that a checkpoint has to predict a second token guesses what its formula says, and changes no bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo import LLM, EngineArgs, SamplingParams
from octavo.config.resolve import configure
from octavo.errors import ConfigError
from tests.conformance.runtimes import LEVELS
from tests.e2e import test_adapters as adapters
from tests.e2e.test_draft_heads import proposals
from tests.e2e.test_draft_models import stats, take_all
from tests.e2e.test_drafts import PROMPTS, VOCABULARY, answers
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import edit_tensors, load_oracle, make_checkpoint
from tests.lora.adapter_folders import make_adapter

pytestmark = pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")

FAMILIES = ("deepseek_v3", "glm4_moe")


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose checkpoint has one more layer, which is like its last one."""
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, folder, vocab_size=VOCABULARY)
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(str(folder / "model.safetensors"))
    count, hidden = config["num_hidden_layers"], config["hidden_size"]
    generator = torch.Generator().manual_seed(3)
    last = f"model.layers.{count - 1}."
    own = {
        name.replace(last, f"model.layers.{count}."): each + 0.1 * torch.randn(each.shape, generator=generator)
        for name, each in tensors.items()
        if name.startswith(last)
    }
    for name, shape in (
        ("enorm", (hidden,)),
        ("hnorm", (hidden,)),
        ("eh_proj", (hidden, 2 * hidden)),
        ("shared_head.norm", (hidden,)),
        ("shared_head.head", (VOCABULARY, hidden)),
    ):
        own[f"model.layers.{count}.{name}.weight"] = torch.randn(shape, generator=generator) / hidden**0.5 + (
            len(shape) == 1
        )
    save_file(tensors | own, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return write_byte_tokenizer(folder)


def load(path: Path, *, is_on: bool = True, **options: Any) -> LLM:
    own = {"max_model_len": 128, "num_gpu_blocks_override": 64, "dtype": "bfloat16", **options}
    if not is_on:
        return LLM(str(path), **own)
    llm = LLM(str(path), speculative_config={"method": "mtp", "num_speculative_tokens": 3}, **own)
    take_all(llm, own.get("seed"))
    return llm


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"seed": 1, "quantization": "int8", "max_num_batched_tokens": 16, "hf_overrides": {"rope_theta": 500.0}},
        pytest.param({"tensor_parallel_size": 2, "threads": 1}, marks=pytest.mark.long),
    ],
)
def test_a_prediction_layer_changes_no_bit(options: dict[str, Any], path: Path) -> None:
    model = {name: options[name] for name in ("quantization", "hf_overrides") if name in options}
    with load(path, is_on=False, **model) as llm:
        expected = answers(llm)
    with load(path, max_num_seqs=8, **options) as llm:
        for _ in range(2):
            assert answers(llm) == expected
        assert stats(llm).num_draft_tokens > 30


def test_it_changes_no_bit_beside_adapters(path: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"  # without the layer, of which no adapter knows
    make_checkpoint(json.loads((path / "config.json").read_text())["model_type"], plain, vocab_size=VOCABULARY)
    for seed, name in enumerate(adapters.NAMES, 1):
        make_adapter(plain, tmp_path / name, ("o_proj",), seed=seed)
    options = {"max_model_len": 128, "enable_lora": True, "max_loras": 2, "num_gpu_blocks_override": 64}
    with load(path, is_on=False, **options) as llm:
        expected = adapters.together(llm, tmp_path)
    with load(path, max_num_seqs=8, **options) as llm:
        assert adapters.together(llm, tmp_path) == expected
        assert stats(llm).num_draft_tokens > 30


def test_it_guesses_what_its_formula_says(path: Path, tmp_path: Path) -> None:
    library = load_oracle(path)
    prompt, params = PROMPTS[3], SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    with load(path, dtype="float32", max_num_batched_tokens=16, max_num_seqs=8) as llm:
        seen = proposals(llm)
        tokens = [*prompt, *llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids]
    assert len(seen) > 3
    layer = _Layer(library, path, tmp_path / "layer")
    for num_known, proposed in seen:
        known, streams = tokens[:num_known], []
        with torch.inference_mode():
            states = library(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states[-1][0]
            for token in proposed:
                streams.append(layer.streams(known, torch.cat([states, *streams]))[-1:])
                expected = int(layer.logits(streams[-1]).argmax())
                assert token == expected
                known = [*known, expected]


def test_other_weights_bring_their_own(path: Path, tmp_path: Path) -> None:
    other = shutil.copytree(path, tmp_path / "other")
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: each + 0.1 * each.std() * torch.randn(each.shape, generator=generator) if each.ndim == 2 else each
        for name, each in load_file(str(path / "model.safetensors")).items()
    }
    save_file(tensors, str(other / "model.safetensors"), metadata={"format": "pt"})
    params, found = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True), []
    for started in (other, path):
        with load(started, enable_sleep_mode=True) as llm:
            if started is path:
                llm.update_weights_from_disk(other)
            seen = proposals(llm)
            found.append((llm.generate([PROMPTS[3]], params)[0].outputs, seen))
    assert found[0] == found[1]
    assert len(found[0][1]) > 3


def test_other_weights_without_the_layer_change_nothing(path: Path, tmp_path: Path) -> None:
    other = shutil.copytree(path, tmp_path / "other")
    edit_tensors(other, remove=(next(each for each in load_file(other / "model.safetensors") if "eh_proj" in each),))
    with load(path, enable_sleep_mode=True) as llm:
        with pytest.raises(ConfigError, match=r"eh_proj\.weight is missing"):
            llm.update_weights_from_disk(other)
        assert not llm.is_sleeping()


class _Layer:
    """The layer in plain torch: transformers' decoder layer between the tensors that only a prediction layer has."""

    def __init__(self, library: Any, path: Path, folder: Path) -> None:
        count, tensors = library.config.num_hidden_layers, load_file(str(path / "model.safetensors"))
        own, last = f"model.layers.{count}.", f"model.layers.{count - 1}."
        self.weights = {name.removeprefix(own): each for name, each in tensors.items() if name.startswith(own)}
        self.model, self.eps = library.model, library.config.rms_norm_eps
        # transformers reads the tensors in the place of those of the last layer
        moved = {name: self.weights.get(name.removeprefix(last), each) for name, each in tensors.items()}
        folder.mkdir()
        shutil.copy(path / "config.json", folder)
        save_file(
            {name: moved[name] for name in moved if own not in name},
            str(folder / "model.safetensors"),
            metadata={"format": "pt"},
        )
        self.layer = load_oracle(folder).model.layers[-1]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), self.weights[f"{name}.weight"], self.eps)

    def streams(self, known: list[int], states: Tensor) -> Tensor:
        embedded = self.model.embed_tokens.weight[torch.tensor(known[1:])]
        x = torch.cat((self.norm(embedded, "enorm"), self.norm(states, "hnorm")), 1) @ self.weights["eh_proj.weight"].T
        count = len(x)
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        rotary = self.model.rotary_emb(x[None], positions)
        out = self.layer(x[None], attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        found: Tensor = (out[0] if isinstance(out, tuple) else out)[0]
        return found

    def logits(self, stream: Tensor) -> Tensor:
        return self.norm(stream, "shared_head.norm") @ self.weights["shared_head.head.weight"].T


def test_a_prediction_layer_has_the_overrides_of_its_model(path: Path) -> None:
    args = EngineArgs(model=str(path), speculative_config={"method": "mtp"}, hf_overrides={"rope_theta": 500.0})
    draft = configure(args).draft
    assert draft is not None
    assert draft.overrides == {"rope_theta": 500.0}
