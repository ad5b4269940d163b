"""The layer that a checkpoint has to predict a second token guesses what its formula says, and changes no bit."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo import LLM, EngineArgs, SamplingParams
from octavo.config.resolve import configure
from octavo.errors import ConfigError
from tests.conformance.runtimes import LEVELS
from tests.e2e import test_adapters as adapters
from tests.e2e.test_draft_models import USUAL, check_that_guesses_change_nothing, proposals, stats, take_all
from tests.e2e.test_drafts import PROMPTS, VOCABULARY
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import edit_tensors, load_oracle, make_checkpoint
from tests.lora.adapter_folders import make_adapter

pytestmark = pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")


class Stored(NamedTuple):
    """Where a checkpoint keeps its prediction layer.

    blocks: what begins the names of its layers, each of which is like the layer of the model beside it, counted from
    the end below 0. offset: what is added to weights of norms. config: other values of config.json. window: tokens that
    the layer sees; None for all. reads_stream: whether states are streams before the last norm. mlp_norm: the name
    of the norm before the MLP. has_one_stream: whether it has one where the model has several. streams: what begins the
    names of two projections and a head, of a layer with several streams. sizes: other sizes of the model.
    """

    enorm: str = "model.layers.{}.enorm"
    hnorm: str = "model.layers.{}.hnorm"
    eh_proj: str | None = "model.layers.{}.eh_proj"
    norm: str | None = "model.layers.{}.shared_head.norm"
    head: str | None = None
    blocks: tuple[tuple[str, int], ...] = (("model.layers.{}.", -1),)
    is_normed: bool = False
    are_states_first: bool = False
    offset: float = 0.0
    config: dict[str, Any] = {"num_nextn_predict_layers": 1}
    window: int | None = None
    reads_stream: bool = False
    mlp_norm: str = "post_attention_layernorm"
    has_one_stream: bool = False
    streams: str | None = None
    sizes: dict[str, Any] = {}

    def own_names(self, count: int, names: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yield names of a model of `count` layers, and those that its prediction layer has for the same."""
        for block, like in self.blocks:
            source = f"layers.{like % count}."
            for name in names:
                if source in name and not (self.has_one_stream and "hc_" in name):
                    rest = name.partition(source)[2].replace("post_attention_layernorm", self.mlp_norm)
                    yield name, block.format(count) + rest


KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
DEEPSEEK = Stored(head="model.layers.{}.shared_head.head")
MTP = Stored(
    *("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    blocks=(("mtp.layers.0.", -1),),
    is_normed=True,
)
FAMILIES = {
    "axk2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": DEEPSEEK,
    "glm4_moe_lite": DEEPSEEK,
    "glm_moe_dsa": DEEPSEEK._replace(
        config={"num_nextn_predict_layers": 1, "indexer_types": ["full", "shared", "full"]}
    ),
    "qwen3_next": MTP._replace(offset=1.0, blocks=(("mtp.layers.0.", 1),), config={}),
    "qwen3_5": MTP._replace(offset=1.0, blocks=(("mtp.layers.0.", 1),), config={"mtp_num_hidden_layers": 1}),
    "qwen4_exp": Stored(
        *("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", None, None),
        blocks=(("mtp.layers.0.", 1),),
        offset=1.0,
        config={"mtp_num_hidden_layers": 1},
        reads_stream=True,
        streams="mtp.",
        sizes={"indexer_budget": 120, "head_dim": 16},
    ),
    "exaone_moe": MTP._replace(
        blocks=(("mtp.layers.0.", 0),), config={"num_nextn_predict_layers": 1, "sliding_window": 64}
    ),
    "ernie4_5_moe": Stored(
        *("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0", None),
        blocks=(("model.mtp_block.0.", 0),),
    ),
    "deepseek_v4": Stored(
        *("mtp.0.enorm", "mtp.0.hnorm", None, "mtp.0.norm"),
        blocks=(("mtp.0.", 2),),
        window=5,
        reads_stream=True,
        streams="mtp.0.",
        sizes={"mlp_layer_types": ["hash_moe", "moe", "moe", "moe"]},
    ),
    "glm5_next": Stored(
        *(f"model.language_model.layers.{{}}.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
        blocks=(("model.language_model.layers.{}.", 1),),
        is_normed=True,
        has_one_stream=True,
        sizes={"index_topk": 15},
    ),
    "hy_v4": Stored(
        *(f"model.mtp_layers.0.{name}" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")),
        blocks=(("model.mtp_layers.0.", -1),),
        is_normed=True,
        has_one_stream=True,
    ),
    "hy_v3": Stored(norm="model.layers.{}.final_layernorm", is_normed=True),
    "mellum": MTP._replace(blocks=(("mtp.layers.0.", 0),), config={}, window=7),
    "mimo_v2_flash": Stored(
        *(f"model.mtp.layers.0.{name}" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")),
        blocks=(("model.mtp.layers.0.", 0),),
        config={},
        window=7,
        reads_stream=True,
        mlp_norm="pre_mlp_layernorm",
    ),
    "step3p5": Stored(
        norm="model.layers.{}.transformer.shared_head.norm",
        head="model.layers.{}.transformer.shared_head.output",
        blocks=(("model.layers.{}.", 0),),
        offset=1.0,
        config={
            "num_nextn_predict_layers": 3,
            "layer_types": [*KINDS, *KINDS[:1] * 3],
            "swiglu_limits_shared": [0, 0, 0.9, 0, 0, 0],
        },
        window=7,
        reads_stream=True,
    ),
    "qwen2": Stored(
        *("model.mtp_layers.0.token_layernorm", "model.mtp_layers.0.hidden_layernorm"),
        *("model.mtp_layers.0.input_proj", "model.mtp_layers.0.final_layernorm"),
        blocks=(("model.mtp_layers.0.", -1),),
        is_normed=True,
        are_states_first=True,
        config={"num_nextn_predict_layers": 1, "architectures": ["MiMoForCausalLM"]},
    ),
    "nemotron_h": Stored(
        *("mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.0.eh_proj", "mtp.layers.1.final_layernorm"),
        blocks=(("mtp.layers.0.", 2), ("mtp.layers.1.", 3)),
        is_normed=True,
        config={"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"},
    ),
}


PROJECTED = ("embedding", "hidden")
"""What Qwen4-Exp has a projection for, each under a name of its own."""
FC = re.compile(r"eh_proj|mtp\.fc")
TWO = pytest.mark.parametrize("path", ["deepseek_v3", "qwen3_5"], indirect=True)
SLOW = {"qwen4_exp"}
"""Families whose operators are torch's."""
ALIKE = {"ernie4_5_moe", "exaone_moe", "glm4_moe", "glm4_moe_lite", "hy_v3", "mellum", "qwen2"}
"""Families whose kinds of layers are among those of the others: their guesses are compared with the formula each time,
and results with the long tests."""
HARSH = ("axk2", "deepseek_v3", "mimo_v2_flash", "qwen3_5", "step3p5")
"""Families whose layers are quantised and cut each time: one of each kind."""
OVERRIDES = {"rope_theta": 500.0}


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose checkpoint has one more layer, which is like one of the model's."""
    folder = tmp_path_factory.mktemp(request.param)
    return write_predicting(request.param, folder)


def write_predicting(family: str, folder: Path) -> Path:
    """Write a random model of a family with a prediction layer."""
    stored = FAMILIES[family]
    make_checkpoint(family, folder, vocab_size=VOCABULARY, **stored.sizes)
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config).update(stored.config)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(str(folder / "model.safetensors"))
    config = config.get("text_config", config)
    count, hidden = num_layers(config), config["hidden_size"]
    generator = torch.Generator().manual_seed(3)
    own = {
        name: tensors[like] + 0.1 * torch.randn(tensors[like].shape, generator=generator)
        for like, name in stored.own_names(count, tensors)
    }
    shapes = {
        stored.enorm: (hidden,), stored.hnorm: (hidden,), stored.eh_proj: (hidden, 2 * hidden), stored.norm: (hidden,),
        stored.head: (VOCABULARY, hidden),
    }  # fmt: skip
    for name, shape in shapes.items():
        if name is not None:
            own[f"{name.format(count)}.weight"] = torch.randn(shape, generator=generator) / hidden**0.5 + (
                len(shape) == 1
            )
    if family == "qwen4_exp":
        own[f"{stored.hnorm}.weight"] = torch.randn(config["hc_count"] * hidden, generator=generator) * 0.1
        own |= {f"mtp.fc_{each}.weight": torch.randn(hidden, hidden, generator=generator) / 6 for each in PROJECTED}
        heads = [name for name in tensors if "hyper_connection_mixer." in name]
        own |= {name.replace("model.", "mtp."): tensors[name] * 0.9 for name in heads}
    elif stored.streams is not None:
        count, shapes = config["hc_mult"], {f"{each}_proj.weight": (hidden, hidden) for each in "eh"}
        shapes |= {"hc_head_fn": (count, count * hidden), "hc_head_base": (count,), "hc_head_scale": (1,)}
        for name, shape in shapes.items():
            own[stored.streams + name] = torch.randn(shape, generator=generator) / hidden**0.5
    save_file(tensors | own, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return write_byte_tokenizer(folder)


def text_config(path: Path) -> dict[str, Any]:
    """Return the config of the part of a model that writes text."""
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    return config.get("text_config", config)


def stored_of(path: Path) -> Stored:
    """Return how a checkpoint holds its layer."""
    return FAMILIES[text_config(path)["model_type"].removesuffix("_text")]


def num_layers(config: dict[str, Any]) -> int:
    """Return the layers of the model itself."""
    count = config.get("num_hidden_layers")
    return len(config["layers_block_type"]) if count is None else count


def load(path: Path, **options: Any) -> LLM:
    own = USUAL | options
    llm = LLM(str(path), speculative_config={"method": "mtp", "num_speculative_tokens": 3}, **own)
    take_all(llm, own.get("seed"))
    return llm


@pytest.mark.parametrize(
    ("path", "options"),
    [
        pytest.param(family, options, marks=[pytest.mark.long] * (family not in families))
        for family in FAMILIES
        for options, families in (
            ({}, FAMILIES.keys() - SLOW - ALIKE),
            ({"seed": 1, "quantization": "int8", "max_num_batched_tokens": 16, "hf_overrides": OVERRIDES}, HARSH),
            ({"tensor_parallel_size": 2, "threads": 1}, ()),
        )
    ],
    indirect=["path"],
)
def test_a_prediction_layer_changes_no_bit(options: dict[str, Any], path: Path) -> None:
    if stored_of(path).window is not None:  # whose rotations differ by kind of layer
        options = {name: value for name, value in options.items() if name != "hf_overrides"}
    model = {name: options[name] for name in ("quantization", "hf_overrides") if name in options}
    with load(path, max_num_seqs=8, **options) as llm:
        check_that_guesses_change_nothing(llm, path, 30, **model)


@TWO
def test_it_changes_no_bit_beside_adapters(path: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"  # without the layer, of which no adapter knows
    family = json.loads((path / "config.json").read_text())["model_type"].removesuffix("_text")
    make_checkpoint(family, plain, vocab_size=VOCABULARY)
    for seed, name in enumerate(adapters.NAMES, 1):
        make_adapter(plain, tmp_path / name, ("o_proj",), seed=seed)
    options = {"max_model_len": 128, "enable_lora": True, "max_loras": 2, "num_gpu_blocks_override": 64}
    with LLM(str(path), **USUAL | options) as llm:
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
            states = layer.states(library, known[:-1])
            for token in proposed:
                streams.append(layer.streams(known, torch.cat([states, *streams]))[-1:])
                expected = int(layer.logits(streams[-1]).argmax())
                assert token == expected
                known = [*known, expected]


@TWO
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


@TWO
def test_other_weights_without_the_layer_change_nothing(path: Path, tmp_path: Path) -> None:
    other = shutil.copytree(path, tmp_path / "other")
    edit_tensors(other, remove=(next(each for each in load_file(other / "model.safetensors") if FC.search(each)),))
    with load(path, enable_sleep_mode=True) as llm:
        with pytest.raises(ConfigError, match=r"eh_proj\.weight is missing.*saved without its prediction layer"):
            llm.update_weights_from_disk(other)
        assert not llm.is_sleeping()


class _Layer:
    """The layer in plain torch: transformers' decoder layers between the tensors that only a prediction layer has."""

    def __init__(self, library: Any, path: Path, folder: Path) -> None:
        config = text_config(path)
        count, tensors = num_layers(config), load_file(str(path / "model.safetensors"))
        self.stored = stored_of(path)
        self.eps = config.get("rms_norm_eps", config.get("layer_norm_epsilon"))
        self.weights = {
            role: tensors[f"{name.format(count)}.weight"]
            for role in ("enorm", "hnorm", "eh_proj", "norm", "head")
            if (name := getattr(self.stored, role)) is not None
        }
        self.embed, self.head = library.get_input_embeddings(), library.get_output_embeddings()
        # transformers reads the tensors in the place of those of other layers
        moved = tensors | {name: tensors[own] for name, own in self.stored.own_names(count, tensors) if own in tensors}
        folder.mkdir()
        shutil.copy(path / "config.json", folder)
        kept = [name for name in load_library_names(library) if name in moved]
        save_file({name: moved[name] for name in kept}, str(folder / "model.safetensors"), metadata={"format": "pt"})
        self.model = load_oracle(folder).get_decoder()
        self.layers = [self.model.layers[like] for _, like in self.stored.blocks]
        if self.stored.streams == "mtp.":
            self.weights |= {each[0]: tensors[f"mtp.fc_{each}.weight"] for each in PROJECTED}
            self.model.hc_head = self.model.hyper_connection_mixer
            for name, parameter in self.model.hc_head.named_parameters():
                parameter.data = tensors[f"mtp.hyper_connection_mixer.{name}"]
        elif (streams := self.stored.streams) is not None:
            self.weights |= {each: tensors[f"{streams}{each}_proj.weight"] for each in "eh"}
            for name, parameter in self.model.hc_head.named_parameters():
                parameter.data = tensors[f"{streams}hc_head_{name.removeprefix('hc_')}"]

    def states(self, library: Any, tokens: list[int]) -> Tensor:
        """Return what the layer reads of the model's states at tokens, [tokens, hidden]."""
        streams: list[Tensor] = []
        if self.stored.reads_stream:
            decoder = library.get_decoder()
            head = getattr(decoder, "hc_head", None) or getattr(decoder, "hyper_connection_mixer", None)
            last = decoder.norm if self.stored.streams is None else head
            last.register_forward_pre_hook(lambda _, given: streams.append(given[0][0].flatten(1)))
        normed: Tensor = library(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
        return streams[-1] if streams else normed

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[name] + self.stored.offset
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def streams(self, known: list[int], states: Tensor) -> Tensor:
        embedded = self.embed.weight[torch.tensor(known[1:])]
        named = self.named(embedded)
        if self.stored.streams is not None:
            width = len(self.weights["hnorm"])
            normed = self.norm(states.view(len(embedded), -1, width), "hnorm")
            states = normed.view(len(embedded), -1, embedded.shape[1]) @ self.weights["h"].T
            x = states + (self.norm(embedded, "enorm") @ self.weights["e"].T)[:, None]
            if self.stored.norm is None:
                wide: Tensor = self.layers[0](x.flatten(1)[None], **named)[0]
                return wide
            streams: Tensor = self.layers[0](x[None], **named)[0].flatten(1)
            return streams
        read = self.norm(embedded, "enorm"), self.norm(states, "hnorm")
        x = torch.cat(read[::-1] if self.stored.are_states_first else read, 1) @ self.weights["eh_proj"].T
        for layer in self.layers:
            if self.stored.has_one_stream:
                x = x + layer.self_attn(layer.input_layernorm(x[None]), **named)[0][0]
                x = x + layer.mlp(layer.post_attention_layernorm(x[None]))[0]
            else:
                out = layer(x[None], **named)
                x = (out[0] if isinstance(out, tuple) else out)[0]
        return self.norm(x, "norm") if self.stored.is_normed else x

    def named(self, x: Tensor) -> dict[str, Any]:
        """Return what transformers' layers read beside x [tokens, hidden]."""
        count = len(x)
        positions = torch.arange(count)[None]
        ahead = positions - positions.T
        hidden = (ahead > 0) | (ahead <= -(self.stored.window or count))
        mask = torch.zeros(count, count).masked_fill(hidden, -torch.inf)[None, None]
        if not hasattr(self.model, "rotary_emb"):
            return {"attention_mask": positions >= 0 if hasattr(self.model.config, "index_kpool") else mask}
        if self.stored.streams == "mtp.":
            positions = positions.expand(3, 1, -1)
            turned: Any = self.model.rotary_emb(x[None], positions)
            return {"attention_mask": mask, "position_embeddings": turned}
        if self.stored.streams is not None:
            turned = {"main": self.model.rotary_emb(x[None], positions, "main")}
        else:
            kind = () if self.stored.window is None else ("sliding_attention",)
            turned = self.model.rotary_emb(x[None], positions, *kind)
        return {"attention_mask": mask, "position_ids": positions, "position_embeddings": turned}

    def logits(self, stream: Tensor) -> Tensor:
        if self.stored.streams == "mtp.":
            stream = self.model.hc_head(stream.view(1, 1, -1))[0, 0]
        elif self.stored.streams is not None:
            stream = self.model.hc_head(stream.view(1, 1, -1, len(self.weights["norm"])))[0, 0]
        if not self.stored.is_normed and self.stored.norm is not None:
            stream = self.norm(stream, "norm")
        logits: Tensor = stream @ self.weights.get("head", self.head.weight).T
        return logits


def load_library_names(library: Any) -> set[str]:
    """Return the names of tensors in a checkpoint that transformers' model reads."""
    with tempfile.TemporaryDirectory() as folder:
        library.save_pretrained(folder)
        return set(load_file(f"{folder}/model.safetensors"))


@TWO
def test_a_prediction_layer_has_the_overrides_of_its_model(path: Path) -> None:
    args = EngineArgs(model=str(path), speculative_config={"method": "mtp"}, hf_overrides={"rope_theta": 500.0})
    draft = configure(args).draft
    assert draft is not None
    assert draft.overrides == {"rope_theta": 500.0}
