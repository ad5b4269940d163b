"""Reading a model directory without its weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from octavo.config.checkpoint import Checkpoint
from octavo.errors import CheckpointError, UnsupportedModel

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 32, "max_position_embeddings": 128}


LARGE = {"huge": 2**31, "infinite": float("inf")}


def write(path: Path, config: Any = None, generation: Any = None, **changes: Any) -> Checkpoint:
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes} if config is None else config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return Checkpoint.open(path)


def write_safetensors(path: Path, **tensors: tuple[str, list[int]]) -> None:
    """A file of zeros: name → (type, shape)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1}[dtype]
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path / "missing", "does not exist; expected a directory"),
        (lambda path: path, "has no config.json and no GGUF file"),
        (lambda path: (path / "file").touch() or path / "file", "is a file; expected a directory"),
    ],
)
def test_what_is_no_model_directory_is_said(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(make(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"hidden_size": 3', r"config\.json: is not valid JSON \(line 1, column"),
        ("[1, 2]", r"config\.json: holds \[1, 2\], expected a JSON object"),
        ("", "is not valid JSON"),
        (b"\xff\xfe", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_a_damaged_config_is_named(text: str | bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda c: c.int("heads"), "heads is missing, expected an integer"),
        (lambda c: c.int("word"), 'word is "two", expected an integer'),
        (lambda c: c.int("flag"), "flag is true, expected an integer"),
        (lambda c: c.int("half"), "half is 0.5, expected an integer"),
        (lambda c: c.float("word"), 'word is "two", expected a number'),
        (lambda c: c.bool("half"), "half is 0.5, expected true or false"),
        (lambda c: c.str("flag"), "flag is true, expected a string"),
        (lambda c: c.section("flag"), "flag is true, expected an object"),
        (lambda c: c.positive("zero"), "zero is 0, expected an integer of at least 1"),
        (lambda c: c.positive("huge"), "huge is 2147483648, expected an integer of at most 2147483647"),
        (lambda c: c.optional_positive("zero"), "zero is 0, expected an integer of at least 1"),
        (lambda c: c.float("infinite"), "infinite is Infinity, expected a finite number"),
        (lambda c: c.positive_float("zero"), "zero is 0, expected a number above 0"),
        (lambda c: c.section("inner").int("word"), 'inner.word is "x", expected an integer'),
        (lambda c: c.int("null"), "null is null, expected an integer"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_expected(read: Any, message: str, tmp_path: Path) -> None:
    checkpoint = write(tmp_path, word="two", flag=True, half=0.5, zero=0, inner={"word": "x"}, null=None, **LARGE)
    with pytest.raises(CheckpointError, match=message) as raised:
        read(checkpoint)
    assert str(tmp_path / "config.json") in str(raised.value)


def test_absent_and_null_keys_take_the_default(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, null=None, whole=3)
    assert checkpoint.int("null", 7) == checkpoint.int("absent", 7) == 7
    assert checkpoint.optional_int("null") is checkpoint.section("null") is None
    assert checkpoint.optional_int("whole") == 3
    assert checkpoint.float("whole") == 3.0


def test_an_unexpected_value_is_an_unsupported_model(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, hidden_act="gelu")
    with pytest.raises(UnsupportedModel, match='hidden_act is "gelu", expected "silu"'):
        checkpoint.expect("hidden_act", "silu")
    assert checkpoint.expect("hidden_act", "silu", "gelu") == "gelu"
    assert checkpoint.expect("absent", "relu", "gelu") == "relu"
    assert checkpoint.expect("absent", "relu", "gelu", default="gelu") == "gelu"


def test_what_is_refused_may_be_empty(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, quantization_config={"quant_method": "awq"}, empty={})
    checkpoint.refuse("empty", "absent", because="no")
    with pytest.raises(UnsupportedModel, match=r'quantization_config is \{"quant_method": "awq"\}; not here'):
        checkpoint.refuse("quantization_config", because="not here")


def test_the_architecture_must_be_named(tmp_path: Path) -> None:
    assert write(tmp_path).architecture == "LlamaForCausalLM"
    for others in ({}, {"model_type": "llama"}):
        with pytest.raises(CheckpointError, match=r"architectures is \[\], expected a list"):
            _ = write(tmp_path, architectures=[], **others).architecture
    with pytest.raises(CheckpointError, match=r'architectures is "llama", expected a list'):
        _ = write(tmp_path, architectures="llama", model_type="llama").architecture
    assert write(tmp_path, architectures=None, model_type="llama").architecture == "llama"


def test_an_architecture_that_only_code_in_the_directory_defines_is_refused_by_name(tmp_path: Path) -> None:
    code = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    with pytest.raises(UnsupportedModel, match=r"auto_map is .*own\.OwnForCausalLM.*never runs, whatever trust_remote"):
        _ = write(tmp_path, architectures=None, model_type="llama", auto_map=code).architecture
    assert write(tmp_path, auto_map=code).architecture == "LlamaForCausalLM"


def test_a_context_beyond_all_memory_is_the_longest_one(tmp_path: Path) -> None:
    assert write(tmp_path, max_position_embeddings=10**30).max_model_len() == 2**31 - 1
    stretched = {"rope_scaling": {"type": "linear", "factor": 1e30}}
    assert write(tmp_path, **stretched).max_model_len() == 2**31 - 1
    with pytest.raises(CheckpointError, match="max_position_embeddings is 0, expected an integer of at least 1"):
        write(tmp_path, max_position_embeddings=0).max_model_len()


@pytest.mark.parametrize("config", [None, CONFIG])
def test_a_directory_with_several_gguf_models_asks_for_one_of_the_files(config: Any, tmp_path: Path) -> None:
    for name in ("model-q4_0.gguf", "model-q8_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF models \(model-q4_0.gguf, .*name one of the files"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("factor", [0, -1.5, float("nan")])
def test_a_stretch_that_is_none_is_named(factor: float, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rope_scaling\.factor is .*, expected a (number above 0|finite number)"):
        write(tmp_path, rope_scaling={"type": "linear", "factor": factor}).max_model_len()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 128),
        ({"n_positions": 64}, 64),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 512),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}, 256),
        ({"rope_scaling": {"type": "yarn", "factor": 1.5, "original_max_position_embeddings": 64}}, 128),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1.0}}, 128),
    ],
)
def test_the_context_is_as_long_as_the_config_says(changes: Any, expected: int, tmp_path: Path) -> None:
    assert write(tmp_path, **changes).max_model_len() == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
    ],
)
def test_rotary_parameters_read_the_same_in_both_layouts(changes: Any, tmp_path: Path) -> None:
    rope = write(tmp_path, **changes).rope()
    assert (rope.str("rope_type"), rope.float("rope_theta"), rope.float("factor")) == ("linear", 5e5, 2.0)


