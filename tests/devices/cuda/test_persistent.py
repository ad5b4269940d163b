"""A decode step whose layers are one launch computes what the reference operators do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Thread, local
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

import triton.language as tl
import triton.runtime.interpreter as interpreter

from benchmarks.gpu import persistent
from benchmarks.gpu.persistent import PersistentStep, batch_of, compared, open_model, outputs_of_tile
from octavo.attention.metadata import ModelInput
from octavo.devices.reference.attention import ReferenceBackend
from octavo.models.decoder import DecoderStack
from octavo.ops.registry import bind


def model_of(heads: tuple[int, int, int], hidden: int, inner: int, layers: int = 2) -> DecoderStack:
    """heads: of queries, of keys, and their size."""
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    config = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 40, "num_hidden_layers": layers}
    config |= {"hidden_size": hidden, "intermediate_size": inner, "max_position_embeddings": 512, "rms_norm_eps": 1e-6}
    config |= dict(zip(names, heads, strict=True))
    return open_model(config, torch.float32, "cpu", bind(), ReferenceBackend())


def computed(model: DecoderStack, batch: ModelInput, programs: int, *, has_barriers: bool) -> list[Tensor]:
    """Return hidden states and caches."""
    own = replace(batch, kv_caches=[cache.clone() for cache in batch.kv_caches])
    step = PersistentStep(model, own.kv_caches, programs)
    for _ in range(1 + has_barriers):  # counters are as they were
        hidden = step(own, has_barriers=has_barriers)
    assert not step.counters.any()
    return [hidden, *own.kv_caches]


@pytest.mark.parametrize(
    ("heads", "hidden", "inner", "lengths", "programs"),
    [
        ((4, 4, 64), 96, 160, (1,), 5),
        ((4, 2, 128), 264, 40, (255, 64, 65), 3),
        ((4, 1, 64), 128, 128, (257, 1, 256, 2, 15, 16, 17, 63, 66, 127, 128, 129, 192, 193, 31, 3), 7),
    ],
    ids=["one row", "pairs of heads", "sixteen rows"],
)
@torch.inference_mode()
def test_a_step_is_that_of_the_reference_on_any_number_of_programs(
    heads: tuple[int, int, int], hidden: int, inner: int, lengths: tuple[int, ...], programs: int
) -> None:
    model = model_of(heads, hidden, inner, layers=2 if len(lengths) == 1 else 1)
    batch = batch_of(model, lengths, torch.float32, "cpu")
    apart = computed(model, batch, programs, has_barriers=False)
    whole = computed(model, batch, 1, has_barriers=True)
    assert all(map(torch.equal, apart, whole))
    for found, expected in zip(apart, [model(batch), *batch.kv_caches], strict=True):
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@contextmanager
def programs_at_once() -> Iterator[None]:
    """Let each program of a launch have a thread: the interpreter runs one after the other."""
    own, plain, builder = local(), interpreter.GridExecutor.__call__, interpreter.InterpreterBuilder

    def launch(self: Any, *arguments: Any, **constants: Any) -> None:
        failed: list[BaseException] = []

        def run(number: int) -> None:
            own.place = number, self.grid[0]
            try:
                plain(interpreter.GridExecutor(self.fn, self.arg_names, (1,)), *arguments, **constants)
            except BaseException as error:
                failed.append(error)

        threads = [Thread(target=run, args=(number,), daemon=True) for number in range(self.grid[0])]
        for each in threads:
            each.start()
        for each in threads:
            each.join(timeout=60)
        assert not failed, failed
        assert not any(each.is_alive() for each in threads), "programs wait for each other"

    def number(which: int) -> Any:
        return lambda self, axis: interpreter.TensorHandle(np.array([own.place[which]], np.int32), tl.int32)

    before = sys.getswitchinterval()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launch)
        patch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)  # they are where they were
        patch.setattr(builder, "create_get_program_id", number(0))
        patch.setattr(builder, "create_get_num_programs", number(1))
        sys.setswitchinterval(1e-4)
        try:
            yield
        finally:
            sys.setswitchinterval(before)


@torch.inference_mode()
def test_programs_at_once_wait_for_each_other(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--sanitize-kernels"):
        pytest.skip("programs run one at a time under the sanitizer")
    model = model_of((2, 1, 64), 96, 40)
    batch = batch_of(model, (130, 3), torch.float32, "cpu")
    expected = computed(model, batch, 1, has_barriers=True)
    with programs_at_once():
        assert all(map(torch.equal, computed(model, batch, 3, has_barriers=True), expected))


@torch.inference_mode()
def test_the_comparison_of_a_gpu_sees_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of((2, 1, 64), 96, 40, layers=1)
    batch = batch_of(model, (20,), torch.float32, "cpu")
    found = compared(model, batch, 1)
    assert found.pop("difference") < 1e-5
    assert all(found.values())
    q_norm, k_norm = (persistent.WEIGHTS.index(f"self_attn.{each}_norm") for each in "qk")
    swapped = list(persistent.WEIGHTS)
    swapped[q_norm], swapped[k_norm] = swapped[k_norm], swapped[q_norm]
    monkeypatch.setattr(persistent, "WEIGHTS", swapped)
    assert not compared(model, batch, 1)["is_allowed"]


def test_a_model_of_another_shape_is_refused() -> None:
    config = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 40, "hidden_size": 32, "intermediate_size": 32}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_act": "silu"}
    config |= {"max_position_embeddings": 64, "rms_norm_eps": 1e-6}
    model = open_model(config, torch.float32, "cpu", bind(), ReferenceBackend())
    with pytest.raises(ValueError, match=r"not a dense decoder in the shape of Qwen3: layers\.0\.self_attn\."):
        PersistentStep(model, batch_of(model, (5,), torch.float32, "cpu").kv_caches, 1)


def test_the_busiest_program_reads_the_least() -> None:
    assert [outputs_of_tile(outputs, 1, 132) for outputs in (1024, 4096, 6144)] == [8, 16, 16]
