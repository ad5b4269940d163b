"""Decode steps of every family run on compiled kernels alone: so they can be recorded, and replay to the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo.core.sampling_params import SamplingParams
from octavo.core.step import ModelRunnerOutput
from octavo.worker.worker import Worker
from tests.conformance.runtimes import LEVELS
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.families import ALWAYS, FAMILIES
from tests.worker.engine_config import make_config, start_worker
from tests.worker.prefix_model import new_sequence, row, step

pytestmark = pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")


def of_one_kind(own: dict[str, Any]) -> dict[str, Any]:
    """Layers that all see all tokens: the sequences here have tables of one cache group, and torch makes choices."""
    if "index_topk" in own:
        return {"index_topk": 256}
    return {"layer_types": ["full_attention"] * len(own["layer_types"])} if "layer_types" in own else {}


NOT_RECORDED = {"axk2", "olmo_hybrid", "deepseek_v4", "glm5_next", "hy_v4", "inkling", "mistral_large4", "qwen4_exp"}
"""olmo_hybrid has no configuration without recurrent layers, which are a cache group of their own; torch writes what
queries of deepseek_v4, glm5_next, hy_v4, mistral_large4 and qwen4_exp choose among to its slots, joins what those of
axk2 are made of, and computes the attention of inkling."""
VARIANTS: dict[str, dict[str, Any]] = {
    **{family: of_one_kind(own) for family, (_, _, own) in FAMILIES.items() if family not in NOT_RECORDED},
    "cohere with norms": {"use_qk_norm": True},
    "gpt_neox one after the other": {"use_parallel_residual": False},
    "phi with norms": {"qk_layernorm": True},
    "stablelm with norms": {"qk_layernorm": True, "use_parallel_residual": True},
    "llama tied": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "opt with late norms and projections": {"do_layer_norm_before": False, "word_embed_proj_dim": 16},
    "opt without final norm": {"enable_bias": False, "_remove_final_layer_norm": True},
    "gpt2 untied": {"tie_word_embeddings": False, "activation_function": "gelu"},
}
QUICK = (
    *("bloom", "deepseek_v3", "falcon_h1", "gemma3n", "gpt_oss", "jamba", "llama4", "mamba2", "minimax", "qwen3_5"),
    *("qwen3_moe", "step3p5", "zamba2"),
)
"""Of the families that are run in one type alone, those whose steps are recorded each time: one of each kind of layer.
The others, which share their operators, are run with the long tests."""
PARAMS = SamplingParams(temperature=0.0, max_tokens=30, logprobs=3)


class Computed(TorchDispatchMode):
    """Names of torch's operators that do more than cut a tensor differently or take memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage_of(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        made = {storage_of(each) for each in tree_leaves(result) if isinstance(each, Tensor)}
        if not (made and made <= given) and not func.name().startswith("aten::empty"):
            self.names.append(func.name())
        return result


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def test_operators_that_compute_are_noticed() -> None:
    with torch.inference_mode(), Computed() as seen:
        x = torch.empty(2, 3)
        x.view(3, 2)[1:].reshape(-1).to(torch.float32).split([1, 3])
        assert seen.names == []
        x.t().contiguous()
        x.bfloat16()
        (x + x).sum().item()
    assert len(seen.names) == 5


@contextmanager
def watched(worker: Worker) -> Iterator[Computed]:
    """The operators that the model runs from here on, and those of its head."""
    recorded = worker._runner.model
    seen = Computed()
    original = recorded._model, recorded.compute_logits

    def watch(function: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        def call(given: Any) -> Tensor:
            with seen:
                return function(given)

        return call

    recorded._model, recorded.compute_logits = map(watch, original)
    yield seen
    recorded._model, recorded.compute_logits = original


def decode(worker: Worker, count: int) -> list[ModelRunnerOutput]:
    """Two prompts of different lengths, then `count` steps of one token each."""
    prompts = [[5, 17, 99, 3], [64, 7]]
    options = {"params": PARAMS, "num_groups": len(worker.plan.cache.groups)}
    sequences = [new_sequence(i, prompt, [2 * i + 1, 2 * i + 2], **options) for i, prompt in enumerate(prompts)]
    outputs = [worker.submit(step(sequences, [row(i, 0, len(prompt)) for i, prompt in enumerate(prompts)])).result()]
    for n in range(count):
        outputs.append(
            worker.submit(step(rows=[row(i, len(prompt) + n, 1) for i, prompt in enumerate(prompts)])).result()
        )
    return outputs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant.split()[0] in ALWAYS])
def test_a_decode_step_runs_no_operator_of_torch(variant: str, dtype: str, tmp_path: Path) -> None:
    path = make_checkpoint(variant.split()[0], tmp_path / "model", **VARIANTS[variant])
    worker = start_worker(make_config(path, dtype=dtype, enforce_eager=False))
    with watched(worker) as seen:
        decode(worker, 1)
    assert seen.names == []


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        pytest.param(variant, dtype, marks=[pytest.mark.long] * (variant.split()[0] not in (*ALWAYS, *QUICK)))
        for place, variant in enumerate(VARIANTS)
        for dtype in ("float32", "bfloat16")
        if variant.split()[0] in ALWAYS or dtype == ("float32", "bfloat16")[place % 2]
    ],
)
def test_recorded_steps_give_the_same_bits(variant: str, dtype: str, tmp_path: Path) -> None:
    path = make_checkpoint(variant.split()[0], tmp_path / "model", **VARIANTS[variant])
    recorded = start_worker(make_config(path, dtype=dtype, enforce_eager=False))
    found = decode(recorded, 12)
    assert any(each is not None for each in recorded._runner.model._recordings.values())
    eager = start_worker(make_config(path, dtype=dtype, enforce_eager=True))
    assert found == decode(eager, 12)


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"quantization": "int4-g128"},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "fp8"},
    ],
    ids=lambda options: "-".join(*options.items()),
)
def test_quantised_weights_and_caches_need_no_operator_of_torch_either(options: dict[str, str], tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path / "model", hidden_size=128, intermediate_size=256, head_dim=32)
    worker = start_worker(make_config(path, dtype="bfloat16", enforce_eager=False, **options))
    with watched(worker) as seen:
        eager = decode(worker, 1)
    assert seen.names == []
    recorded = start_worker(make_config(path, dtype="bfloat16", enforce_eager=False, **options))
    assert decode(recorded, 12)[: len(eager)] == eager
    assert any(each is not None for each in recorded._runner.model._recordings.values())
