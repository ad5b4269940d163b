"""The whole engine on the device cuda with its memory apart: nothing of it meets tensors of the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

import triton.runtime.interpreter as interpreter

from octavo import LLM, LoRARequest, SamplingParams
from octavo.config.schema import DeviceConfig
from octavo.core.media import MediaInput
from octavo.core.pooling import PooledPrompt, PoolingParams
from octavo.devices import DEVICES
from octavo.devices.cuda.runtime import Launcher, launch_by_triton
from octavo.devices.device import open_device
from octavo.devices.reference.attention import ReferenceBackend
from octavo.devices.token_store import DeviceTokenStore, HostTokenStore
from octavo.errors import CheckpointError
from octavo.layers.rope import Rope
from octavo.models.packed_folder import PackedFolder
from octavo.ops.coded import example_specs, example_weight
from octavo.worker.batch.input_batch import BatchRow, InputBatchBuilder
from octavo.worker.batch.sequence_state import Sequences
from octavo.worker.prompt_encodings import PromptEncodings
from octavo.worker.start.opening import proving_parts
from tests.conformance.runtimes import PLATFORM
from tests.devices.cuda.apart import ApartMode, ApartTensor, MixedDevices, open_apart
from tests.devices.cuda.interpreted import InterpretedCuda, RepeatedCalls
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.draft_heads import HIDDEN, WIDTH, write_head
from tests.fakes.proposer import take_all
from tests.fakes.strangers import make_stranger
from tests.fakes.vector_models import save, write_modules
from tests.fakes.vision import image, make_vision_checkpoint
from tests.lora.adapter_folders import LINEAR, make_adapter
from tests.models.test_encoders import DEBERTA
from tests.worker.prefix_model import KEYS_AND_VALUES, new_sequence, row

SIZES: Any = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 32, "max_num_seqs": 4}
PROMPTS: Any = [{"prompt_token_ids": [5 + i * 7 % 90 for i in range(length)]} for length in (3, 18, 9)]
BY_DISTANCE: dict[str, dict[str, Any]] = {"MPNetModel": {}, "DebertaV2Model": DEBERTA}
"""Encoders whose scores depend on distances."""
DRAWN: dict[str, Any] = {"max_tokens": 4, "temperature": 0.9, "seed": 1, "logprobs": 2, "ignore_eos": True}


def launch_apart(kernel: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel, which can read none of the host's memory."""
    of_host = [
        place for place, each in enumerate(arguments) if isinstance(each, Tensor) != isinstance(each, ApartTensor)
    ]
    if of_host:
        raise MixedDevices(f"{kernel}: arguments {of_host} are tensors of the host")
    launch_by_triton(kernel, grid, *arguments, **constants)


