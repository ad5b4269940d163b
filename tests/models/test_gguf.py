"""A GGUF file computes, bit by bit, what the checkpoint computes that it was made from."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.config.checkpoint import Checkpoint
from octavo.devices.reference.attention import ReferenceBackend
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, OctavoError
from octavo.gguf.reader import HELD_AS, TENSOR_TYPES
from octavo.models.loader import LoadedModel
from octavo.ops.registry import bind
from octavo.quantization.gguf import BLOCK_TYPES, dequantized
from octavo.quantization.method import KeptAs, WeightMethod
from octavo.quantization.registry import method_named
from tests.fakes.checkpoints import edit_config, edit_tensors, make_checkpoint
from tests.fakes.gguf_files import Stored, convert, plain
from tests.fakes.sizes import BLOCKS
from tests.models.paged_run import PagedRun, Stream

TOKENS = [5, 17, 99, 3, 42, 8, 64, 21, 77]
LONG = pytest.mark.long
GEMMA3 = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "query_pre_attn_scalar": 16,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LATENT_YARN = {"mscale": 0.7, "mscale_all_dim": 0.7}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 128,
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [1.5, 3.0, 5.0, 9.0],
}
# overrides are settings of the releases: files do not have these
FAMILIES: list[Any] = [
    ("llama", "llama", {}),
    ("qwen3", "qwen3", {}),
    ("nemotron-nas", "deci", {"num_hidden_layers": 4, "block_configs": BLOCKS[:4]}),
    ("qwen3_moe", "qwen3moe", {"mlp_only_layers": []}),
    ("gemma3", "gemma3", GEMMA3),
    ("gemma3n", "gemma3n", {}),
    pytest.param("gemma", "gemma", {}, marks=LONG),
    pytest.param("gemma2", "gemma2", {"query_pre_attn_scalar": 16}, marks=LONG),
    pytest.param("qwen2", "qwen2", {}, marks=LONG),
    pytest.param("qwen2_moe", "qwen2moe", {}, marks=LONG),
    pytest.param("mixtral", "llama", {}, marks=LONG),
    pytest.param("ministral3", "mistral3", {}, marks=LONG),
    pytest.param("granite", "granite", {}, marks=LONG),
    pytest.param("olmo2", "olmo2", {}, marks=LONG),
    pytest.param("phi3", "phi3", {}, marks=LONG),
    pytest.param("glm4", "glm4", {}, marks=LONG),
    pytest.param("cohere", "command-r", {}, marks=LONG),
    pytest.param("ernie4_5", "ernie4_5", {}, marks=LONG),
    pytest.param("seed_oss", "seed_oss", {}, marks=LONG),
    pytest.param("starcoder2", "starcoder2", {}, marks=LONG),
    pytest.param(
        *("smollm3", "smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "layer_types": None}),
        marks=LONG,
    ),
    pytest.param("gpt_oss", "gpt-oss", {"swiglu_limit": 7.0}, marks=LONG),
    ("deepseek_v3", "deepseek2", {}),
    pytest.param("deepseek_v3", "deepseek2", {"rope_parameters": {**YARN, **LATENT_YARN}}, marks=LONG),
    pytest.param("deepseek_v2", "deepseek2", {"q_lora_rank": None, "n_shared_experts": 2}, marks=LONG),
    pytest.param("granitemoe", "granitemoe", {"residual_multiplier": 0.5}, marks=LONG),
    pytest.param("granitemoeshared", "granitemoe", {}, marks=LONG),
    pytest.param("olmoe", "olmoe", {}, marks=LONG),
    pytest.param("glm4_moe", "glm4moe", {}, marks=LONG),
    pytest.param("nemotron", "nemotron", {}, marks=LONG),
    pytest.param("arcee", "arcee", {"rope_parameters": YARN}, marks=LONG),
    pytest.param("bailing_moe_v2", "bailingmoe2", {}, marks=LONG),
    pytest.param("dots1", "dots1", {"norm_topk_prob": True}, marks=LONG),
    pytest.param("granite", "minicpm", {}, marks=LONG),
    pytest.param("llama", "exaone", {"rope_parameters": LLAMA3}, marks=LONG),
    pytest.param("llama", "internlm2", {}, marks=LONG),
    pytest.param("olmo", "olmo", {}, marks=LONG),
    ("phimoe", "phimoe", {"router_jitter_noise": 0.01}),
    ("jamba", "jamba", {}),
    pytest.param("mamba", "mamba", {}, marks=LONG),
    pytest.param("mamba", "mamba", {"use_conv_bias": False, "use_bias": True}, marks=LONG),
    pytest.param("falcon_mamba", "mamba", {}, marks=LONG),
    # the converter stretches the base of the rotation itself
    pytest.param("hunyuan_v1_dense", "hunyuan-dense", {"rope_parameters": None}, marks=LONG),
    pytest.param("hunyuan_v1_moe", "hunyuan-moe", {}, marks=LONG),
    pytest.param("minimax_m2", "minimax-m2", {}, marks=LONG),
    pytest.param("stablelm", "stablelm", {"use_qkv_bias": True, "use_parallel_residual": True}, marks=LONG),
    pytest.param(
        *("exaone4", "exaone4", {"num_hidden_layers": 4, "sliding_window": 5, "layer_types": None}), marks=LONG
    ),
    pytest.param("exaone4", "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}, marks=LONG),
    ("qwen3_5", "qwen35", {}),
    ("qwen3_5_moe", "qwen35moe", {}),
    ("qwen3_next", "qwen3next", {"mlp_only_layers": []}),
    ("gemma4", "gemma4", {}),
    ("apertus", "apertus", {"rope_parameters": LLAMA3}),
    ("gemma4_moe", "gemma4", {}),
    ("lfm2_moe", "lfm2moe", {}),
    ("granitemoehybrid", "granitehybrid", {}),
    ("nemotron_h", "nemotron_h_moe", {}),
    ("bloom", "bloom", {}),
    ("afmoe", "afmoe", {"num_hidden_layers": 4, "layer_types": None}),
    ("mellum", "mellum", {}),
    ("mimo_v2_flash", "mimo2", {}),
    ("step3p5", "step35", {}),
    ("mistral4", "mistral4", {}),
    ("glm_moe_dsa", "glm-dsa", {"indexer_types": ["full", "shared", "full"]}),
    pytest.param("glm_moe_dsa", "glm-dsa", {"n_group": 4, "topk_group": 2, "index_topk": 256}, marks=LONG),
    ("kimi_linear", "kimi-linear", {}),
    ("cohere2_moe", "cohere2moe", {}),
    ("granitemoe_swa", "granite_swa", {"layer_rope_theta": [10_000.0, 0, 10_000.0]}),
    ("dbrx", "dbrx", {}),
    pytest.param("bitnet", "bitnet", {"hidden_act": "silu", "tie_word_embeddings": True}, marks=LONG),
    ("glm", "chatglm", {"head_dim": 8, "kv_channels": 8}),  # with queries, keys and values in one tensor
    pytest.param("glm", "chatglm", {"head_dim": 8}, marks=LONG),
    pytest.param("granite_swa", "granite_swa", {"layer_rope_theta": [10_000.0, 0, 10_000.0]}, marks=LONG),
    pytest.param(
        "cohere2_moe",
        "cohere2moe",
        {"mlp_layer_types": ["dense", "sparse", "sparse"], "expert_selection_fn": "sigmoid", "norm_topk_prob": False},
        marks=LONG,
    ),
    pytest.param("gpt2", "gpt2", {}, marks=LONG),
    pytest.param("gpt_bigcode", "starcoder", {}, marks=LONG),
    pytest.param("gpt_neox", "gptneox", {}, marks=LONG),
    pytest.param("mpt", "mpt", {}, marks=LONG),
    pytest.param("phi", "phi2", {"num_key_value_heads": 4}, marks=LONG),
    pytest.param("jais2", "jais2", {}, marks=LONG),
    pytest.param("minicpm3", "minicpm3", {"scale_emb": 12, "dim_model_base": 256, "v_head_dim": 8}, marks=LONG),
    pytest.param("exaone_moe", "exaone-moe", {}, marks=LONG),
    pytest.param("hy_v3", "hy_v3", {}, marks=LONG),
    pytest.param("lfm2", "lfm2", {"block_auto_adjust_ff_dim": False}, marks=LONG),
    pytest.param("bamba", "granitehybrid", {}, marks=LONG),
    pytest.param("mamba2", "mamba2", {}, marks=LONG),
    pytest.param("falcon_h1", "falcon-h1", {}, marks=LONG),
    pytest.param("falcon", "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, marks=LONG),
    pytest.param("llama4", "llama4", {"floor_scale": 8192}, marks=LONG),
    pytest.param("ernie4_5_moe", "ernie4_5-moe", {}, marks=LONG),
    pytest.param("qwen3", "qwen3", {"rope_parameters": YARN}, marks=LONG),
    pytest.param("llama", "llama", {"rope_parameters": LLAMA3}, marks=LONG),
    pytest.param("phi3", "phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128}, marks=LONG),
]


def logits(path: Path, method: WeightMethod | None = None) -> Tensor:
    stream = Stream(list(TOKENS))
    opened = LoadedModel.open(Checkpoint.open(path), Mesh.single(), method=method, kept_as=KeptAs(16))
    model = opened.load(bind(), ReferenceBackend())
    PagedRun(model, dtype=torch.float32).step([(stream, len(TOKENS))])
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in stream.logits])


@pytest.mark.parametrize(("family", "architecture", "overrides"), FAMILIES)
def test_a_file_of_floats_computes_what_the_checkpoint_does(
    family: str, architecture: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    path = make_checkpoint(family, tmp_path / "m", **overrides)
    assert torch.equal(logits(convert(path, architecture)), logits(path))


def test_a_file_of_deepseek_moe_computes_what_the_checkpoint_does(tmp_path: Path) -> None:
    path = make_checkpoint("dots1", tmp_path / "m", norm_topk_prob=False, routed_scaling_factor=1.0)
    others = [name for name in load_file(path / "model.safetensors") if "_norm." in name or "correction" in name]
    edit_tensors(path, remove=tuple(others))
    edit_config(path, remove=("scoring_func",), architectures=["DeepseekForCausalLM"], model_type="deepseek")
    assert torch.equal(logits(convert(path, "deepseek")), logits(path))


def test_a_file_of_floats_is_quantised_as_the_checkpoint_is(tmp_path: Path) -> None:
    path, int8 = make_checkpoint("llama", tmp_path / "m"), method_named("int8")
    assert torch.equal(logits(convert(path, "llama"), int8), logits(path, int8))


def test_parts_of_floats_are_told_as_what_becomes_of_them(tmp_path: Path) -> None:
    path, told = convert(make_checkpoint("gpt_oss", tmp_path / "m"), "gpt-oss"), []
    for method in (None, "int8"):
        opened = LoadedModel.open(Checkpoint.open(path), Mesh.single(), method=method_named(method))
        told.append({(kept, how.partition(", ")[2]) for _, kept, how in opened.stored_as()})
    assert told == [{("float32", "in parts that are joined")}, {("int8", "quantised while loading")}]


def blocks(name: str, tensor: Tensor, kind: str) -> Stored:
    """Random blocks with scales that are finite and small."""
    if tensor.dim() != 2 or "attn_q" in name:
        return plain(tensor)
    block = BLOCK_TYPES[kind]
    size = 32 if block.num_bytes < 40 else 256
    generator = torch.Generator().manual_seed(sum(name.encode()))
    rows = torch.randint(0, 256, (tensor.shape[0], tensor.shape[1] // size, block.num_bytes), generator=generator)
    rows = rows.to(torch.uint8)
    places = {"Q6_K": [208], "Q4_K": [0, 2], "Q8_0": [0], "Q4_1": [0, 2], "IQ4_XS": [0], "IQ3_S": [0]}[kind]
    for place in places:
        rows[..., place : place + 2] = torch.tensor([0, 8], dtype=torch.uint8)  # 2 to the power of -13
    return kind, tuple(tensor.shape), rows.numpy().tobytes()


def test_a_norm_that_is_quantised_is_dequantised(tmp_path: Path) -> None:
    def store(name: str, tensor: Tensor) -> Stored:
        if "norm" not in name:
            return plain(tensor)
        scale = torch.tensor([1 / 64], dtype=torch.float16).view(torch.int8)
        blocks = [torch.cat((scale, torch.full((32,), 64, dtype=torch.int8)))] * (tensor.numel() // 32)
        return "Q8_0", tuple(tensor.shape), torch.stack(blocks).numpy().tobytes()

    base = make_checkpoint("llama", tmp_path / "m")
    weights = load_file(base / "model.safetensors")
    ones = {name: torch.ones_like(each) if "norm" in name else each for name, each in weights.items()}
    save_file(ones, base / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits(convert(base, "llama", store=store)), logits(base))


LINEAR = {"linear_value_head_dim": 64, "linear_num_value_heads": 8, "linear_num_key_heads": 2}


@pytest.mark.parametrize(
    ("kind", "family", "architecture", "sizes"),
    [
        *((each, "llama", "llama", {}) for each in ("Q8_0", "Q4_K", "Q6_K", "IQ3_S")),
        # queries and their gates, which are one tensor, lie around keys of another type; columns are in another order
        ("Q4_K", "qwen3_5", "qwen35", LINEAR),
        ("IQ3_S", "qwen3_5", "qwen35", LINEAR),
    ],
)
def test_codes_act_as_their_values(
    kind: str, family: str, architecture: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    path = make_checkpoint(family, tmp_path / "m", hidden_size=256, intermediate_size=256, **sizes)

    def codes(name: str, tensor: Tensor) -> Stored:
        return plain(tensor) if tensor.shape[-1] % 256 else blocks(name, tensor, kind)

    file = convert(path, architecture, store=codes)

    def values(name: str, tensor: Tensor) -> Stored:
        stored, _, data = codes(name, tensor)
        if stored == "F32":
            return plain(tensor)
        rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(len(tensor), -1)
        return plain(dequantized(BLOCK_TYPES[kind], rows))

    found = logits(file)
    expected = logits(convert(path, architecture, store=values))
    assert (found - expected).norm() <= 1e-3 * expected.norm()  # activations have 16 bits
    if BLOCK_TYPES[kind].spec is None:
        assert torch.equal(found, expected)


def test_types_that_take_more_memory_than_in_the_file_are_told() -> None:
    in_bytes = {each[0]: each for each in TENSOR_TYPES.values() if each[0] in BLOCK_TYPES}
    for name, (_, size, num_bytes) in in_bytes.items():
        spec, bits = BLOCK_TYPES[name].spec, 8 * num_bytes / size
        if spec is None:
            assert HELD_AS[name] == "dequantised"
        elif name in HELD_AS:
            assert HELD_AS[name] == f"codes in {spec.bits} bits"
        else:
            assert spec.bits <= bits <= 1.25 * spec.bits


def test_a_tensor_that_no_layer_reads_is_refused(tmp_path: Path) -> None:
    path = convert(make_checkpoint("llama", tmp_path / "m"), "llama")
    content = path.read_bytes().replace(b"blk.0.attn_norm.weight", b"blk.0.attn_nosm.weight")
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"m\.gguf: holds blk\.0\.attn_nosm\.weight, which LlamaForCausalLM"):
        _ = Checkpoint.open(path).tensors


def load(path: Path) -> None:
    LoadedModel.open(Checkpoint.open(path), Mesh.single()).load(bind(), ReferenceBackend())


@pytest.mark.parametrize(
    ("family", "architecture", "key", "value"),
    [
        ("qwen3_5", "qwen35", "ssm.time_step_rank", 3),  # heads of keys are two
        ("qwen3_5", "qwen35", "ssm.inner_size", 4),
        ("granitemoehybrid", "granitehybrid", "embedding_length", 1),
        ("gemma4", "gemma4", "embedding_length_per_layer_input", -1),
        ("gemma4", "gemma4", "attention.sliding_window_pattern", [True]),
        ("apertus", "apertus", "block_count", 3),
        ("bloom", "bloom", "attention.head_count", 3),
        ("mellum", "mellum", "attention.sliding_window_pattern", [True]),
        ("mellum", "mellum", "attention.sliding_window_pattern", 4),
        ("mimo_v2_flash", "mimo2", "attention.head_count_kv", [2, 0, 2]),
        ("mimo_v2_flash", "mimo2", "attention.value_length", 7),
        ("step3p5", "step35", "attention.head_count", [8, 4]),
        ("step3p5", "step35", "swiglu_clamp_exp", [0.0, 0.01, 0.0]),
        ("hy_v3", "hy_v3", "expert_feed_forward_length", 7),
        ("cohere2_moe", "cohere2moe", "expert_gating_func", 3),
        ("granite_swa", "granite_swa", "attention.rope_pattern", [True]),
        ("dbrx", "dbrx", "expert_count", 5),
        ("kimi_linear", "kimi-linear", "kda.head_dim", 7),
        ("mistral4", "mistral4", "attention.temperature_scale", "no"),
        ("glm", "chatglm", "attention.head_count", 3),
    ],
)
def test_sizes_against_tensors_are_refused(
    family: str, architecture: str, key: str, value: Any, tmp_path: Path
) -> None:
    path = make_checkpoint(family, tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"m\.gguf: "):
        load(convert(path, architecture, {f"{architecture}.{key}": value}))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("attention.head_count", [4, 2, 4, 4], "expected 4 or 0 for each layer"),
        ("attention.head_count", [4, 0, 4], "expected a number for each of 4 layers"),
        ("attention.head_count_kv", [3, 0, 4, 0], "num_key_value_heads"),
        ("attention.head_count_kv", [2, 0, 0, 0], "attn_k.weight has 32 rows, expected 0 heads"),
        ("feed_forward_length", [256, 96, 0, -1], "expected a number for each of 4 layers"),
        ("feed_forward_length", [256, 95, 0, 64], r"has shape \[32, 96\], config.json requires"),
    ],
)
def test_layers_of_nemotron_nas_against_tensors_are_refused(key: str, value: Any, said: str, tmp_path: Path) -> None:
    path = make_checkpoint("nemotron-nas", tmp_path / "m", num_hidden_layers=4, block_configs=BLOCKS[:4])
    with pytest.raises(CheckpointError, match=said):
        load(convert(path, "deci", {f"deci.{key}": value}))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "IQ3_S"])
def test_a_scale_that_is_not_finite_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    def spoilt(name: str, tensor: Tensor) -> Stored:
        own, shape, data = blocks(name, tensor, kind)
        if name != "blk.1.ffn_up.weight":
            return own, shape, data
        place = len(data) // shape[0] * 3  # the first block of row 3
        return own, shape, data[:place] + b"\x00\x7e" + data[place + 2 :]

    sizes = {"hidden_size": 256, "intermediate_size": 256}
    path = convert(make_checkpoint("llama", tmp_path / "m", **sizes), "llama", store=spoilt)
    with pytest.raises(CheckpointError, match=r"m\.gguf: .*layers\.1\.mlp\.up_proj.* holds "):
        load(path)


@pytest.mark.parametrize("changes", [12, pytest.param(1500, marks=LONG)])
def test_a_changed_file_is_loaded_or_refused(changes: int, tmp_path: Path) -> None:
    whole = convert(make_checkpoint("llama", tmp_path / "m"), "llama").read_bytes()
    draw, size = random.Random(changes), whole.index(b"output_norm") + 64
    for number in range(changes):
        content = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            content[draw.randrange(4, size)] = draw.choice((0, 1, 127, 255, draw.randrange(256)))
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(content)
        with suppress(OctavoError):
            load(path)
        path.unlink()
