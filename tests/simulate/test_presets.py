"""Costs of a model on a device, from its config and a data sheet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.config.checkpoint import CONFIG
from octavo.config.section import Section
from octavo.errors import CheckpointError, ConfigError, UnsupportedModel
from octavo.simulate import model_facts
from octavo.simulate.cost_model import StepWork
from octavo.simulate.device import device_names, read_device
from octavo.simulate.model_facts import ModelFacts, facts_of, read_model_facts
from octavo.simulate.presets import Layout, preset, roofline

LLAMA: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
EXPERTS = LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000}
GPT2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
DEEPSEEK_V3 = LLAMA | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "vocab_size": 129280,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
}
QWEN3_NEXT = LLAMA | {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 151936,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


def facts(**changes: Any) -> ModelFacts:
    return facts_of("m", Section(LLAMA | changes, CONFIG))


@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [
        (LLAMA, 8.03, 7.50),
        (EXPERTS, 46.70, 12.75),
        (GPT2, 0.1235, 0.1235),
        (DEEPSEEK_V3, 671.0, 36.64),
        (QWEN3_NEXT, 79.67, 3.563),
    ],
    ids=["llama-3.1-8b", "mixtral-8x7b", "gpt2", "deepseek-v3", "qwen3-next-80b"],
)
def test_parameters_are_those_of_published_models(config: dict[str, Any], billions: float, active: float) -> None:
    found = facts_of("m", Section(config, CONFIG))
    assert found.num_parameters / 1e9 == pytest.approx(billions, rel=1e-3)
    assert found.num_active_parameters / 1e9 == pytest.approx(active, rel=1e-3)


def test_a_config_and_a_preset_of_the_same_model_agree() -> None:
    costs, named = roofline(facts(), read_device("h100")), preset("h100/llama-3.1-8b")
    for field in ("weight_bytes", "kv_bytes_per_token", "flops_per_pair", "device_bytes", "bytes_per_s", "flops_per_s"):
        assert getattr(costs, field) == pytest.approx(getattr(named, field), rel=1e-3), field


def test_only_the_config_of_a_hub_model_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / CONFIG).write_text(json.dumps({"text_config": LLAMA}))
    asked: dict[str, Any] = {}

    def locate(model: str, **options: Any) -> Path:
        asked.update(options, model=model)
        return tmp_path

    monkeypatch.setattr(model_facts, "locate", locate)
    found = read_model_facts("owner/name")
    assert (found.name, found.num_layers) == ("name", 32)
    assert asked == {"model": "owner/name", "with_weights": False, "text_files": ("config.json",)}
    assert msgspec.structs.replace(read_model_facts(str(tmp_path / CONFIG)), name="name") == found


def test_devices_that_share_layers_have_all_memory_and_rates_and_pay_for_collectives() -> None:
    device = msgspec.structs.replace(read_device("h100"), channel_s=0.0)
    one, four = roofline(facts(), device), roofline(facts(), device, Layout(tensor=4, reduce="sum"))
    assert four.kv_bytes_per_token == one.kv_bytes_per_token
    assert (four.device_bytes, four.bytes_per_s, four.flops_per_s) == (
        4 * one.device_bytes,
        4 * one.bytes_per_s,
        4 * one.flops_per_s,
    )
    # two all-reduces a layer: each takes 10 µs, and moves 2 · 3/4 of the activations of every token over a link
    assert four.step_s - one.step_s == pytest.approx(64 * 10e-6)
    assert four.token_s == pytest.approx(64 * (2 * 4096) * 1.5 / 450e9)
    # four gathers: of what heads attend to, of what feeds forward, and of two sums, each 3/4 of the bytes
    exact = roofline(facts(), device, Layout(tensor=4))
    assert exact.step_s - one.step_s == pytest.approx(128 * 10e-6)
    assert exact.token_s == pytest.approx(32 * 2 * (3 * 4096 + 14336) * 0.75 / 450e9)
    decode, prefill = StepWork(8, 8, 0, 8000), StepWork(1, 2048, 2048, 0, 2048 * 1024)
    assert 0.25 < four.step_seconds(decode, 16) / one.step_seconds(decode, 16) < 1
    assert 0.25 < four.step_seconds(prefill, 16) / one.step_seconds(prefill, 16) < 1
    assert four.prefill_tokens_per_s < 4 * one.prefill_tokens_per_s


def test_stages_add_memory_and_what_is_sent_between_them() -> None:
    device = read_device("h100")
    one, two = roofline(facts(), device), roofline(facts(), device, Layout(pipeline=2))
    assert (two.device_bytes, two.bytes_per_s, two.num_stages) == (2 * one.device_bytes, one.bytes_per_s, 2)
    assert two.step_s - one.step_s == pytest.approx(device.channel_s + device.collective_s)
    assert two.token_s == pytest.approx(2 * 4096 / 450e9)
    assert 1.9 < two.prefill_tokens_per_s / one.prefill_tokens_per_s < 2
    # sixteen devices are on two hosts
    far = roofline(facts(), device, Layout(tensor=8, pipeline=2))
    near = roofline(facts(), device, Layout(tensor=8))
    assert far.step_s - near.step_s == pytest.approx(device.network_s)
    assert far.token_s - near.token_s == pytest.approx(2 * 4096 / device.network_bytes_per_s)
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 33, must be at most the 32 layers of m"):
        roofline(facts(), device, Layout(pipeline=33))


def test_heads_of_keys_and_values_are_repeated_where_there_are_fewer_than_devices() -> None:
    device = read_device("h100")
    assert (
        roofline(facts(), device, Layout(tensor=16)).kv_bytes_per_token
        == 2 * roofline(facts(), device).kv_bytes_per_token
    )
    for size in (3, 64):
        with pytest.raises(ConfigError, match=f"tensor_parallel_size is {size}, must divide the 32 attention heads"):
            roofline(facts(), device, Layout(tensor=size))
    alone = msgspec.structs.replace(device, link_bytes_per_s=None)
    with pytest.raises(ConfigError, match="has no link_bytes_per_s; add it to the device's file"):
        roofline(facts(), alone, Layout(tensor=2))


def test_few_tokens_read_few_experts() -> None:
    costs = roofline(facts_of("m", Section(EXPERTS, CONFIG)), read_device("h100"))

    def seconds(num_tokens: int) -> float:
        return costs.step_seconds(StepWork(0, num_tokens), 16)

    assert costs.expert_share == 0.25
    read_by_one = costs.weight_bytes - 0.75 * costs.expert_bytes
    assert seconds(1) == pytest.approx(costs.step_s + read_by_one / costs.bytes_per_s)
    assert seconds(100) == pytest.approx(costs.step_s + costs.weight_bytes / costs.bytes_per_s)


def test_quantized_weights_take_their_bits() -> None:
    four_bits = facts(quantization_config={"quant_method": "awq", "bits": 4})
    eight_bits = facts(quantization_config={"quant_method": "fp8"})
    assert (facts().bytes_per_parameter, four_bits.bytes_per_parameter, eight_bits.bytes_per_parameter) == (2, 0.5, 1)
    h100, a100 = read_device("h100"), read_device("a100")
    assert roofline(eight_bits, h100).flops_per_s > 1.9 * roofline(four_bits, h100).flops_per_s
    assert roofline(eight_bits, a100).flops_per_s == roofline(four_bits, a100).flops_per_s


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kv_lora_rank": 512}, CheckpointError, "config.json: qk_rope_head_dim is missing"),
        ({"linear_num_key_heads": 16, "layer_types": ["x"]}, CheckpointError, "expected the kind of each of 32 layers"),
        ({"mamba_d_state": 16}, UnsupportedModel, "mamba_d_state is 16: some layers are recurrent in a way that"),
        ({"quantization_config": {"quant_method": "odd"}}, UnsupportedModel, "'odd', whose bits per weight"),
        ({"hidden_size": None}, CheckpointError, "config.json: hidden_size is null, expected an integer"),
        ({"num_experts": 8}, CheckpointError, "config.json: num_experts_per_tok is missing"),
    ],
)
def test_what_is_not_reckoned_with_is_refused_by_name(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        facts(**changes)


def test_a_latent_is_kept_once_for_all_heads_and_a_state_once_for_all_tokens() -> None:
    h100 = read_device("h100")
    latent = roofline(facts_of("m", Section(DEEPSEEK_V3, CONFIG)), h100)
    assert (latent.kv_bytes_per_token, latent.state_bytes) == (61 * 576 * 2, 0)
    assert latent.flops_per_pair == 61 * 128 * 2 * (576 + 512)
    hybrid = roofline(facts_of("m", Section(QWEN3_NEXT, CONFIG)), h100)
    assert hybrid.kv_bytes_per_token == 12 * 2 * 2 * 256 * 2
    assert hybrid.state_bytes == 36 * 4 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128))


def test_a_window_counts_for_the_layers_that_have_it() -> None:
    assert facts(sliding_window=4096).sliding_window == 4096
    assert facts(sliding_window=4096, use_sliding_window=False).sliding_window is None
    mixed = ["sliding_attention", "full_attention"]
    found = facts(sliding_window=4096, layer_types=mixed)
    assert (found.sliding_window, found.windowed_share) == (4096, 0.5)
    assert facts(sliding_window=4096, layer_types=mixed[1:]).sliding_window is None


def test_every_device_that_ships_names_its_source() -> None:
    assert {"a100", "h100", "h200", "l4"} <= set(device_names())
    assert all("https://" in read_device(name).source for name in device_names())


def test_a_device_may_be_described_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"name": "mine", "memory_bytes": 1e9, "bytes_per_s": 1e9, "flops_per_s": 1e12}')
    assert read_device(str(file)).name == "mine"
    file.write_text('{"name": "mine", "memory_bytes": 0}')
    with pytest.raises(ConfigError, match="does not describe a device: .*memory_bytes.*; its fields are name, memory_"):
        read_device(str(file))
    with pytest.raises(ConfigError, match="device is 'h1000', .* did you mean h100"):
        read_device("h1000")