class ApartCuda(InterpretedCuda):
    """Everything of the device but the GPU: its memory is apart, Triton interprets."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.torch_device = torch.device("apart", 0)

    def launcher(self, is_invariant: bool) -> Launcher:
        return launch_apart


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    open_apart()
    unwrap: Any = interpreter._unwrap_tensor
    monkeypatch.setattr(
        interpreter, "_unwrap_tensor", lambda each: each.inside if isinstance(each, ApartTensor) else unwrap(each)
    )
    monkeypatch.setitem(DEVICES, "cuda", f"{__name__}.ApartCuda")
    yield
    torch._C._set_only_lift_cpu_tensors(False)


def outputs(path: Path, device: str, prompts: Any = PROMPTS, asked: Any = None, **args: Any) -> list[Any]:
    params = SamplingParams(**{**DRAWN, **(asked or {})})
    with LLM(str(path), device=device, **{**SIZES, **args}) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
    assert not any(each.error for each in found), found
    return [[(each.token_ids, each.text) for each in output.outputs] for output in found]


def same_as_the_reference(path: Path, prompts: Any = PROMPTS, asked: Any = None, **args: Any) -> None:
    expected = outputs(path, "reference", prompts, asked, **args)
    with ApartMode():
        assert outputs(path, "cuda", prompts, asked, **args) == expected


def test_tensors_of_both_memories_do_not_mix() -> None:
    with ApartMode():
        ours = torch.ones(3, device="apart:0")
        assert (ours + 1).tolist() == [2, 2, 2]
        assert isinstance(ours.to("cpu") + torch.ones(3), torch.Tensor)
        for mix in (lambda: ours + torch.ones(3), lambda: torch.cat([ours, torch.ones(2)]), ours.numpy):
            with pytest.raises(MixedDevices):
                mix()


def test_codes_on_the_device_are_checked_there() -> None:
    spec = next(each for each in example_specs() if each.has_order)
    weight = example_weight(spec, 18, 80, torch.Generator().manual_seed(3))
    with ApartMode():
        there = {name: tensor.to("apart:0") for name, tensor in weight.items()}
        spec.check(there)
        with pytest.raises(CheckpointError, match="no permutation"):
            spec.check({**there, "order": torch.zeros(80, dtype=torch.int32, device="apart:0")})


def test_what_proves_a_class_computes_where_its_tensors_are() -> None:
    """They are in the memory of the host."""
    ops, attention = proving_parts(open_device(DeviceConfig(device="cuda", threads=1), PLATFORM))
    assert {each.implementation for each in ops.choices} == {"reference"}
    assert isinstance(attention(16), ReferenceBackend)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(
        make_checkpoint("qwen3", tmp_path_factory.mktemp("m") / "model", vocab_size=300, num_hidden_layers=1)
    )


def test_weights_on_the_device_are_neither_kept_packed_nor_mapped(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = PackedFolder.close
    monkeypatch.setattr(PackedFolder, "close", lambda self, _=0.0: close(self, 60.0))  # it stops what is written
    with ApartMode():
        outputs(path, "cuda", PROMPTS[:1], packed_cache=str(tmp_path))
    assert not list(tmp_path.glob("*.packed"))
    same_as_the_reference(path, PROMPTS[:1], packed_cache=str(tmp_path))
    assert len(list(tmp_path.glob("*.packed"))) == 1


ASKED: dict[str, Any] = {
    "filters": ({"top_k": 20, "top_p": 0.9, "min_p": 0.01}, {}),
    "processors": (
        {
            "presence_penalty": 0.5,
            "repetition_penalty": 1.1,
            "min_tokens": 3,
            "stop_token_ids": [7],
            "logit_bias": {5: 2},
        },
        {},
    ),
    "swaps": pytest.param(
        {"max_tokens": 20},
        {"num_gpu_blocks_override": 5, "preemption_mode": "swap", "swap_space": 1 << 20},
        marks=pytest.mark.long,
    ),
    "int8": pytest.param({}, {"quantization": "int8"}, marks=pytest.mark.long),
    "log-probabilities of prompts": pytest.param(
        {"prompt_logprobs": 3, "n": 2}, {"max_num_batched_tokens": 5}, marks=pytest.mark.long
    ),
    "a form": ({"structured_outputs": {"choice": ["hello", "bye"]}, "ignore_eos": False, "max_tokens": 9}, {}),
    "beams": pytest.param(
        {"use_beam_search": True, "best_of": 3, "temperature": 0, "logprobs": None, "seed": None},
        {},
        marks=pytest.mark.long,
    ),
    "int4": pytest.param({}, {"quantization": "int4", "activation_bits": 16}, marks=pytest.mark.long),
    "fp8 keys": pytest.param({}, {"kv_cache_dtype": "fp8"}, marks=pytest.mark.long),
}


@pytest.mark.parametrize(("asked", "args"), ASKED.values(), ids=ASKED.keys())
def test_what_is_asked_for_runs_on_the_device(path: Path, asked: dict[str, Any], args: dict[str, Any]) -> None:
    same_as_the_reference(path, asked=asked, **args)


@pytest.mark.long
@pytest.mark.parametrize(
    "family",
    [
        *("gemma3", "gpt_oss", "deepseek_v3", "qwen3_moe", "qwen3_5", "falcon_h1", "lfm2", "opt", "granitemoe"),
        *("dbrx", "gemma3n", "kimi_linear", "llama4", "longcat_flash", "mamba", "minimax", "phimoe", "step3p5"),
    ],
)
def test_families_run_on_the_device_and_are_captured(family: str, tmp_path: Path) -> None:
    before = RepeatedCalls.num_replays
    same_as_the_reference(write_byte_tokenizer(make_checkpoint(family, tmp_path / "model", vocab_size=300)))
    assert RepeatedCalls.num_replays > before


@pytest.mark.long
def test_a_class_of_transformers_runs_on_the_device_and_is_captured(tmp_path: Path) -> None:
    """Its table of rows has a factor."""
    before = RepeatedCalls.num_replays
    same_as_the_reference(write_byte_tokenizer(make_stranger("biogpt", tmp_path / "model")))
    assert RepeatedCalls.num_replays > before


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.long)])
def test_adapters_are_on_the_device(family: str, tmp_path: Path) -> None:
    path = write_byte_tokenizer(make_checkpoint(family, tmp_path / "model", vocab_size=300))
    adapter = make_adapter(path, tmp_path / "adapter", LINEAR[:4], rank=6, seed=1)
    lora = [LoRARequest("a", 1, str(adapter)), None, LoRARequest("a", 1, str(adapter))]
    found = {}
    for device in ("reference", "cuda"):
        with (
            ApartMode() if device == "cuda" else nullcontext(),
            LLM(str(path), device=device, enable_lora=True, **SIZES) as llm,
        ):
            outputs = llm.generate(PROMPTS, SamplingParams(**DRAWN), use_tqdm=False, lora_request=lora)
        assert not any(each.error for each in outputs), outputs
        found[device] = [each.outputs[0].token_ids for each in outputs]
    assert found["cuda"] == found["reference"]


def test_steps_that_are_launched_wait_for_no_copy_to_the_device(path: Path, tmp_path: Path) -> None:
    adapter = LoRARequest("a", 1, str(make_adapter(path, tmp_path / "adapter", LINEAR[:1], rank=6, seed=1)))
    tight = {"max_model_len": 48, "num_gpu_blocks_override": 3, "preemption_mode": "swap", "swap_space": 1 << 20}
    prompts: Any = [{"prompt_token_ids": [first + i for i in range(14)]} for first in (5, 40)]
    with ApartMode() as mode, LLM(str(path), device="cuda", enable_lora=True, **SIZES | tight) as llm:
        for _ in range(2):  # the first time, what steps read of adapters is made
            del mode.waits[:]
            asked = SamplingParams(max_tokens=4, temperature=0.9, seed=1, ignore_eos=True)
            llm.generate(prompts, asked, use_tqdm=False, lora_request=[adapter, None])
        assert llm.engine.core.stats().num_preemptions_by_swap > 1
    assert not mode.waits


def test_steps_with_images_and_pairs_wait_for_no_copy_to_the_device() -> None:
    """The host launches the model while what encodes the images still runs."""

    def tensors(store: HostTokenStore, device: torch.device) -> list[Tensor]:
        sequences = Sequences(store)
        # four tokens of an image that see each other, in two rows of two; the second text of a pair
        spans, pair = ((2, 4),), PooledPrompt(PoolingParams(task="score"), second_start=3)
        image = MediaInput("image", b"digest", spans, 4, {})
        shown: Any = {"media": (image,), "grids": ((2, 2, 2),), "whole_spans": spans}
        sequences.add(new_sequence(1, range(10, 18), [3, 1], **shown))
        sequences.add(new_sequence(2, range(20, 26), [2, 4], pooled=pair))
        builder = InputBatchBuilder([], sequences, KEYS_AND_VALUES, block_size=4, max_num_tokens=16, device=device)

        def encode(*_: Any) -> Tensor:
            return torch.ones(4, 5, device=device)

        encodings = PromptEncodings(encode, encode, 9, device)
        rows = [BatchRow(row(1, 0, 8), sequences[1]), BatchRow(row(2, 0, 6), sequences[2])]
        batch = builder.build(rows, *encodings.read(rows, sequences.unfinished_media))
        turned, spanning, types, embeddings = batch.rope_positions, batch.spans, batch.token_types, batch.embeddings
        assert turned is not None
        assert spanning is not None
        assert types is not None
        assert embeddings is not None
        table = torch.arange(128, dtype=torch.float32, device=device).view(16, 8)
        (group,), rope = spanning.attention, Rope(8, 10.0, axes=(0, 1, 2, 0))
        of_spans = (spanning.token_indices, group.query_starts, group.sequence_lengths, group.block_tables)
        return [batch.positions, turned, rope.table_of(table, turned), types, embeddings.token_indices, *of_spans]

    expected = tensors(HostTokenStore(), torch.device("cpu"))
    with ApartMode() as mode:
        found = tensors(DeviceTokenStore(torch.device("apart", 0)), torch.device("apart", 0))
    assert not mode.waits
    for there, here in zip(found, expected, strict=True):
        assert isinstance(there, ApartTensor)
        assert (there.dtype, there.tolist()) == (here.dtype, here.tolist())


@pytest.mark.long
@pytest.mark.parametrize("method", ["eagle3", "draft_model", "eagle"])
def test_drafts_are_made_on_the_device(method: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 300, "hidden_size": HIDDEN, "intermediate_size": WIDTH}
    path = write_byte_tokenizer(make_checkpoint("llama", tmp_path / "model", num_hidden_layers=8, **sizes))
    draft = path
    if method != "draft_model":
        draft = write_head(tmp_path / "head", 300, is_third=method == "eagle3", draft_vocab=100)
    speculates = {"method": method, "model": str(draft), "num_speculative_tokens": 2}
    asked, prompts = {"logprobs": None, "max_tokens": 5}, PROMPTS[:2]
    expected = outputs(path, "reference", prompts, asked)
    with (
        ApartMode(),
        LLM(str(path), device="cuda", batch_invariant=True, speculative_config=speculates, **SIZES) as llm,
    ):
        take_all(llm.engine.core, llm.config.speculative)
        found = llm.generate(prompts, SamplingParams(**DRAWN | asked), use_tqdm=False)
        assert llm.engine.core.stats().num_draft_tokens > 0
    assert [[(each.token_ids, each.text) for each in output.outputs] for output in found] == expected


@pytest.mark.long
@pytest.mark.parametrize("family", ["gemma3", "granite4_vision", "llava", "qwen2_vl"])
def test_images_are_encoded_on_the_device(family: str, tmp_path: Path) -> None:
    prompts = [{"prompt": "w1 <image> w2", "multi_modal_data": {"image": image(0)}}, "w1 w2"]
    sizes = {"max_model_len": 256, "num_gpu_blocks_override": 64, "max_num_batched_tokens": 512}
    same_as_the_reference(make_vision_checkpoint(family, tmp_path), prompts, **sizes)


@pytest.mark.parametrize(
    ("model", "config"),
    [("BertModel", {}), *(pytest.param(*each, marks=pytest.mark.long) for each in BY_DISTANCE.items())],
)
def test_encoders_run_on_the_device(model: str, config: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, model, **config)
    write_modules(tmp_path, "mean")
    texts = ["w1 w2", "w3 w4 w5"]

    def vectors(device: str) -> torch.Tensor:
        with LLM(str(tmp_path), device=device, dtype="float32") as llm:
            return torch.tensor([each.outputs.embedding for each in llm.embed(texts)], device="cpu")

    expected = vectors("reference")
    with ApartMode():
        found = vectors("cuda")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
