"""What people read about a plan."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from octavo.config.args import EngineArgs
from octavo.config.checkpoint import Checkpoint
from octavo.config.explain import MemoryPlan, model_facts, render_bar, render_bytes, render_table
from octavo.config.resolve import resolve
from octavo.core.cache_limits import CacheLimits, GroupLimits
from octavo.core.model_shape import KeysAndValues, Latent, State
from octavo.platform import Platform
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import edit_config, make_checkpoint
from tests.fakes.shapes import group

PLAN = MemoryPlan(
    device="cpu",
    total_memory=8 << 30,
    available_memory=6 << 30,
    limit=7 << 30,
    limit_because="cgroup",
    weights_bytes=1 << 30,
    activation_bytes=1 << 29,
    cache=CacheLimits.of_one_group(512, 16, num_host_blocks=100, block_bytes=1 << 20),
    num_blocks_because="memory left",
    kv_bytes=513 << 20,
    host_bytes=100 << 20,
    max_model_len=100,
)


def _with_window(window: int, max_live_tokens: int) -> CacheLimits:
    group = msgspec.structs.replace(PLAN.cache.groups[0], window=window, max_live_tokens=max_live_tokens)
    return msgspec.structs.replace(PLAN.cache, groups=(group,))


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (4 << 30, "4.00 GiB"), (1 << 50, "1024.00 TiB")],
)
def test_bytes_are_shown_in_the_largest_unit_that_fits(count: int, text: str) -> None:
    assert render_bytes(count) == text


def test_plan_tells_how_many_requests_fit() -> None:
    # 100 tokens take 7 blocks of 16
    assert PLAN.max_concurrency == pytest.approx(512 / 7)
    assert PLAN.cache.num_tokens == 8192


def test_rendered_plan_holds_every_part_and_its_reason() -> None:
    text = PLAN.render()
    for expected in ("8.00 GiB", "6.00 GiB available", "7.00 GiB", "cgroup", "1.00 GiB", "512.00 MiB", "memory left"):
        assert expected in text
    assert "512 blocks of 16 tokens, 1.00 MiB each" in text
    assert "8,192 tokens: 73.1 requests of 100 tokens" in text


def test_the_limit_is_a_bar_of_its_parts() -> None:
    bar, legend = PLAN.render_bar().split("\n")
    assert bar == "█" * 9 + "▓" * 4 + "▒" * 4 + "░" * 43
    assert legend == "█ weights 1.00 GiB ▓ KV 513.00 MiB ▒ activations 512.00 MiB ░ rest 5.00 GiB"
    assert PLAN.render_bar().replace("\n", "\n  ") in PLAN.render()
    assert render_bar([1.2, 0.1], 10) == "█" * 10
    assert render_bar([0.001, 0.0], 10) == "█" + "░" * 9


def test_plan_fits_into_one_line() -> None:
    assert PLAN.summarize() == (
        "weights 1.00 GiB, activations 512.00 MiB, KV cache 513.00 MiB (512 blocks of 16 tokens), "
        f"{PLAN.planned_bytes / PLAN.limit:.0%} of 7.00 GiB"
    )


def test_plan_says_what_a_sliding_window_changes() -> None:
    note = "a request keeps at most 60 tokens: a sliding window of 45, and what a step computes"
    plan = msgspec.structs.replace(
        PLAN,
        cache=_with_window(45, 60),
    )
    # 60 tokens touch five blocks
    assert plan.max_concurrency == pytest.approx(512 / 5)
    assert f"102.4 requests of 100 tokens at once; {note}" in plan.render()
    assert plan.summarize().endswith(f"of 7.00 GiB; {note}")
    wide = msgspec.structs.replace(
        PLAN,
        cache=_with_window(4096, 6143),
    )
    assert (wide.render(), wide.summarize()) == (PLAN.render(), PLAN.summarize())


def test_columns_are_aligned_and_the_last_one_is_not_padded() -> None:
    assert render_table([("a", "bb", "c"), ("aaa", "b")]) == "  a    bb  c\n  aaa  b"


def test_plan_of_several_cache_groups_names_the_blocks_of_each() -> None:
    windowed = msgspec.structs.replace(PLAN.cache.groups[0], num_blocks=64, window=45, max_live_tokens=60)
    cache = msgspec.structs.replace(PLAN.cache, groups=(*PLAN.cache.groups, windowed))
    plan = msgspec.structs.replace(PLAN, cache=cache)
    assert "512 + 64 blocks of 16 tokens, 1.00 MiB + 1.00 MiB each" in plan.render()
    assert "a step computes (cache group 1)" in plan.summarize()
    # 60 tokens touch 5 blocks
    assert plan.max_concurrency == pytest.approx(64 / 5)


def test_each_cache_group_has_a_line_with_its_kind_its_layers_and_its_blocks() -> None:
    kinds = (
        group(0, 1, 2, 5, keeps=KeysAndValues(8, 128)),
        group(3, keeps=State(4096)),
        group(4, keeps=Latent(576, 512)),
    )
    limits = [GroupLimits(num_blocks=count, block_bytes=1 << 20) for count in (512, 31, 9)]
    limits[1] = msgspec.structs.replace(limits[1], max_live_tokens=2, is_state=True)
    cache = msgspec.structs.replace(PLAN.cache, groups=tuple(limits))
    lines = msgspec.structs.replace(PLAN, cache=cache, cache_groups=kinds).render().splitlines()
    assert [line.split("  ", 2)[2].strip().split(None, 4)[4] for line in lines if "  group " in line] == [
        "512 blocks of 1.00 MiB: keys and values of 8 x 128 per token, layers 0-2, 5",
        "31 blocks of 1.00 MiB: a state of 4,096 float32 per block, layer 3",
        "9 blocks of 1.00 MiB: a latent of 576 per token, layer 4",
    ]


_FP8 = {"type": "float", "num_bits": 8}
_INT4 = {"type": "int", "num_bits": 4}


_MIXED = {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": _FP8}, "b": {"weights": _INT4}}}


@pytest.mark.parametrize(
    ("stored", "has_codes"),
    [
        ({"quant_method": "gptq", "bits": 4}, True),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, True),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, False),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, False),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": _FP8}}}, False),
        (_MIXED, True),
    ],
)
def test_activations_are_rounded_beside_codes(stored: dict[str, object], has_codes: bool, tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path / "m")
    edit_config(path, quantization_config=stored)
    write_byte_tokenizer(path)
    checkpoint = Checkpoint.open(path)
    config = resolve(EngineArgs(model=str(path)), checkpoint, Platform.detect())
    assert ("activations" in dict(model_facts(config, checkpoint))) == has_codes
