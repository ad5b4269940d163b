"""Adapters change what they should, and nothing else."""

from __future__ import annotations

import gc
import os
import re
import tracemalloc
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch

from octavo.core.adapter import open_file
from octavo.errors import CheckpointError
from octavo.layers.heads import Heads
from octavo.lora import adapter
from octavo.lora.adapter import read_files
from octavo.ops.registry import bind
from tests.distributed.threads import run_ranks
from tests.fakes.checkpoints import make_checkpoint
from tests.lora.adapted_run import AdaptedRun
from tests.lora.adapter_folders import LINEAR, digest, edit, make_adapter, merge

PROMPT = list(range(3, 24))
HEADS = Heads(4, 2, 8)
WAYS = [("float32", None), ("bfloat16", None), ("bfloat16", "int8"), ("float32", "int4")]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Attention alone; all linear layers, rank-stabilised; two modules with ranks of their own."""
    root = tmp_path_factory.mktemp("adapters")
    return [
        make_adapter(base, root / "a", seed=1),
        make_adapter(base, root / "b", LINEAR, rank=7, seed=2, use_rslora=True, target_modules="all-linear"),
        make_adapter(base, root / "c", ("q_proj", "up_proj"), seed=3, rank_pattern={"layers.1.mlp.up_proj": 16}),
    ]


@pytest.fixture(scope="module")
def bare(base: Path) -> AdaptedRun:
    return AdaptedRun(base)


def test_recordings_end_with_the_runner_that_has_them(bare: AdaptedRun) -> None:
    adapted = bare.adapters.around(bare.loaded, lambda: bare.loaded)
    seen = ref(adapted)
    del adapted
    assert seen() is None
    bare.model = bare.adapters.around(bare.loaded, lambda: bare.loaded)


@pytest.mark.parametrize("kind", ["reference", "native"])
def test_an_adapter_computes_what_merged_ones_do(base: Path, folders: list[Path], kind: str, tmp_path: Path) -> None:
    ops = bind() if kind == "reference" else None
    run = AdaptedRun(base, folders, ops=ops)
    for slot, scale in ((1, 6 / 4), (2, 6 / 7**0.5)):
        merged = AdaptedRun(merge(base, folders[slot - 1], tmp_path / str(slot), scale), ops=ops)
        expected = merged.logits([("x", PROMPT, 0)])["x"]
        found = run.logits([("x", PROMPT, slot)])["x"]
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
        assert (run.logits([("x", PROMPT, 0)])["x"] - expected).abs().max() > 0.1


@pytest.mark.parametrize("way", WAYS)
def test_a_row_has_the_same_bits_beside_other_adapters_and_in_chunks(
    base: Path, folders: list[Path], way: tuple[str, str | None]
) -> None:
    options: dict[str, Any] = {"dtype": getattr(torch, way[0]), "method": way[1]}
    run, plain = AdaptedRun(base, folders, **options), AdaptedRun(base, **options)
    alone = {slot: run.logits([("x", PROMPT, slot)])["x"] for slot in range(4)}
    assert torch.equal(alone[0], plain.logits([("x", PROMPT, 0)])["x"])
    mixed = run.logits(
        [("1", PROMPT[:9], 1), ("0", PROMPT[:1], 0), ("2", PROMPT, 2), ("b", PROMPT, 1)],
        [("0", PROMPT[1:12], 0), ("1", PROMPT[9:20], 1), ("3", PROMPT[:20], 3)],
        [("3", PROMPT[20:], 3), ("0", PROMPT[12:], 0), ("1", PROMPT[20:], 1)],
    )
    for name, slot in (("0", 0), ("1", 1), ("2", 2), ("3", 3), ("b", 1)):
        assert torch.equal(mixed[name], alone[slot]), f"slot {slot}"


@pytest.mark.parametrize(("size", "way"), [(2, WAYS[0]), (4, WAYS[1]), (2, WAYS[2])])
def test_ranks_compute_as_one_rank(base: Path, folders: list[Path], size: int, way: tuple[str, str | None]) -> None:
    options: dict[str, Any] = {"dtype": getattr(torch, way[0]), "method": way[1]}
    rows = [(str(slot), PROMPT, slot) for slot in range(4)]
    expected = AdaptedRun(base, folders, **options).logits(rows)
    for found in run_ranks(size, lambda mesh: AdaptedRun(base, folders, mesh=mesh, **options).logits(rows)):
        for name in expected:
            assert torch.equal(found[name], expected[name]), name


def test_a_slot_takes_the_next_adapter_and_leaves_nothing_of_the_last(base: Path, folders: list[Path]) -> None:
    run, other = AdaptedRun(base, [folders[1]]), AdaptedRun(base, [folders[0]])
    assert run.read(folders[0]) == ""
    run.adapters.load_adapter(1, digest(folders[0]))
    assert torch.equal(run.logits([("x", PROMPT, 1)])["x"], other.logits([("x", PROMPT, 1)])["x"])


def test_a_product_without_adapters_is_not_wrapped_and_steps_without_them_add_nothing(
    base: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = AdaptedRun(base, folders[:1])
    layer = run.loaded.layers["0"]
    assert type(layer.mlp.down_proj.prepared).__name__ != "AdaptedLinear"
    calls: list[int] = []
    slots = layer.self_attn.o_proj.prepared._slots
    monkeypatch.setattr(type(slots), "__call__", lambda *_: calls.append(1))
    run.logits([("x", PROMPT, 0)])
    assert not calls


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora"),
    "biases": ({"bias": "all"}, "bias is 'all'"),
    "lora_bias": ({"lora_bias": True}, "lora_bias"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "activated": ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    "replicated": ({"layer_replication": [[0, 1]]}, "layer_replication"),
    "parameters": ({"target_parameters": ["experts.gate_up_proj"]}, "need enable_lora_experts"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
    "olora": ({"init_lora_weights": "olora"}, "changes the base model"),
    "another method": ({"peft_type": "IA3"}, "peft_type is 'IA3', expected LORA"),
    "a rank of zero": ({"r": 0}, "r is '0'"),
    "an absurd rank": ({"r": 10**4000}, "r is '10{79}', expected a whole number from 1 to 65,536"),
    "no number": ({"lora_alpha": "x"}, "lora_alpha"),
    "a slow pattern": ({"alpha_pattern": {"(a+)+$": 1}}, "alpha_pattern"),
    "no pattern": ({"rank_pattern": {"(": 1}}, "rank_pattern"),
    "a module that matches nothing": ({"target_modules": ["q_proj", "query"]}, "target_modules names query"),
    "tensors of no target": ({"target_modules": ["k_proj"]}, "target_modules of .* does not name"),
    "another rank": ({"r": 5}, "has shape \\[4, 32\\].* require \\[5, 32\\]"),
    "too high a rank": ({"r": 17}, "has rank 17, max_lora_rank is 16"),
    "missing": ({"remove": ("layers.1.self_attn.q_proj.lora_B.weight",)}, "q_proj.lora_B.weight is missing"),
    "an embedding": (
        {"tensors": {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 9)}},
        "is no A",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_adapter_may_not_have_is_named(base: Path, bare: AdaptedRun, name: str, tmp_path: Path) -> None:
    changes, message = REFUSED[name]
    folder = edit(make_adapter(base, tmp_path / "x", ("q_proj",)), **changes)
    assert re.search(message, bare.read(folder))


def _pair(module: str, a: tuple[int, int], b: tuple[int, int]) -> dict[str, torch.Tensor]:
    names = [f"base_model.model.{module}.lora_{each}.weight" for each in "AB"]
    return {name: torch.ones(shape) for name, shape in zip(names, (a, b), strict=True)}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (_pair("model.layers.7.self_attn.q_proj", (4, 32), (64, 4)), "layers.7.self_attn.q_proj is no linear layer"),
        (_pair("lm_head", (4, 32), (130, 4)), "lm_head is no linear layer"),
        (_pair("model.layers.0.self_attn.q_proj", (4, 31), (64, 4)), "lora_A.weight has shape"),
        (_pair("model.layers.0.self_attn.q_proj", (4, 32), (63, 4)), "lora_B.weight has shape"),
        ({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.full((4, 32), torch.nan)}, "NaN"),
        ({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(4, 32).int()}, "stored as"),
        (_pair("layers.0.self_attn.q_proj", (4, 32), (64, 4)), "twice"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    base: Path, bare: AdaptedRun, tensors: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    folder = edit(make_adapter(base, tmp_path / "x", ("q_proj",)), tensors=tensors, target_modules="any")
    assert re.search(message, bare.read(folder))


def test_files_that_are_damaged_or_have_changed_are_refused(base: Path, bare: AdaptedRun, tmp_path: Path) -> None:
    run, folder = bare, make_adapter(base, tmp_path / "x")
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    assert "truncated or damaged" in run.read(folder)
    while (state := run.adapters.read_adapter(str(folder), "0" * 64)) is None:
        pass
    assert "have changed" in state


def test_nothing_stays_of_an_adapter_that_is_refused(base: Path, bare: AdaptedRun, tmp_path: Path) -> None:
    narrow = _pair("model.layers.0.self_attn.q_proj", (4, 31), (64, 4))
    folder = edit(make_adapter(base, tmp_path / "x", ("q_proj",)), tensors=narrow, target_modules="any")
    assert bare.read(folder)

    def num_tensors() -> int:
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())  # asks no object for its class

    gc.collect()
    gc.disable()  # the core's collector searches rarely
    try:
        before = num_tensors()
        bare.adapters.drop_adapter(digest(folder))
        assert bare.read(folder)
        bare.adapters.drop_adapter(digest(folder))
        assert num_tensors() == before
    finally:
        gc.enable()


def test_a_disk_that_fails_refuses_an_adapter_and_ends_nothing(
    base: Path, bare: AdaptedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> int:
        raise OSError(5, "Input/output error")

    folder = make_adapter(base, tmp_path / "x")
    monkeypatch.setattr(adapter, "open_file", fail)
    assert "cannot be read ([Errno 5] Input/output error)" in bare.read(folder)


def test_files_that_change_while_they_are_read_are_used_as_they_were_digested(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_adapter(base, tmp_path / "adapter")
    named = digest(folder)

    def change_then_open(path: Path) -> int:
        if path.name != "adapter_config.json":
            (folder / "adapter_config.json").write_text("{}")  # which has been read
        return open_file(path)

    monkeypatch.setattr(adapter, "open_file", change_then_open)
    config, tensors = read_files(folder, named, HEADS, "LlamaForCausalLM")
    assert (config.rank, config.alpha) == (4, 6.0)
    assert tensors


def test_a_file_takes_no_more_memory_than_it_has_bytes(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(base, tmp_path / "adapter")
    tracemalloc.start()
    try:
        read_files(folder, digest(folder), HEADS, "LlamaForCausalLM")
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_a_pipe_that_has_taken_the_place_of_a_file_does_not_hold_the_reader(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(base, tmp_path / "adapter")
    named = digest(folder)
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="adapter_model.safetensors: is no regular file"):
        read_files(folder, named, HEADS, "LlamaForCausalLM")
