"""Arguments: one spelling, one check, whichever way a value comes."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config.args import BUILTIN_MODEL, EngineArgs
from octavo.config.fields import arguments, from_text, parse_bytes
from octavo.config.server_args import ServerArgs
from octavo.errors import ConfigError


def test_defaults_are_valid_and_name_the_shipped_model() -> None:
    args = EngineArgs()
    assert args.model == BUILTIN_MODEL
    assert (args.max_num_seqs, args.max_num_batched_tokens, args.block_size) == (256, 2048, 16)
    assert (args.swap_space, args.enable_prefix_caching, args.watermark) == (4.0, True, 0.01)


def test_server_listens_on_loopback_by_default() -> None:
    assert ServerArgs().host == "127.0.0.1"


@pytest.mark.parametrize("cls", [EngineArgs, ServerArgs])
def test_every_argument_has_one_sentence_of_documentation(cls: type) -> None:
    for argument in arguments(cls).values():
        assert argument.arg.doc.endswith("."), argument.name
        assert "\n" not in argument.arg.doc, argument.name
        assert argument.arg.only is None or argument.arg.otherwise, argument.name


def test_unknown_keyword_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"^max_num_seq is not an argument of EngineArgs; .* max_num_seqs\?$"):
        EngineArgs(max_num_seq=3)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0, must be at least 1"),
        ({"max_num_seqs": "8"}, "max_num_seqs is '8', expected a whole number"),
        ({"max_num_seqs": True}, "max_num_seqs is True, expected a whole number"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization is 0.0, must be greater than 0"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5, must be at most 1"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization is nan, must be a finite number"),
        ({"kv_cache_dtype": "fp9"}, "must be one of auto, float32, bfloat16, int8, fp8, fp8_e4m3; did you mean fp8"),
        ({"dtype": "bfloat"}, "dtype is 'bfloat', must be one of auto, float32, bfloat16, float16"),
        ({"enforce_eager": "yes"}, "enforce_eager is 'yes', expected true or false"),
        ({"model": 7}, "model is 7, expected text"),
        ({"kv_cache_memory": "2x"}, "kv_cache_memory is '2x', expected a number of bytes"),
        ({"op_overrides": "rms_norm"}, "op_overrides is 'rms_norm', expected pairs such as rms_norm=reference"),
        ({"served_model_name": [1]}, r"served_model_name is \[1\], expected text or a list of texts"),
    ],
)
def test_a_wrong_value_is_refused_by_name_value_and_limit(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(**keywords)


def test_an_argument_can_be_set_and_is_checked() -> None:
    args = EngineArgs()
    args.limit_mm_per_prompt, args.seed = {"image": 0}, 3  # type: ignore[misc]
    assert args == EngineArgs(limit_mm_per_prompt={"image": 0}, seed=3)
    with pytest.raises(ConfigError, match="max_num_seqs is 0, must be at least 1"):
        args.max_num_seqs = 0  # type: ignore[misc]
    with pytest.raises(ConfigError, match="max_num_seq is not an argument of EngineArgs; did you mean max_num_seqs"):
        args.max_num_seq = 1  # type: ignore[attr-defined]


def test_values_take_their_normal_form() -> None:
    args = EngineArgs(swap_space=2, kv_cache_memory="1GiB", served_model_name="a", op_overrides="x=y, z=w")  # type: ignore[arg-type]
    assert args.swap_space == 2.0
    assert isinstance(args.swap_space, float)
    assert (args.kv_cache_memory, args.served_model_name) == (1 << 30, ("a",))
    assert args.op_overrides == {"x": "y", "z": "w"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1000", 1000),
        ("4GiB", 4 << 30),
        ("512M", 512_000_000),
        ("1.5 ki", 1536),
        ("2gb", 2_000_000_000),
        ("3TiB", 3 << 40),
    ],
)
def test_bytes_are_read_with_their_suffix(text: str, expected: int) -> None:
    assert parse_bytes("x", text) == expected


def test_gib_are_read_as_a_number_or_with_a_suffix() -> None:
    for text, gib in (("4", 4.0), ("0.5", 0.5), ("1TiB", 1024.0), ("512MiB", 0.5), ("2gb", 2e9 / (1 << 30))):
        assert EngineArgs(swap_space=text).swap_space == gib  # type: ignore[arg-type]
        assert EngineArgs(swap_space=from_text(arguments(EngineArgs)["swap_space"], text, "X")).swap_space == gib
    for text, message in (("4x", "'4x', expected a number of GiB, or a size"), ("2PiB", "a size"), ("2000TiB", "GiB$")):
        with pytest.raises(ConfigError, match=message):
            EngineArgs(swap_space=text)  # type: ignore[arg-type]


def test_text_becomes_the_type_of_its_argument() -> None:
    known = arguments(EngineArgs)
    assert from_text(known["enable_prefix_caching"], "off", "X") is False
    assert from_text(known["max_model_len"], "none", "X") is None
    assert from_text(known["watermark"], "0.05", "X") == 0.05
    assert from_text(known["max_num_seqs"], "64", "X") == 64
    for text, number in (("8k", 8000), ("8K", 8192), ("25.6k", 25_600), ("2M", 2 << 20), ("1.005k", 1005)):
        assert from_text(known["max_model_len"], text, "X") == number
        assert EngineArgs(max_model_len=text).max_model_len == number  # type: ignore[arg-type]
    for text in ("1.0005k", "8kb", "k"):
        with pytest.raises(ConfigError, match=f"X='{text}' is not a whole number"):
            from_text(known["max_num_seqs"], text, "X")
    assert from_text(known["served_model_name"], "a, b", "X") == ("a", "b")
    with pytest.raises(ConfigError, match="X='many' is not a whole number"):
        from_text(known["max_num_seqs"], "many", "X")
    with pytest.raises(ConfigError, match="X='maybe' is neither true nor false"):
        from_text(known["enforce_eager"], "maybe", "X")
