"""What engines launch, and what binaries are compiled for. Nothing is computed here: memory is zeros, and stays so."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from octavo import LLM, LoRARequest, SamplingParams
from octavo.attention.backend import Scores
from octavo.attention.metadata import AttentionMetadata
from octavo.devices import DEVICES
from octavo.devices.cuda.attention import CudaBackend
from octavo.devices.cuda.cubins import Call, call_of
from octavo.devices.cuda.runtime import CudaRuntime, Launcher
from tests.devices.cuda.interpreted import InterpretedCuda
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint
from tests.lora.adapter_folders import LINEAR, make_adapter
from tools.cubins import is_kept
from tools.kernel_models import MODELS

KNOWN = """
import json, pickle, sys
from tools.cubins import calls_of
from tools.kernel_launches import launches, unspecialized
from tools.kernel_models import MODELS
found = [launches([json.load(open(path))], has_codes=False) for path in sys.argv[1:]]
found.append(launches([]))
names = {call.kernel for each in found for call in each}
gemma = [MODELS["Gemma-2-2B"]], ("bfloat16",)
tiles = [launches(*gemma, has_codes=False, shared_bytes=each << 10) for each in (164, 100)]
archives = [calls_of(gemma[0], each, gemma[1], has_codes=False) for each in (80, 89)]
sys.stdout.buffer.write(pickle.dumps((found, {name: unspecialized(name) for name in names}, tiles + archives)))
"""
"""Runs where kernels are compiled: here they are interpreted, and forget which arguments make other code."""
FAMILIES = ("qwen3", "qwen2", "gemma2", "gpt_oss", "deepseek_v2", "qwen3_next")
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True),
    SamplingParams(seed=1, max_tokens=3, ignore_eos=True),
    SamplingParams(seed=1, top_k=9, top_p=0.9, max_tokens=3, ignore_eos=True),
    SamplingParams(seed=1, repetition_penalty=1.1, bad_words=["ab"], max_tokens=3, ignore_eos=True),
    SamplingParams(seed=1, top_p=0.9, logprobs=2, max_tokens=2, ignore_eos=True),
)
COMMON: Any = {"vocab_size": 300, "max_position_embeddings": 1024}
SIZES: Any = {"max_model_len": 600, "num_gpu_blocks_override": 64, "max_num_seqs": 8, "dtype": "bfloat16"}
LAUNCHED: list[tuple[str, list[Any], dict[str, Any]]] = []


def on_a_gpu(tensor: Tensor) -> Tensor:
    """Return a tensor at an address that 16 divides if it divides that of `tensor` on a GPU, where memory of a tensor
    begins at whole vectors."""
    offset = tensor.storage_offset()
    return torch.empty(offset + 1, dtype=tensor.dtype, device="meta")[offset:]


EMPTY = torch.empty


def zeros(*args: Any, **kwargs: Any) -> Tensor:
    """Return what torch.empty returns, of zeros: no logit is NaN."""
    tensor = EMPTY(*args, **kwargs)
    return tensor if tensor.is_meta else tensor.zero_()


class RecordedCuda(InterpretedCuda):
    """The device, whose launches are kept as a GPU would have them."""

    def launcher(self, is_invariant: bool) -> Launcher:
        def launch(kernel: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
            given = [on_a_gpu(each) if isinstance(each, Tensor) else each for each in arguments]
            if "TYPE" in constants:  # float32, which alone the interpreter multiplies
                constants["TYPE"] = str(arguments[0].dtype).removeprefix("torch.")
            LAUNCHED.append((kernel, given, constants))

        return launch


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    regular = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2}
    sizes = {"regular": {**regular, "num_key_value_heads": 1, "head_dim": 64}}
    sizes["deep"] = {**sizes["regular"], "hidden_size": 512}
    sizes["mixture"] = {**sizes["regular"], "moe_intermediate_size": 64, "num_experts": 8}
    families = {"regular": "qwen3", "deep": "qwen3", "mixture": "qwen3_moe"}
    return {
        name: write_byte_tokenizer(
            make_checkpoint(families.get(name, name), folder / name, **{**COMMON, **sizes.get(name, {})})
        )
        for name in (*FAMILIES, *sizes)
    }


@pytest.fixture(scope="module")
def known(paths: dict[str, Path]) -> tuple[dict[str, set[Call]], dict[str, frozenset[int]], list[set[Call]]]:
    """The launches of each family, for each kernel the arguments whose values make no other code, and the launches of a
    model with 164 and 100 KiB of shared memory and in the archives of 8.0 and 8.9."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", KNOWN, *(str(path / "config.json") for path in paths.values())]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr.decode()
    (*of_families, of_codes), unspecialized, of_gemma = pickle.loads(done.stdout)
    of_each = {family: {*calls, *of_codes} for family, calls in zip(paths, of_families, strict=True)}
    return of_each, unspecialized, [{*calls} for calls in of_gemma]


@pytest.fixture
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "cuda", f"{__name__}.{RecordedCuda.__name__}")
    with torch.device("meta"):  # the first such context in a process keeps the functions that it has an effect on
        assert torch.empty(1).is_meta
    monkeypatch.setattr(torch, "empty", zeros)
    LAUNCHED.clear()


def test_the_shipped_model_has_the_sizes_that_binaries_are_compiled_for() -> None:
    shipped = json.loads(files("octavo.builtin").joinpath("octavo-tiny/config.json").read_text())
    known = {name: value for name, value in MODELS["octavo-tiny"].items() if name in shipped}
    assert len(known) > 8
    left = {"num_hidden_layers", "max_position_embeddings"}
    assert {name for name, value in known.items() if value != shipped[name]} == left


