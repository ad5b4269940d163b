"""Loading: what fits is filled, what does not is named."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.collectives import Collectives
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, EngineDeadError, UnsupportedModel
from octavo.models.decoder import DecoderStack
from octavo.models.loader import DTYPES
from octavo.models.stored_names import tensor_slots
from tests.fakes.checkpoints import edit_config, edit_tensors, make_checkpoint, rename_tensors, to_pytorch_archive
from tests.fakes.shapes import group
from tests.models.loading import open_model
from tests.models.paged_run import load, logits_of

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_checkpoint("llama", tmp_path)


def load_dummy(path: Path, seed: int = 0) -> DecoderStack:
    return load(path, torch.bfloat16, dummy_seed=seed)


def test_parts_of_one_weight_lie_in_the_order_they_are_read(llama: Path) -> None:
    stored = load_file(llama / "model.safetensors")
    parameters = load(llama).state()
    prefix = "layers.0.self_attn."
    parts = [stored[f"model.{prefix}{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(parameters[f"{prefix}qkv_proj.weight"], torch.cat(parts))
    parts = [stored[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(parameters["layers.1.mlp.gate_up_proj.weight"], torch.cat(parts))


def test_weights_are_cast_to_the_wanted_type(llama: Path) -> None:
    model = load(llama, torch.bfloat16)
    assert {tensor.dtype for tensor in model.state().values()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_auto_is_the_checkpoints_own_type(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_checkpoint("llama", tmp_path, dtype="bfloat16"))
    assert DTYPES[checkpoint.dtype_name()] == torch.bfloat16


def test_the_shape_for_memory_arithmetic_is_the_configs(tmp_path: Path) -> None:
    shape = open_model(Checkpoint.open(make_checkpoint("mistral", tmp_path)), Mesh.single()).config.shape()
    assert (shape.num_layers, shape.hidden_size, shape.intermediate_size) == (2, 32, 56)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 8)
    assert (shape.vocab_size, shape.max_position_embeddings, shape.cache_groups) == (
        130, 256, (group(0, 1, window=7),),
    )  # fmt: skip


def test_a_model_can_be_made_without_memory(llama: Path) -> None:
    model = open_model(Checkpoint.open(llama), Mesh.single())
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert set(tensor_slots(model)) == {name.removeprefix("model.") for name in load_file(llama / "model.safetensors")}


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt", "gpt2"])
def test_every_parameter_is_counted_by_the_headers(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path)
    assert sum(each.numel() for each in load(path).state().values()) == Checkpoint.open(path).num_parameters()


def test_a_tied_head_may_be_stored_once_more_unless_it_differs(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, tie_word_embeddings=True)
    table = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(path, **{"lm_head.weight": table.clone()})
    state = load(path).state()
    assert torch.equal(state["embed_tokens.weight"], table)
    assert not any(name.startswith("lm_head") for name in state)
    edit_tensors(path, **{"lm_head.weight": table + 1})
    with pytest.raises(CheckpointError, match=rf"{path}: lm_head\.weight differs .* tie_word_embeddings"):
        load(path)


def test_known_tensors_that_nobody_needs_are_passed_over(tmp_path: Path) -> None:
    path = make_checkpoint("gpt2", tmp_path)
    mask = {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4), "transformer.h.1.attn.masked_bias": torch.tensor(-1e4)}
    edit_tensors(path, **mask)
    load(path)
    other = make_checkpoint("llama", tmp_path / "llama")
    edit_tensors(other, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    load(other)
    third = make_checkpoint("opt", tmp_path / "opt")
    edit_tensors(third, **{"model.decoder.version": torch.ones(1)})
    load(third)


@pytest.mark.parametrize("archive", [False, True], ids=["safetensors", "archive"])
class TestWhatDoesNotFit:
    """The same complaint for both formats: one from the headers, one while reading."""

    def complaint(self, path: Path, archive: bool) -> str:
        if archive:
            to_pytorch_archive(path)
        with pytest.raises(CheckpointError) as raised:
            load(path)
        return str(raised.value)

    def test_a_missing_tensor_is_named(self, llama: Path, archive: bool) -> None:
        edit_tensors(llama, remove=(UP,))
        assert "layers.1.mlp.up_proj.weight is missing, which LlamaForCausalLM needs" in self.complaint(llama, archive)

    def test_tensors_under_other_names_are_named_beside_missing_ones(self, llama: Path, archive: bool) -> None:
        rename_tensors(llama, "model.layers.1.mlp.up_proj", "model.layers.1.mlp.fc_in")
        told = self.complaint(llama, archive)
        assert "layers.1.mlp.up_proj.weight is missing, which LlamaForCausalLM needs" in told
        assert "model.layers.1.mlp.fc_in.weight is left over: config.json and weights belong to different" in told
        assert "download it again" not in told

    def test_of_many_missing_tensors_one_is_named(self, llama: Path, archive: bool) -> None:
        edit_config(llama, num_hidden_layers=3)
        assert re.search(r"layers\.2\.\S+ and 8 more are missing", self.complaint(llama, archive))

    def test_a_surplus_tensor_is_named(self, llama: Path, archive: bool) -> None:
        edit_tensors(llama, **{"model.layers.0.extra.weight": torch.ones(2)})
        assert "model.layers.0.extra.weight is left over" in self.complaint(llama, archive)

    def test_a_surplus_tensor_that_no_model_of_this_kind_has_is_ignored(
        self, llama: Path, archive: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        edit_tensors(llama, **{"score.weight": torch.ones(2, 32), "value_head.weight": torch.ones(3)})
        if archive:
            to_pytorch_archive(llama)
        load(llama)
        assert caplog.text.count("and 1 more are no part of LlamaForCausalLM and ignored") == 1

    def test_layers_beyond_the_config_are_named(self, llama: Path, archive: bool) -> None:
        edit_config(llama, num_hidden_layers=1)
        assert re.search(r"model\.layers\.1\.\S+ and 8 more are left over", self.complaint(llama, archive))

    def test_a_wrong_shape_is_named(self, llama: Path, archive: bool) -> None:
        edit_tensors(llama, **{UP: torch.ones(56, 31)})
        assert f"{UP} has shape [56, 31], config.json requires [56, 32]" in self.complaint(llama, archive)

    def test_numbers_of_another_kind_are_named(self, llama: Path, archive: bool) -> None:
        for dtype in (torch.int8, torch.float8_e4m3fn, torch.int64):
            edit_tensors(llama, **{UP: torch.ones(56, 32).to(dtype)})
            assert f"{UP} is stored as" in self.complaint(llama, archive)
            if archive:
                make_checkpoint("llama", llama)

    def test_a_truncated_file_is_named(self, llama: Path, archive: bool) -> None:
        if archive:
            to_pytorch_archive(llama)
        file = next(path for path in llama.iterdir() if path.suffix in (".bin", ".safetensors"))
        os.truncate(file, file.stat().st_size - 1000)
        with pytest.raises(CheckpointError, match=rf"{file.name}: .*download it again"):
            load(llama)


def test_an_archive_that_holds_code_is_not_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    path = make_checkpoint("llama", tmp_path / "model")
    to_pytorch_archive(path)
    torch.save({"model.norm.weight": Bomb()}, path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: cannot be read as weights"):
        load(path)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "content",
    [[1, 2], {"model.norm.weight": "text"}, {7: torch.ones(2)}, {"model.norm.weight": torch.eye(3).to_sparse()}],
)
@pytest.mark.filterwarnings("ignore:Validating sparse tensor:UserWarning")  # torch 2.14
def test_an_archive_of_something_else_is_named(llama: Path, content: Any) -> None:
    to_pytorch_archive(llama)
    torch.save(content, llama / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match=r"pytorch_model\.bin: .* expected (a mapping|a name with a tensor|a dense tensor)"
    ):
        load(llama)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, 'hidden_act is "gelu", expected "silu"'),
        (
            "llama",
            {"rope_parameters": {"rope_type": "other", "rope_theta": 1e4}},
            'expected .* "ntk", .* or "proportional"',
        ),
        (
            "qwen3",
            {"layer_types": ["full_attention", "other"]},
            "expected full_attention or sliding_attention for each",
        ),
        ("qwen2", {"layer_types": ["full_attention"]}, "expected full_attention or sliding_attention for each of 2"),
        ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "expected full_attention alone"),
        ("llama", {"layer_types": 5}, "layer_types has 5, expected full_attention alone"),
        ("llama", {"layer_types": [["full_attention"]]}, "expected full_attention alone"),
        ("llama", {"quantization_config": {"quant_method": "other"}}, 'quant_method is "other", expected'),
        ("gpt2", {"activation_function": "selu"}, 'activation_function is "selu", expected "relu" or "gelu"'),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is true"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine is false, expected true"),
    ],
)
def test_a_variant_that_is_not_implemented_is_refused_by_name(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = make_checkpoint(family, tmp_path)
    edit_config(path, **changes)
    with pytest.raises(UnsupportedModel, match=message):
        load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, expected a divisor of num_attention_heads, which is 4"),
        (
            {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None},
            "hidden_size is 32, expected a multiple",
        ),
        ({"head_dim": 7}, "head_dim is 7, and 7 elements of a head turn, expected an even number"),
        ({"head_dim": -8}, "head_dim is -8, expected an integer of at least 1"),
        ({"hidden_size": 10**20}, "hidden_size is 100000000000000000000, expected an integer of at most"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is Infinity, expected a finite number"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta is 0, expected a number above 0"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": -2.0}},
            "rope_parameters.factor is -2.0, expected a number above 0",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                    "original_max_position_embeddings": 64,
                }
            },
            "low_freq_factor is 4, expected a number below high_freq_factor, which is 4",
        ),
        (
            {
                "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
                "partial_rotary_factor": 0.5,
            },
            'partial_rotary_factor is 0.5 and rope_type is "linear"; expected 1, or rope_type "default"',
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "default"}}},
            "rope_parameters differ by kind of layer, expected those of all layers",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 4,
                    "long_factor": [1.0, 2.0, 0.0, 4.0],
                }
            },
            "rope_parameters.long_factor is .*, expected a list of 4 numbers above 0",
        ),
        ({"rope_parameters": {**YARN, "beta_fast": 1e308}}, "rope_parameters.beta_fast is 1e.308, expected how many"),
        ({"rope_parameters": {**YARN, "beta_slow": 1e-300}}, "rope_parameters.beta_slow is 1e-300, expected how many"),
        ({"rope_parameters": {**YARN, "rope_theta": 1}}, "rope_parameters.rope_theta is 1, expected another number"),
        ({"vocab_size": "130"}, 'vocab_size is "130", expected an integer'),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected an integer of at least 1"),
    ],
)
def test_numbers_that_contradict_each_other_are_named(llama: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(llama, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(llama)


def test_each_kind_of_layer_has_its_rotation(tmp_path: Path) -> None:
    path = make_checkpoint("gemma3", tmp_path)
    edit_config(path, rope_parameters={"sliding_attention": {"rope_type": "default"}})
    with pytest.raises(CheckpointError, match=r"rope_parameters\.full_attention is missing, expected the rotary param"):
        load(path)


def test_a_width_below_one_is_named(tmp_path: Path) -> None:
    path = make_checkpoint("gpt2", tmp_path)
    edit_config(path, n_inner=-1)
    with pytest.raises(CheckpointError, match="n_inner is -1, expected an integer of at least 1"):
        load(path)


def test_dummy_weights_need_no_files_and_follow_the_seed(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    first, same, other = (load_dummy(llama, seed).state() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], same[name]) for name in first)
    weights = [name for name in first if first[name].dim() == 2]
    assert not any(torch.equal(first[name], other[name]) for name in weights)
    assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16}
    logits = logits_of(load_dummy(llama), num_decoded=5)
    assert logits.isfinite().all()
    assert logits.std() > 0.01


@pytest.mark.parametrize("dummy_seed", [None, 0])
def test_loading_ends_when_another_rank_has_failed(llama: Path, dummy_seed: int | None) -> None:
    class Poisoned(Collectives):
        def check(self) -> None:
            raise EngineDeadError("rank 1 was killed")

    with pytest.raises(EngineDeadError, match="rank 1 was killed"):
        load(llama, mesh=Mesh(tensor_group=Poisoned()), dummy_seed=dummy_seed)


def test_loading_with_progress_is_quiet_without_a_terminal(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    load(llama, progress=True)
    assert capfd.readouterr() == ("", "")
