"""Quantised checkpoints compute what their dequantised weights do, whatever runs beside a row."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from octavo.config.checkpoint import Checkpoint
from octavo.devices.cpu.runtime import CpuRuntime
from octavo.devices.reference.attention import ReferenceBackend
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, ConfigError
from octavo.layers.layer import PreparedLayer
from octavo.models.decoder import DecoderStack
from octavo.models.loader import LoadedModel
from octavo.models.packed_folder import PackedFolder
from octavo.ops.registry import Ops, bind
from octavo.quantization.method import KeptAs
from octavo.quantization.registry import method_named
from tests.fakes.checkpoints import load_oracle, make_checkpoint
from tests.fakes.quantized import (
    Encode,
    awq,
    bitnet,
    bitsandbytes,
    compressed_tensors,
    floats,
    fp8,
    gpt_oss,
    gptq,
    llm_int8,
    mxfp4,
    nvfp4,
    quantize,
)
from tests.models.paged_run import PagedRun, Stream

TOKENS = [5, 17, 99, 3, 42, 8, 64, 21, 77]
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 2}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "int"}
CODES: dict[str, tuple[Encode, dict[str, Any]]] = {
    "W4A16": compressed_tensors(4, 128),
    "W4A16 in channels": compressed_tensors(4, 0),
    "W4A16_ASYM": compressed_tensors(4, 32, symmetric=False),
    "W4A16 in an order": compressed_tensors(4, 32, ordered=True),
    "W8A16": compressed_tensors(8, 64),
    "W8A8": compressed_tensors(8, 0, packing=False),
    "W8A8 with zero points": compressed_tensors(8, 0, packing=False, symmetric=False),
    "GPTQ": gptq(4, 32),
    "GPTQ, version 2 with zero points": gptq(4, 64, symmetric=False, version=2),
    "GPTQ with zero points in an order": gptq(4, 32, symmetric=False, ordered=True),
    "GPTQ of 8 bits in an order": gptq(8, 64, ordered=True),
    "GPTQ of 8 bits with zero points": gptq(8, 0, symmetric=False),
    "AWQ": awq(32),
    "AutoRound as GPTQ": (gptq(4, 32)[0], AUTO_ROUND | {"packing_format": "auto_round:auto_gptq", "sym": True}),
    "AutoRound as AWQ": (awq(32)[0], AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "sym": False}),
    "MXFP4": (mxfp4, floats(4, "group", 32)),
    "NVFP4": (nvfp4, floats(4, "tensor_group", 16)),
    "BitNet": (bitnet(divides=True), {"quant_method": "bitnet"}),
    "BitNet with factors": (bitnet(divides=False), {"quant_method": "bitnet", "linear_class": "autobitlinear"}),
    "LLM.int8": (llm_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FLOATS = {
    "FP8 in channels": (fp8(1, 0, ".weight_scale"), floats(8, "channel")),
    "FP8 of tensors": (fp8(0, 0, ".weight_scale"), floats(8, "tensor")),
    "FP8 in blocks": (fp8(48, 96, ".weight_scale"), floats(8, "block", block=[48, 96])),
    "FP8 of DeepSeek": (fp8(48, 96, ".weight_scale_inv"), {"quant_method": "fp8", "weight_block_size": [48, 96]}),
    "NF4": (bitsandbytes(48, nested=False), NF4),
    "NF4 with nested scales": (bitsandbytes(64, nested=True), NF4 | {"bnb_4bit_use_double_quant": True}),
}


@cache
def native() -> Ops:
    return CpuRuntime.open().bind()


def load(
    path: Path, ops: Ops | None = None, *, bits: int = 16, mesh: Mesh | None = None, **options: Any
) -> DecoderStack:
    opened = LoadedModel.open(Checkpoint.open(path), mesh or Mesh.single(), kept_as=KeptAs(bits))
    return opened.load(ops or bind(), ReferenceBackend(), **options)


def logits(model: DecoderStack, *others: list[int]) -> torch.Tensor:
    run, stream = PagedRun(model), Stream([*TOKENS])
    run.step([(stream, 4), *((Stream([*other]), len(other)) for other in others)])
    run.step([(stream, len(TOKENS) - 4)])
    return torch.stack(stream.logits)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", CODES)
def test_codes_stay_as_they_are(name: str, tmp_path: Path) -> None:
    encode, config = CODES[name]
    plain = make_checkpoint("llama", tmp_path / "m", **SIZES)
    path = quantize(plain, encode, config)
    with torch.inference_mode():
        wanted = load_oracle(plain)(torch.tensor([TOKENS])).logits[0]
    for ops in (bind(), native()):
        model = load(path, ops)
        check_weights(model, plain)
        found = logits(model)
        assert error(found, wanted) < 5e-4
        assert torch.equal(found, logits(model, [9, 8, 7], [55]))
    assert error(logits(load(path, native(), bits=8)), wanted) < 0.05


@pytest.mark.parametrize("name", FLOATS)
def test_floats_become_plain_weights(name: str, tmp_path: Path) -> None:
    plain = make_checkpoint("llama", tmp_path / "m", **SIZES)
    path = quantize(plain, *FLOATS[name])
    model = load(path)
    check_weights(model, plain)
    wanted = load(plain)
    assert torch.equal(logits(model), logits(wanted))
    for rank in range(2):
        mesh = Mesh.of_rank(rank, tensor=2)
        share, own = load(path, mesh=mesh).state(), load(plain, mesh=mesh).state()
        assert all(torch.equal(share[name], own[name]) for name in own)


def check_weights(model: DecoderStack, plain: Path) -> None:
    """Every weight that is multiplied has the values of the dequantised checkpoint."""
    tensors = {name.removeprefix("model."): each for name, each in load_file(plain / "model.safetensors").items()}
    for path, layer in model.layers_by_path():
        if isinstance(layer, PreparedLayer):
            wanted = torch.cat([tensors[f"{name}.weight"] for name, _ in layer.sources(path)])
            assert torch.equal(layer.prepared.rows(torch.arange(len(wanted))), wanted), path


def test_experts_of_gpt_oss_stay_codes(tmp_path: Path) -> None:
    plain = make_checkpoint("gpt_oss", tmp_path / "m", hidden_size=64, intermediate_size=32)
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    path = quantize(plain, gpt_oss, config, weights=r".*experts\.(gate_up|down)_proj")
    model, wanted = load(path, native()), logits(load(plain, native()))
    assert error(logits(model), wanted) < 5e-4
    assert torch.equal(logits(model), logits(model, [9, 8, 7], [55]))
    assert all(
        each.dtype is not torch.float32
        for name, each in model.state().items()
        if "experts" in name and "bias" not in name
    )
    specs = LoadedModel.open(Checkpoint.open(path), Mesh.single()).model.state_specs(native())
    assert {name: (each.shape, each.dtype) for name, each in specs.items()} == {
        name: (each.shape, each.dtype) for name, each in model.state().items()
    }


def test_weights_of_one_layer_may_be_stored_in_different_ways(tmp_path: Path) -> None:
    four, eight = compressed_tensors(4, 32), compressed_tensors(8, 64)
    wide = {**eight[1]["config_groups"]["group_0"], "targets": [r"re:.*\.[vu]\w*_proj"]}
    groups = {"four": four[1]["config_groups"]["group_0"], "eight": wide}
    config = {**four[1], "config_groups": groups, "ignore": ["lm_head", r"re:.*layers\.1\.self_attn\.k_proj"]}

    def encode(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return (eight if "v_proj" in name or "up_proj" in name else four)[0](name, weight)

    plain = make_checkpoint("llama", tmp_path / "m", **SIZES, attention_bias=True)
    path = quantize(plain, encode, config, weights=r".*layers\.(0\..*_proj|1\..*[qvo]_proj)$")
    wanted = logits(load(plain))
    for ops in (bind(), native()):
        model = load(path, ops)
        check_weights(model, plain)
        assert error(logits(model), wanted) < 5e-4
        assert torch.equal(logits(model), logits(model, [9, 8, 7], [55]))


def test_experts_have_orders_of_their_own_but_gate_and_up_share_one(tmp_path: Path) -> None:
    sizes = {**SIZES, "moe_intermediate_size": 64}
    plain = make_checkpoint("qwen3_moe", tmp_path / "m", **sizes)
    path = quantize(plain, *gptq(4, 32, symmetric=False, ordered=True))
    model = load(path, native())
    assert error(logits(model), logits(load(plain, native()))) < 5e-4
    assert torch.equal(logits(model), logits(model, [9, 8, 7], [55]))
    path = quantize(make_checkpoint("qwen3_moe", tmp_path / "o", **sizes), *compressed_tensors(4, 32, ordered=True))
    with pytest.raises(CheckpointError, match="gate and up of expert 0 have different g_idx"):
        load(path)


@pytest.mark.parametrize("name", ["W8A8", "FP8 in channels"])
def test_latents_and_their_experts_are_read(name: str, tmp_path: Path) -> None:
    plain = make_checkpoint("deepseek_v3", tmp_path / "m")
    path = quantize(plain, *(CODES | FLOATS)[name])
    for mesh in (Mesh.single(), Mesh.of_rank(1, tensor=2, whole_experts=True)):
        states = [load(each, native(), mesh=mesh).state() for each in (path, plain)]
        same = [key for key in states[0] if key in states[1] and torch.equal(states[0][key], states[1][key])]
        # what expands latents is never kept as codes, nor is a router
        assert {key.split(".")[-2] for key in same} >= {"keys", "values", "gate"}
    assert error(logits(load(path, native())), logits(load(plain, native()))) < 5e-4


def test_packed_weights_of_codes_are_mapped_again(tmp_path: Path) -> None:
    path = quantize(make_checkpoint("llama", tmp_path / "m", **SIZES), *gptq(4, 32, ordered=True))
    found = []
    for _ in range(2):
        packed = PackedFolder(tmp_path / "packed", max_bytes=1 << 30)
        found.append(logits(load(path, native(), packed=packed)))
        packed.close(wait_s=10)
    assert torch.equal(*found)
    assert len(list((tmp_path / "packed").glob("*.packed"))) == 1


def test_a_file_with_the_name_that_gptq_gives_it_is_read(tmp_path: Path) -> None:
    path = quantize(make_checkpoint("llama", tmp_path / "m", **SIZES), *gptq(4, 32))
    wanted = logits(load(path))
    (path / "model.safetensors").rename(path / "gptq_model-4bit-32g.safetensors")
    assert torch.equal(logits(load(path)), wanted)


def test_ranks_share_codes(tmp_path: Path) -> None:
    encode, config = compressed_tensors(4, 32, symmetric=False)
    path = quantize(make_checkpoint("qwen3_moe", tmp_path / "m", **SIZES, moe_intermediate_size=64), encode, config)
    whole = dict(load(path).state())
    shares = [load(path, mesh=Mesh.of_rank(rank, tensor=2)).state() for rank in range(2)]
    for name, tensor in whole.items():
        parts = [share[name] for share in shares]
        assert all(part.dtype == tensor.dtype for part in parts)
        if name.endswith("o_proj.zeros"):
            assert tensor.min() < tensor.max()
            assert torch.equal(torch.cat(parts), tensor)


def joined_weight(path: Path, mesh: Mesh, *, has_float8: bool = True) -> torch.Tensor:
    """What a rank has of a weight whose inputs are cut where ranks sum."""
    opened = LoadedModel.open(Checkpoint.open(path), mesh, kept_as=KeptAs(has_float8=has_float8))
    layer = dict(opened.load(bind(), ReferenceBackend()).layers_by_path())["layers.0.mlp.down_proj"]
    assert isinstance(layer, PreparedLayer)
    return layer.prepared.rows(torch.arange(layer.num_outputs))


@pytest.mark.parametrize("name", ["W8A8", "GPTQ with zero points", "FP8 in channels", "FP8 of tensors"])
def test_ranks_that_sum_share_inputs_of_codes(name: str, tmp_path: Path) -> None:
    encode, config = {**CODES, **FLOATS, "GPTQ with zero points": gptq(4, 64, symmetric=False)}[name]
    path = quantize(make_checkpoint("llama", tmp_path / "m", **SIZES, num_hidden_layers=1), encode, config)
    shares = [joined_weight(path, replace(Mesh.of_rank(rank, tensor=2), reduce="sum")) for rank in range(2)]
    assert torch.equal(torch.cat(shares, 1), joined_weight(path, Mesh.single()))


@pytest.mark.parametrize("inputs", [240, 384])
def test_ranks_that_sum_decode_floats_whose_groups_they_cut(inputs: int, tmp_path: Path) -> None:
    sizes = {**SIZES, "intermediate_size": inputs, "num_hidden_layers": 1}
    config = {"quant_method": "fp8", "weight_block_size": [48, 128]}
    path = quantize(make_checkpoint("llama", tmp_path / "m", **sizes), fp8(48, 128, ".weight_scale_inv"), config)
    for rank in range(2):
        mesh = replace(Mesh.of_rank(rank, tensor=2), reduce="sum")
        assert torch.equal(joined_weight(path, mesh), joined_weight(path, mesh, has_float8=False))
        opened = LoadedModel.open(Checkpoint.open(path), mesh, torch.bfloat16, kept_as=KeptAs(has_float8=True))
        kept = {name.rpartition(".")[0] for name, _ in opened.model.named_parameters() if name.endswith(".codes")}
        assert kept == {f"layers.0.{each}" for each in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj")}
        how = sorted((kept, how.partition(" ")[0], how.rpartition(", ")[2]) for _, kept, how in opened.stored_as())
        assert how[0] == ("bfloat16", "1", "dequantised")
        assert how[1][1:] == ("6", "decoded where they are multiplied")


def test_ranks_that_sum_cut_no_group_of_codes(tmp_path: Path) -> None:
    sizes = {**SIZES, "intermediate_size": 384, "num_hidden_layers": 1}
    path = quantize(make_checkpoint("llama", tmp_path / "m", **sizes), *compressed_tensors(4, 128))
    with pytest.raises(ConfigError, match="tensor_parallel_reduce is sum, which would cut groups"):
        joined_weight(path, replace(Mesh.of_rank(1, tensor=2), reduce="sum"))


def test_dummy_weights_are_those_of_the_config(tmp_path: Path) -> None:
    encode, config = compressed_tensors(4, 32)
    plain = make_checkpoint("qwen3_moe", tmp_path / "m", **SIZES, moe_intermediate_size=64)
    path = quantize(plain, encode, config)
    kept = {name: (tensor.shape, tensor.dtype) for name, tensor in load(path).state().items()}
    (path / "model.safetensors").unlink()
    made = load(path, dummy_seed=0)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in made.state().items()} == kept
    assert logits(made).isfinite().all()


def test_quantising_again_is_refused(tmp_path: Path) -> None:
    path = quantize(make_checkpoint("llama", tmp_path / "m", **SIZES), *compressed_tensors(4, 128))
    with pytest.raises(
        ConfigError, match=r"quantization is int8, but the checkpoint is quantised already \(compressed"
    ):
        LoadedModel.open(Checkpoint.open(path), Mesh.single(), method=method_named("int8"))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_quantising_again_that_is_allowed_quantises_the_dequantised_weights(family: str, tmp_path: Path) -> None:
    sizes = SIZES | ({"moe_intermediate_size": 64} if "moe" in family else {})
    rounded = make_checkpoint(family, tmp_path / "m", **sizes)
    path = quantize(rounded, *compressed_tensors(4, 32))
    int8 = method_named("int8", requantizes=True)
    again, once = (LoadedModel.open(Checkpoint.open(each), Mesh.single(), method=int8) for each in (path, rounded))
    (stated,) = again.stored_as()
    assert stated[1] == "int8"
    assert stated[2].endswith("dequantised and quantised again")
    made, wanted = (each.load(bind(), ReferenceBackend()) for each in (again, once))
    assert torch.equal(logits(made), logits(wanted))
