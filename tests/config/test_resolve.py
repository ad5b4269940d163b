"""From arguments, checkpoint and platform to the configuration."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.config.args import EngineArgs
from octavo.config.checkpoint import Checkpoint
from octavo.config.resolve import resolve
from octavo.config.schema import EngineConfig
from octavo.errors import CheckpointError, ConfigError
from octavo.gguf.reader import GGUFFile
from octavo.platform import Memory, Platform

PLATFORM = Platform(
    system="Linux",
    machine="x86_64",
    cpu_model="a processor",
    cores=6,
    memory=Memory(total=8 << 30, available=4 << 30, source="machine"),
    instruction_sets=("avx2",),
    native_module=None,
)


def checkpoint(directory: Path, generation: dict[str, Any] | None = None, **config: Any) -> Checkpoint:
    values = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 300,
        "max_position_embeddings": 128,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    (directory / "config.json").write_text(json.dumps(values | config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return Checkpoint.open(directory)


def test_defaults_come_from_checkpoint_and_platform(tmp_path: Path) -> None:
    config = resolve(EngineArgs(model="m"), checkpoint(tmp_path), PLATFORM)
    assert config.model.max_model_len == config.scheduler.max_model_len == 128
    assert not config.model.user_set_max_model_len
    assert (config.model.dtype, config.cache.dtype) == ("bfloat16", "bfloat16")
    assert (config.model.vocab_size, config.model.eos_token_ids, config.model.bos_token_id) == (300, (2,), 1)
    assert config.model.served_model_names == ("m",)
    assert config.model.tokenizer_path == config.model.path == str(tmp_path)
    assert (config.device.threads, config.cache.swap_space_bytes) == (6, 4 << 30)
    assert config.scheduler.max_steps_in_flight == 1


@pytest.mark.parametrize(
    ("given", "is_found", "has_gpus"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"device": "cuda"}, False, True),
        ({"device": "cpu"}, True, False),
        ({"instruction_set": "reference"}, True, False),
    ],
)
def test_steps_are_launched_ahead_where_a_gpu_is_asked_for_or_expected(
    given: dict[str, Any], is_found: bool, has_gpus: bool, tmp_path: Path
) -> None:
    platform = msgspec.structs.replace(PLATFORM, has_gpu=is_found)
    config = resolve(EngineArgs(model="m", **given), checkpoint(tmp_path), platform)
    assert config.device.has_gpus == has_gpus
    assert config.scheduler.max_steps_in_flight == 1 + has_gpus


@pytest.mark.parametrize(
    ("given", "stored_as", "bits"),
    [
        ({"quantization": "int4"}, None, 16),
        ({"quantization": "int4", "device": "cpu"}, None, 8),
        ({"quantization": "int4", "activation_bits": 8}, None, 8),
        ({"quantization": "int8"}, None, 8),
        ({}, {"quant_method": "awq"}, 16),
        ({}, {"quant_method": "compressed-tensors", "config_groups": {"a": {"input_activations": None}}}, 16),
        ({}, {"quant_method": "compressed-tensors", "config_groups": {"a": {"input_activations": {"num_bits": 8}}}}, 8),
    ],
)
def test_on_a_gpu_activations_have_16_bits_beside_weights_that_are_made_for_whole_ones(
    given: dict[str, Any], stored_as: dict[str, Any] | None, bits: int, tmp_path: Path
) -> None:
    args = EngineArgs(model="m", **{"device": "cuda", **given})
    config = resolve(args, checkpoint(tmp_path, quantization_config=stored_as), PLATFORM)
    assert config.model.activation_bits == bits


@pytest.mark.parametrize(
    ("given", "model_type", "bits"), [({}, "bert", 16), ({"activation_bits": 8}, "bert", 8), ({}, "qwen3", 8)]
)
def test_on_the_cpu_activations_of_encoders_in_gguf_files_have_16_bits(
    given: dict[str, Any], model_type: str, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "gguf", GGUFFile(tmp_path, {"general.architecture": model_type}, ()))
    monkeypatch.setattr("octavo.config.resolve.pooling_config", lambda args, checkpoint: None)
    opened = checkpoint(tmp_path, model_type=model_type)
    config = resolve(EngineArgs(model="m", device="cpu", packed_cache="none", **given), opened, PLATFORM)
    assert config.model.activation_bits == bits


@pytest.mark.parametrize(
    ("wanted", "dtype"), [("auto", "bfloat16"), ("float32", "float32"), ("int8", "int8"), ("fp8_e4m3", "fp8")]
)
def test_the_cache_has_the_models_format_unless_one_is_asked_for(tmp_path: Path, wanted: str, dtype: str) -> None:
    assert resolve(EngineArgs(kv_cache_dtype=wanted), checkpoint(tmp_path), PLATFORM).cache.dtype == dtype


def test_more_threads_than_processors_are_refused(tmp_path: Path) -> None:
    assert resolve(EngineArgs(threads=6), checkpoint(tmp_path), PLATFORM).device.threads == 6
    with pytest.raises(ConfigError, match="threads is 7, must be at most 6, the processors that this process may use"):
        resolve(EngineArgs(threads=7), checkpoint(tmp_path), PLATFORM)


def test_replicas_share_the_processors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert resolve(EngineArgs(data_parallel_size=2), checkpoint(tmp_path), PLATFORM).device.threads == 3
    with pytest.raises(ConfigError, match="threads is 4, must be at most 3 for each of 2 replicas"):
        resolve(EngineArgs(data_parallel_size=2, threads=4), checkpoint(tmp_path), PLATFORM)
    with pytest.raises(ConfigError, match="data_parallel_size is 2, and nnodes is 2: replicas are on one machine"):
        resolve(EngineArgs(data_parallel_size=2, tensor_parallel_size=2, nnodes=2), checkpoint(tmp_path), PLATFORM)
    assert not caplog.messages
    assert resolve(EngineArgs(data_parallel_size=7), checkpoint(tmp_path), PLATFORM).device.threads == 1
    assert "7, but there are 6 processors" in caplog.text


@pytest.mark.parametrize(
    ("wanted", "num_processors", "warning"),
    [
        ({"tensor_parallel_size": 4}, 4, None),
        ({"tensor_parallel_size": 4}, 2, "tensor_parallel_size is 4, but there are 2 processors: they take turns"),
        ({"tensor_parallel_size": 4, "executor": "ray"}, 2, None),
        ({"tensor_parallel_size": 4, "nnodes": 2, "cluster_secret_file": "secret"}, 2, None),
        (
            {"data_parallel_size": 2, "tensor_parallel_size": 2},
            1,
            "data_parallel_size x tensor_parallel_size is 4, but there is 1 processor: they take turns",
        ),
    ],
)
def test_more_ranks_than_processors_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wanted: dict[str, Any], num_processors: int, warning: str | None
) -> None:
    platform = msgspec.structs.replace(PLATFORM, cores=num_processors)
    resolve(EngineArgs(**wanted), checkpoint(tmp_path), platform)
    assert caplog.messages == ([warning] if warning else [])


def test_ray_places_no_single_rank(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="executor is ray, but has no effect on a model of one rank"):
        resolve(EngineArgs(executor="ray"), checkpoint(tmp_path), PLATFORM)


def test_the_instruction_set_reference_is_the_device_reference(tmp_path: Path) -> None:
    for device in ("auto", "reference"):
        args = EngineArgs(instruction_set="reference", device=device)
        assert resolve(args, checkpoint(tmp_path), PLATFORM).device.device == "reference"
    with pytest.raises(ConfigError, match="another name for the device reference, but device is cpu"):
        resolve(EngineArgs(instruction_set="reference", device="cpu"), checkpoint(tmp_path), PLATFORM)


def test_arguments_win(tmp_path: Path) -> None:
    args = EngineArgs(
        max_model_len=64,
        dtype="float32",
        threads=1,
        served_model_name=("a", "b"),
        swap_space=0.5,
        disable_log_stats=True,
    )
    config = resolve(args, checkpoint(tmp_path), PLATFORM, tokenizer_path=tmp_path / "elsewhere")
    assert config.model.max_model_len == 64
    assert config.model.user_set_max_model_len
    assert (config.model.dtype, config.device.threads) == ("float32", 1)
    assert (config.model.served_model_names, config.cache.swap_space_bytes) == (("a", "b"), 1 << 29)
    assert config.model.tokenizer_path.endswith("elsewhere")
    assert config.observability.disable_log_stats


def test_a_context_longer_than_the_checkpoint_was_made_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len is 129, must be at most 128.*config\.json"):
        resolve(EngineArgs(max_model_len=129), checkpoint(tmp_path), PLATFORM)


def test_a_context_of_sparse_attention_is_as_long_as_the_attention_is_dense(tmp_path: Path) -> None:
    made = checkpoint(tmp_path, index_topk=60)
    assert resolve(EngineArgs(), made, PLATFORM).model.max_model_len == 60
    with pytest.raises(
        ConfigError, match="max_model_len is 61, must be at most 60, its index_topk: of longer contexts"
    ):
        resolve(EngineArgs(max_model_len=61), made, PLATFORM)
    chosen = checkpoint(tmp_path, index_topk=60, model_type="deepseek_v32")
    for length, chooses in ((None, True), (61, True), (60, False)):
        model = resolve(EngineArgs(max_model_len=length), chosen, PLATFORM).model
        assert (model.max_model_len, model.chooses_tokens) == (length or 128, chooses)
    longer = checkpoint(tmp_path, index_topk=1000)
    with pytest.raises(ConfigError, match="must be at most 128, the context that the checkpoint was made for"):
        resolve(EngineArgs(max_model_len=129), longer, PLATFORM)


def test_a_step_must_have_a_token_for_every_sequence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens is 8, must be at least max_num_seqs, which is 9"):
        resolve(EngineArgs(max_num_batched_tokens=8, max_num_seqs=9), checkpoint(tmp_path), PLATFORM)


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        (
            {"delay_factor": 0.5},
            {"enable_chunked_prefill": False},
            "delay_factor is 0.5, but has no effect where enable_chunked_prefill is True; switch chunked prefill off",
        ),
        (
            {"max_bypasses": 2, "enable_chunked_prefill": False},
            {"enable_chunked_prefill": True},
            "max_bypasses is 2, but has no effect where enable_chunked_prefill is False; enable chunked prefill",
        ),
        (
            {"priority_ageing": 9.0},
            {"scheduling_policy": "priority"},
            "priority_ageing is 9.0, but has no effect where scheduling_policy is fcfs; choose the policy priority",
        ),
        (
            {"tenant_weights": {"a": "2"}, "scheduling_policy": "priority"},
            {"scheduling_policy": "fair-share"},
            "tenant_weights is a=2, but has no effect where scheduling_policy is priority; choose the policy fair-sh",
        ),
        (
            {"lora_modules": ["a=/a", "b=/b"]},
            {"enable_lora": True},
            "lora_modules is a=/a, b=/b, but has no effect where enable_lora is False; give enable_lora",
        ),
        (
            {"preemption_mode": "swap", "swap_space": 0},
            {"swap_space": 0.5},
            "preemption_mode is swap, but has no effect where swap_space is 0; give swap space, or choose",
        ),
    ],
)
def test_arguments_that_would_have_no_effect_are_refused(
    tmp_path: Path, wrong: dict[str, Any], right: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(EngineArgs(**wrong), checkpoint(tmp_path), PLATFORM)
    resolve(EngineArgs(**(wrong | right)), checkpoint(tmp_path), PLATFORM)


def test_generation_defaults_have_the_names_of_sampling_parameters(tmp_path: Path) -> None:
    generation = {"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 99, "do_sample": True, "eos_token_id": [3, 4]}
    here = checkpoint(tmp_path, generation)
    config = resolve(EngineArgs(), here, PLATFORM)
    assert config.model.generation_defaults == {"temperature": 0.6, "top_p": 0.95, "max_tokens": 99}
    assert config.model.eos_token_ids == (3, 4)
    assert resolve(EngineArgs(generation_config="none"), here, PLATFORM).model.generation_defaults == {}
    others = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "skip_special_tokens": False}
    assert resolve(EngineArgs(), checkpoint(tmp_path, others), PLATFORM).model.generation_defaults == others


def test_a_default_length_beyond_the_context_means_what_fits(tmp_path: Path) -> None:
    here = checkpoint(tmp_path, {"max_new_tokens": 99})
    assert resolve(EngineArgs(max_model_len=100), here, PLATFORM).model.generation_defaults == {"max_tokens": 99}
    assert resolve(EngineArgs(max_model_len=99), here, PLATFORM).model.generation_defaults == {"max_tokens": None}


def test_generation_defaults_can_come_from_another_file(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"top_k": 5}')
    config = resolve(EngineArgs(generation_config=str(other)), checkpoint(tmp_path, {"top_k": 9}), PLATFORM)
    assert config.model.generation_defaults == {"top_k": 5}
    with pytest.raises(ConfigError, match="generation_config is '/nowhere': there is no file"):
        resolve(EngineArgs(generation_config="/nowhere"), checkpoint(tmp_path), PLATFORM)


def test_a_damaged_generation_config_is_refused_only_where_it_is_asked_for(tmp_path: Path) -> None:
    here = checkpoint(tmp_path, {}, eos_token_id=3)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: is not valid JSON"):
        resolve(EngineArgs(), here, PLATFORM)
    assert resolve(EngineArgs(generation_config="none"), here, PLATFORM).model.eos_token_ids == (3,)


def test_a_model_type_that_is_no_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r'model_type is \["x"\], expected a string'):
        resolve(EngineArgs(), checkpoint(tmp_path, model_type=["x"]), PLATFORM)


def test_end_tokens_outside_the_vocabulary_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    here = checkpoint(tmp_path, {"eos_token_id": [3, -1, 10**9]})
    assert resolve(EngineArgs(), here, PLATFORM).model.eos_token_ids == (3,)
    assert "end tokens [-1, 1000000000] are outside the vocabulary and ignored" in caplog.text


def test_a_senseless_generation_default_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config.json: temperature is -1, must be at least 0"):
        resolve(EngineArgs(), checkpoint(tmp_path, {"temperature": -1}), PLATFORM)


def test_chat_template_is_a_file_or_the_template_itself(tmp_path: Path) -> None:
    here = checkpoint(tmp_path)
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    for given in (str(file), "{{ messages }}"):
        assert resolve(EngineArgs(chat_template=given), here, PLATFORM).model.chat_template == "{{ messages }}"
    with pytest.raises(ConfigError, match="chat_template is 'absent.jinja': there is no such file"):
        resolve(EngineArgs(chat_template="absent.jinja"), here, PLATFORM)


def test_dummy_weights_need_no_weight_files(tmp_path: Path) -> None:
    here = checkpoint(tmp_path, torch_dtype=None)
    assert resolve(EngineArgs(load_format="dummy"), here, PLATFORM).model.dtype == "float32"


def test_configuration_survives_the_way_to_another_process(tmp_path: Path) -> None:
    args = EngineArgs(op_overrides={"rms_norm": "reference"})
    config = resolve(args, checkpoint(tmp_path, {"temperature": 0.6, "top_k": 20}), PLATFORM)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config


def test_sections_cannot_be_edited(tmp_path: Path) -> None:
    config = resolve(EngineArgs(), checkpoint(tmp_path), PLATFORM)
    with pytest.raises(AttributeError):
        config.cache.block_size = 32  # type: ignore[misc]


def test_packed_weights_are_kept_of_a_checkpoint_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve(EngineArgs(), checkpoint(tmp_path), PLATFORM).model.packed_directory is None
    config = resolve(EngineArgs(packed_cache="~/packed"), checkpoint(tmp_path), PLATFORM)
    assert config.model.packed_directory == str(tmp_path / "packed")
    with pytest.raises(ConfigError, match=r"packed_cache .* load_format dummy .* leave out one"):
        resolve(EngineArgs(packed_cache="packed", load_format="dummy"), checkpoint(tmp_path), PLATFORM)


def test_packed_weights_of_large_models_are_kept_in_the_users_cache_folder(tmp_path: Path) -> None:
    def directory(weights: int, **arguments: Any) -> str | None:
        os.truncate(tmp_path / "pytorch_model.bin", weights)
        here = checkpoint(tmp_path)
        return resolve(
            EngineArgs(**arguments), here, PLATFORM, cache_directory=tmp_path / "octavo"
        ).model.packed_directory

    (tmp_path / "pytorch_model.bin").touch()
    assert directory(128 << 20) == str(tmp_path / "octavo/packed")
    assert directory((128 << 20) - 1) is None
    assert directory(128 << 20, packed_cache="none") is None
    assert directory(128 << 20, load_format="dummy") is None
    assert directory(1, packed_cache=str(tmp_path)) == str(tmp_path)


def test_a_config_without_a_length_is_left_to_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"], "vocab_size": 50}')
    config = resolve(EngineArgs(model="m", load_format="dummy"), Checkpoint.open(tmp_path), PLATFORM)
    assert config.model.max_model_len > 1 << 30


def test_a_number_of_thousands_of_digits_is_no_valid_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": ' + "9" * 5000 + "}")
    with pytest.raises(CheckpointError, match=r"config.json: cannot be read"):
        Checkpoint.open(tmp_path)
