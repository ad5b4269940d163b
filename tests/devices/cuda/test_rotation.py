"""Heads that are rotated where they are written to the cache, and the launches of a decode layer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from octavo import LLM, SamplingParams
from octavo.attention.backend import RotatingBackend, Scores
from octavo.attention.metadata import AttentionMetadata
from octavo.config.schema import DeviceConfig
from octavo.devices import DEVICES
from octavo.devices.cuda.attention import CudaBackend, RotatingCudaBackend
from octavo.devices.cuda.runtime import CudaRuntime, Launcher, launch_by_triton
from octavo.ops import rotary
from octavo.ops.rotary import Rotation
from octavo.platform import Platform
from tests.devices.cuda.interpreted import InterpretedCuda
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint

LAUNCHED: list[str] = []


def launch(kernel: str, *arguments: Any, **constants: Any) -> None:
    LAUNCHED.append(kernel)
    launch_by_triton(kernel, *arguments, **constants)


class CountedCuda(InterpretedCuda):
    """The device, whose launches are kept by name."""

    def launcher(self, is_invariant: bool) -> Launcher:
        return launch


@pytest.fixture(autouse=True)
def launched() -> list[str]:
    LAUNCHED.clear()
    return LAUNCHED


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.int8)],
    ids=str,
)
def test_the_fused_rotation_and_write_has_the_bits_of_the_operator_and_of_run(
    dtype: torch.dtype, cache_dtype: torch.dtype, launched: list[str]
) -> None:
    runtime = CudaRuntime(launch=launch)
    apart, fused = CudaBackend(runtime, cache_dtype), RotatingCudaBackend(runtime, cache_dtype)
    for q, k, positions, table, *weights, interleaved in rotary.examples(dtype):
        v = k * 2 if interleaved else torch.randn(*k.shape[:2], 2 * k.shape[2]).to(dtype)[..., ::2]  # not dense
        for q_table in (table, table * 1.5) if interleaved else (table,):
            rotation = Rotation(positions, q_table, table, *weights, interleaved)
            slots = torch.arange(len(q)) * 3 + 16
            metadata = AttentionMetadata.of_slots(slots, 16)
            shape = apart.cache_shape(3, 16, k.shape[1], k.shape[2])
            caches = [torch.zeros(shape, dtype=each.element_type) for each in (apart, fused)]
            expected, turned = rotation.of(runtime.bind().rotary, q, k)
            apart.run(expected, turned, v, caches[0], metadata, Scores(1.0))
            launched.clear()
            assert torch.equal(fused.rotate_and_store(q, k, v, caches[1], metadata, rotation), expected)
            assert torch.equal(caches[0], caches[1])
            both = (
                ["rows.rotate_and_store"]
                if cache_dtype is torch.bfloat16
                else ["rows.rotate_and_store", "attention.store"]
            )
            assert launched == both


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, {"rows.rotate_and_store": 1, "attention.attend": 1, "rows.rms_norm": 2, "elementwise.elementwise": 1}),
        (
            {"kv_cache_dtype": "int8"},
            {
                "rows.rotate_and_store": 1,
                "attention.store": 1,
                "attention.attend": 1,
                "rows.rms_norm": 2,
                "elementwise.elementwise": 1,
            },
        ),
    ],
    ids=["plain", "8-bit cache"],
)
def test_a_layer_of_a_decode_step_has_these_launches(
    args: dict[str, Any], expected: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: list[str]
) -> None:
    monkeypatch.setitem(DEVICES, "cuda", f"{__name__}.CountedCuda")
    found = []
    for layers in (1, 2):
        model = write_byte_tokenizer(
            make_checkpoint("qwen3", tmp_path / str(layers), vocab_size=300, num_hidden_layers=layers)
        )
        sizes = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 8, "max_num_seqs": 1}
        with LLM(str(model), device="cuda", enforce_eager=True, max_steps_in_flight=1, **{**sizes, **args}) as llm:
            counts = []
            for tokens in (2, 3):  # the second has one decode step more
                launched.clear()
                llm.generate(
                    [{"prompt_token_ids": [5, 6, 7]}],
                    SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0),
                    use_tqdm=False,
                )
                counts.append(Counter(launched))
            found.append(counts[1] - counts[0])
    assert found[1] - found[0] == expected


def test_another_implementation_of_the_rotation_is_taken_where_it_is_asked_for() -> None:
    backends = []
    for overrides in ({}, {"rotary": "reference"}):
        device = InterpretedCuda(DeviceConfig(device="cuda", op_overrides=overrides), Platform.detect(), "test")
        backends.append(device.attention(torch.float32, torch.float32, head_dims=[16], block_size=16).backend)
    assert [isinstance(each, RotatingBackend) for each in backends] == [True, False]