def test_plain_rotary_parameters_have_defaults(tmp_path: Path) -> None:
    rope = write(tmp_path, rope_scaling=None).rope()
    assert (rope.str("rope_type"), rope.float("rope_theta")) == ("default", 10_000.0)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (None, None, ()),
        (5, None, (5,)),
        (5, 6, (6,)),
        (5, [6, 7], (6, 7)),
        ([5, 8], {}, (5, 8)),
    ],
)
def test_end_tokens_come_from_the_generation_config_first(
    config: Any, generation: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    generation = {"eos_token_id": generation} if isinstance(generation, int | list) else generation
    assert write(tmp_path, generation=generation, eos_token_id=config).eos_token_ids() == expected


def test_an_end_token_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r'generation_config\.json: eos_token_id is \["x"\]'):
        write(tmp_path, generation={"eos_token_id": ["x"]}).eos_token_ids()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_type_is_read_from_both_layouts(key: str, tmp_path: Path) -> None:
    assert write(tmp_path, **{key: "bfloat16"}).dtype_name() == "bfloat16"
    with pytest.raises(CheckpointError, match=f'{key} is "int8", expected float32'):
        write(tmp_path, **{key: "int8"}).dtype_name()


def test_without_a_stated_type_most_of_the_weights_decide(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", norm=("F32", [8]), weight=("BF16", [8, 8]))
    assert write(tmp_path).dtype_name() == "bfloat16"


def test_sizes_come_from_the_headers(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", a=("F32", [3, 2]), b=("BF16", [5]))
    checkpoint = write(tmp_path)
    assert checkpoint.weights_bytes() == 3 * 2 * 4 + 5 * 2
    assert checkpoint.num_parameters() == 11
    assert checkpoint.tensors["a"].shape == (3, 2)


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "one.safetensors", a=("F32", [3]))
    write_safetensors(tmp_path / "two.safetensors", b=("F32", [4]))
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = write(tmp_path)
    assert [file.path.name for file in checkpoint.weight_files()] == ["one.safetensors", "two.safetensors"]
    assert set(checkpoint.tensors) == {"a", "b"}


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "one.safetensors", a=("F32", [3]))
    write_safetensors(tmp_path / "two.safetensors", a=("F32", [3]), b=("F32", [4]))
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"two.safetensors: holds a, which .*one.safetensors holds too"):
        _ = write(tmp_path).tensors


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "one.safetensors", "b": "two.safetensors"}, r'lacks "two.safetensors" \(1 of 2 weight files\)'),
        ({"a": "one.safetensors", "b": "b" * 300}, r"lacks \"bbb"),
        ({"a": "one.safetensors", "b": "\0\ud800"}, r"lacks .* \(1 of 2 weight files\)"),
        ({"a": "one.safetensors", "c": "one.safetensors"}, "one.safetensors: lacks c, which the index lists"),
        ({"a": "../one.safetensors"}, "expected a file beside the index"),
        ({}, "weight_map is missing"),
    ],
)
def test_an_index_that_promises_too_much_is_named(weight_map: Any, message: str, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "one.safetensors", a=("F32", [3]))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=message):
        _ = write(tmp_path).tensors


def test_archives_count_by_their_files(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(1000))
    checkpoint = write(tmp_path)
    assert checkpoint.weights_bytes() == 1000
    assert checkpoint.num_parameters() is None
    assert not checkpoint.weight_files()[0].is_safetensors


def test_no_weights_at_all_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no weights; expected model.safetensors"):
        write(tmp_path).weight_files()


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice on files")
def test_files_are_fetched_ahead_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two", "three"):
        write_safetensors(tmp_path / f"{name}.safetensors", **{name: ("F32", [100])})
    index = {"weight_map": {name: f"{name}.safetensors" for name in ("one", "two", "three")}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    size = (tmp_path / "one.safetensors").stat().st_size
    advised: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, start, length, advice: advised.append((start, length)))
    write(tmp_path).fetch_ahead(size + 100)
    assert advised == [(0, size + 100), (0, 100)]


def test_what_cannot_be_fetched_ahead_is_left_to_its_reader(tmp_path: Path) -> None:
    checkpoint = write(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    checkpoint.fetch_ahead()
    checkpoint.weight_files()[0].path.unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        checkpoint.fetch_ahead()
