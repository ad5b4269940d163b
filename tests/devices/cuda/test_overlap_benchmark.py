"""Steps of a graph with other tokens than the ones before are compared with ordinary launches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from benchmarks.gpu import overlap
from benchmarks.gpu.persistent import batch_of, open_model
from octavo.devices import DEVICES
from octavo.devices.reference.attention import ReferenceBackend
from octavo.ops.registry import bind

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 40,
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}


@pytest.mark.parametrize(("is_repeated", "num_unequal"), [(True, 0), (False, 4)])
@torch.inference_mode()
def test_results_of_an_earlier_step_are_counted_as_unequal(
    is_repeated: bool, num_unequal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(CONFIG, torch.float32, "cpu", bind(), ReferenceBackend())
    batch, plain = batch_of(model, [5, 9], torch.float32, "cpu"), overlap.logits_of
    results: list[torch.Tensor] = []

    class OneResult:
        def replay(self) -> None:
            if is_repeated:
                results[-1].copy_(plain(model, model, batch))

    def noted(*arguments: Any) -> torch.Tensor:
        results.append(plain(*arguments))
        return results[-1]

    monkeypatch.setattr(overlap, "_REPLAYS", 5)
    monkeypatch.setattr(overlap, "logits_of", noted)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", OneResult)
    monkeypatch.setattr(torch.cuda, "graph", nullcontext)
    assert overlap.unequal_steps(model, batch, overlap.ChosenLauncher()) == num_unequal


def test_engines_overlap_launches_only_inside() -> None:
    before = dict(DEVICES)
    with overlap.device_with("overlapping"):
        assert DEVICES["cuda"] == "benchmarks.gpu.overlap.OverlappingCuda"
    assert before == DEVICES