def test_addresses_are_told_apart() -> None:
    found = [on_a_gpu(torch.zeros(64, dtype=torch.bfloat16)[start:]).data_ptr() % 16 == 0 for start in (0, 1, 8)]
    assert found == [True, False, True]


@pytest.mark.usefixtures("_recorded")
@pytest.mark.parametrize(
    ("family", "args"),
    [
        *(pytest.param(family, {}, marks=[pytest.mark.long] * (family in ("qwen2", "gemma2"))) for family in FAMILIES),
        ("regular", {"kv_cache_dtype": "fp8"}),
        *(("regular", {"quantization": each}) for each in ("int8", "int4")),
        *(
            pytest.param("regular", each, marks=pytest.mark.long)
            for each in ({"kv_cache_dtype": "int8"}, {"quantization": "int4-g128"})
        ),
        ("regular", {"dtype": "float16"}),
        ("mixture", {"quantization": "int4"}),
    ],
    ids=str,
)
def test_there_is_a_binary_for_all_that_an_engine_launches(
    family: str, args: dict[str, Any], paths: dict[str, Path], known: Any
) -> None:
    for is_invariant in (False, True):
        with LLM(str(paths[family]), device="cuda", batch_invariant=is_invariant, **{**SIZES, **args}) as llm:
            # draws are alike but for their number
            for lengths, every_params in (
                ((5,), PARAMS),
                ((3, 2), PARAMS[:1]),
                ((3, 16, 2), PARAMS),
                ((520,), PARAMS[:1]),
            ):
                prompts: Any = [{"prompt_token_ids": [5 + i * 7 % 90 for i in range(each)]} for each in lengths]
                for params in every_params:
                    outputs = llm.generate(prompts, params, use_tqdm=False)
                    assert all(each.outputs[0].finish_reason == "length" for each in outputs)
    every, unspecialized, _ = known
    calls = {call_of(name, given, constants, unspecialized[name]) for name, given, constants in LAUNCHED}
    assert calls - every[family] == set()
    expected = {"filters.settle", "sampling.winners", "logprobs.survey", "processors.penalise"}
    attended = set() if args else {"attention.attend", "attention.merge", "linear.linear"}
    assert {each.kernel for each in calls} >= expected | attended
    assert any(dict(each.constants).get("E", 0) for each in calls) or family in ("qwen3", "qwen2", "gemma2", "regular")


@pytest.mark.usefixtures("_recorded")
@pytest.mark.parametrize("is_invariant", [False, True])
def test_there_is_a_binary_for_all_that_adapters_launch(
    is_invariant: bool, tmp_path: Path, paths: dict[str, Path], known: Any
) -> None:
    adapter = LoRARequest("a", 1, str(make_adapter(paths["deep"], tmp_path / "adapter", LINEAR)))
    with LLM(str(paths["deep"]), device="cuda", enable_lora=True, batch_invariant=is_invariant, **SIZES) as llm:
        for length in (3, 12, 20, 100):
            prompt: Any = {"prompt_token_ids": [5 + i * 7 % 90 for i in range(length)]}
            outputs = llm.generate([prompt], PARAMS[0], use_tqdm=False, lora_request=adapter)
            assert all(each.outputs[0].finish_reason == "length" for each in outputs)
    every, unspecialized, _ = known
    calls = {call_of(name, given, constants, unspecialized[name]) for name, given, constants in LAUNCHED}
    assert calls - every["deep"] == set()
    added = [(each.kernel, dict(each.constants)) for each in calls if ("HAS_ADDEND", True) in each.constants]
    assert any(constants.get("IS_DIVIDED") for _, constants in added)
    assert any(kernel == "linear.chunks_at_once" for kernel, _ in added)


@pytest.mark.parametrize(
    ("dim", "dtype", "shared", "rows"),
    [
        *((128, torch.bfloat16, 100, 64), (256, torch.bfloat16, 100, 32), (256, torch.bfloat16, 164, 64)),
        *((256, torch.float32, 228, 32), (576, torch.bfloat16, 228, 16)),
        *((128, torch.int8, 164, 64), (128, torch.int8, 228, 128)),
    ],
)
def test_prompts_of_large_heads_and_of_codes_have_tiles_that_fit_into_memory_and_registers(
    dim: int, dtype: torch.dtype, shared: int, rows: int
) -> None:
    taken: list[int] = []
    runtime = CudaRuntime(
        launch=lambda kernel, grid, *arguments, **constants: taken.append(constants.get("M", 0)),
        shared_bytes=shared << 10,
    )
    backend = CudaBackend(runtime, dtype)
    cache = torch.zeros(backend.cache_shape(4, 16, 1, dim), dtype=backend.element_type)
    q = torch.zeros(20, 4, dim, dtype=dtype if dtype.is_floating_point else torch.bfloat16)
    backend.run(q, q[:, :1], q[:, :1], cache, AttentionMetadata.build([20], [20], [[1, 2]], 16), Scores(1.0))
    assert taken[-1] == rows


def test_an_archive_has_the_tiles_of_all_gpus_that_run_it(known: Any) -> None:
    """A capability of 8.0 has 164 KiB of shared memory, and one of 8.6 has 100."""
    own, smaller, of_8_0, of_8_9 = known[2]
    assert {call.kernel for call in smaller - own} == {"attention.attend"}
    assert (of_8_0, of_8_9) == (own | smaller, smaller)


def test_binaries_without_room_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"kernel": "attention.attend", "constants": [], "shared": each} for each in (99 << 10, 100 << 10)]
    assert [is_kept(each, 89) for each in lines] == [True, False]
    assert [is_kept(each, 90) for each in lines] == [True, True]
    assert capsys.readouterr().out.count("left out: attention.attend needs 102400 bytes") == 1
