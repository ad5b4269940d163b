"""An engine with other weights, or after a sleep, gives what one that starts with these weights gives, all `==`."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from octavo import LLM, LoRARequest, SamplingParams
from octavo.async_llm import AsyncLLM
from octavo.config.args import EngineArgs
from octavo.config.resolve import configure
from octavo.core.outputs import RequestOutput
from octavo.core.sampling_params import OutputKind
from octavo.engine.llm_engine import LLMEngine
from octavo.errors import ConfigError, InvalidRequest, RequestFailed
from octavo.worker import worker as worker_module
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import edit_tensors, load_oracle, make_checkpoint, to_pytorch_archive
from tests.fakes.vision import image, make_vision_checkpoint
from tests.lora.adapter_folders import LINEAR, make_adapter

PROMPTS = [[7 * i % 100 for i in range(length)] for length in (40, 3, 17)]
DRAWN = SamplingParams(seed=3, max_tokens=24, logprobs=2, ignore_eos=True, n=2)


@pytest.fixture(autouse=True)
def _garbage_is_looked_for_among_new_objects(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleep searches all objects of its process, which are few in one of its own: here it takes 0.3 s."""
    if request.node.originalname != "test_a_core_that_has_frozen_its_objects_gives_the_memory_back_too":
        monkeypatch.setattr(worker_module, "collect_frozen", gc.collect)


def made(family: str, folder: Path, seed: int, **config: Any) -> Path:
    path = make_checkpoint(family, folder / f"{family}-{seed}", seed=seed, vocab_size=300, **config)
    write_byte_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("qwen3", tmp_path_factory.mktemp("old"), 0)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("qwen3", tmp_path_factory.mktemp("new"), 1)


def arguments(path: Path, **args: Any) -> dict[str, Any]:
    given = {"block_size": 4, "num_gpu_blocks_override": 200, "threads": 1, "enable_sleep_mode": True}
    return {"model": str(path), **given, **args}


def opened(path: Path, **args: Any) -> LLM:
    return LLM(**arguments(path, **args))


def results(outputs: list[RequestOutput]) -> list[Any]:
    assert all(each.error is None for each in outputs), [each.error for each in outputs]
    return [each.outputs for each in outputs]


def generated(llm: LLM) -> list[Any]:
    return results(llm.generate(PROMPTS, DRAWN))


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next", "gpt_oss", "deepseek_v3", "gpt2"])
def test_other_weights_give_what_an_engine_that_starts_with_them_gives(family: str, tmp_path: Path) -> None:
    old, new = made(family, tmp_path, 0), made(family, tmp_path, 1)
    with opened(old) as llm, opened(new) as expected:
        before = generated(llm)
        assert before != generated(expected)
        llm.update_weights_from_disk(new)
        assert generated(llm) == generated(expected)
        llm.update_weights_from_disk(str(old))
        assert generated(llm) == before


@pytest.mark.parametrize(
    "args",
    [
        {"quantization": "int8"},
        {"device": "reference", "kv_cache_dtype": "int8"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
)
def test_so_does_any_engine(args: dict[str, Any], old: Path, new: Path) -> None:
    with opened(old, **args) as llm:
        before = generated(llm)
        llm.sleep()
        llm.update_weights_from_disk(new)
        after = generated(llm)
        llm.update_weights_from_disk(old)
        assert generated(llm) == before
    # several ranks give the results of one
    args = {name: value for name, value in args.items() if not name.endswith("parallel_size")}
    with opened(new, **args) as expected:
        assert after == generated(expected)


def test_a_model_whose_layers_differ_in_the_library_s_config_reads_images_of_other_weights(tmp_path: Path) -> None:
    old, new = (make_vision_checkpoint("gemma4", tmp_path / name) for name in ("old", "new"))
    tensors = load_file(new / "model.safetensors")
    save_file({name: each.flip(0) for name, each in tensors.items()}, new / "model.safetensors")
    prompt = {"prompt": "w1 <image> w2", "multi_modal_data": {"image": image(0)}}
    with opened(old, block_size=16) as llm, opened(new, block_size=16) as expected:
        assert results(llm.generate([prompt], DRAWN)) != results(expected.generate([prompt], DRAWN))
        llm.update_weights_from_disk(new)
        assert results(llm.generate([prompt], DRAWN)) == results(expected.generate([prompt], DRAWN))


@pytest.mark.parametrize(
    ("meanwhile", "mode"),
    [
        *(("nothing", "recompute"), ("sleep", "swap"), ("pause", "recompute")),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (("nothing", "swap"), ("sleep", "recompute"), ("pause", "swap"))
        ),
    ],
)
def test_running_requests_go_on_from_their_tokens(mode: str, meanwhile: str, old: Path, new: Path) -> None:
    args = {"num_gpu_blocks_override": 20, "preemption_mode": mode, "max_model_len": 72}
    params = SamplingParams(seed=3, max_tokens=30, logprobs=2, ignore_eos=True, output_kind=OutputKind.CUMULATIVE)
    engine = LLMEngine.from_args(EngineArgs(**arguments(old, **args)))
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    found: dict[str, RequestOutput] = {}
    for _ in range(16):
        found.update((each.request_id, each) for each in engine.step())
    assert engine.stats.num_preemptions > 0
    if meanwhile == "sleep":
        engine.sleep()
        assert engine.step() == []
    if meanwhile == "pause":
        engine.call("pause", "keep", False)
        assert engine.step() == []
    engine.update_weights_from_disk(new)
    if meanwhile == "pause":
        assert engine.step() == []
        engine.call("resume")
    cut = {name: list(each.outputs[0].token_ids) for name, each in found.items()}
    while engine.has_unfinished_requests():
        found.update((each.request_id, each) for each in engine.step())
    engine.shutdown()
    with opened(new) as llm:
        for number, prompt in enumerate(PROMPTS):
            output, before = found[str(number)].outputs[0], cut.get(str(number), [])
            assert list(output.token_ids[: len(before)]) == before
            logprobs = [{token: each.logprob for token, each in one.items()} for one in output.logprobs]
            assert (output.token_ids[len(before) :], logprobs[len(before) :]) == resumed(llm, prompt, before, params)


def resumed(llm: LLM, prompt: list[int], drawn: list[int], params: SamplingParams) -> Any:
    """What an engine draws behind tokens that another one has drawn: as after the death of a core."""
    from octavo.core.prompt import Prompt
    from octavo.core.resume import ResumedSequence

    request = llm.engine.input.process("again", Prompt.read({"prompt_token_ids": prompt}), params, None)
    if drawn:
        request.resumed = (ResumedSequence(index=0, token_ids=drawn),)
    core, token_ids, logprobs = llm.engine.core, [], []
    core.add_request(request)
    while core.has_unfinished():
        for output in core.step().outputs:
            assert output.error is None
            for delta in output.deltas:
                token_ids += delta.token_ids
                logprobs += delta.logprobs
    return token_ids, [
        {each.token_id: each.logprob, **dict(zip(each.top_ids, each.top_logprobs, strict=True))} for each in logprobs
    ]


def test_a_sleep_gives_memory_back_and_changes_nothing(old: Path) -> None:
    with opened(old) as llm:
        worker: Any = llm.engine.core.executor
        before = generated(llm)
        kept = [weakref.ref(each) for each in (worker._loaded.loaded, worker._runner.cache, worker._runner)]
        llm.sleep(level=2)
        gc.collect()
        assert [each() for each in kept] == [None] * 3
        assert llm.is_sleeping()
        with pytest.raises(ConfigError, match="a request needs the weights, and the engine sleeps"):
            llm.generate(PROMPTS)
        with pytest.raises(ConfigError, match="time_steps needs the weights"):
            llm.engine.call("time_steps", True)
        llm.engine.call("release_memory")
        llm.sleep()
        llm.wake_up(tags=["weights"])
        llm.wake_up(["kv_cache"])
        assert generated(llm) == before


def test_a_sleep_at_level_0_is_a_pause_and_modes_end_requests_or_keep_them(old: Path) -> None:
    with opened(old) as llm:
        before, engine = generated(llm), llm.engine
        params = SamplingParams(seed=3, max_tokens=8, ignore_eos=True)
        llm.sleep(level=0)
        with pytest.raises(ConfigError, match="a request would wait: the engine is paused"):
            llm.generate(PROMPTS)
        assert not llm.is_sleeping()
        llm.wake_up(["scheduling"])
        for level in (0, 1):
            engine.add_request("kept", {"prompt_token_ids": PROMPTS[0]}, params)
            engine.step()
            llm.sleep(level)
            assert engine.step() == []
            llm.sleep(level, "abort")
            [ended] = engine.step()
            assert (ended.finished, ended.outputs[0].finish_reason) == (True, "abort")
            assert not engine.has_unfinished_requests()
            llm.wake_up()
            assert generated(llm) == before
        for mode, said in (("wait", "call step until nothing is open"), ("stop", "must be abort, wait or keep")):
            with pytest.raises(InvalidRequest, match=said):
                llm.sleep(mode=mode)
        assert generated(llm) == before


def test_adapters_are_read_again(tmp_path: Path) -> None:
    old, new = (made("llama", tmp_path, seed) for seed in (0, 1))
    adapters = [make_adapter(old, tmp_path / f"adapter-{seed}", LINEAR, seed=seed) for seed in (1, 2)]
    named = [LoRARequest(f"a{number}", number, str(each)) for number, each in enumerate(adapters, 1)]
    args: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2}

    def answers(llm: LLM) -> list[Any]:
        return [results(llm.generate(PROMPTS, DRAWN, lora_request=each)) for each in (*named, None)]

    with opened(old, **args) as llm, opened(new, **args) as expected:
        before = answers(llm)
        assert len({str(each) for each in before}) == 3
        llm.sleep()
        with pytest.raises(ConfigError, match="read_adapter needs the weights"):
            llm.engine.call("read_adapter", "a1", 1, str(adapters[0]), "digest")
        llm.wake_up()
        assert answers(llm) == before
        llm.update_weights_from_disk(new)
        assert answers(llm) == answers(expected)


def resident_mib() -> float:
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="this system does not say how much memory it has given"
)
def test_a_core_that_has_frozen_its_objects_gives_the_memory_back_too(tmp_path: Path) -> None:
    path = write_byte_tokenizer(make_checkpoint("qwen3", tmp_path, vocab_size=60_000, hidden_size=256))
    with opened(path) as llm:
        before = generated(llm)
        gc.freeze()
        awake = resident_mib()
        llm.sleep()
        asleep = resident_mib()
        for _ in range(3):
            llm.update_weights_from_disk(path)
        assert generated(llm) == before
        assert awake - asleep > 50, "the table of embeddings alone has 59 MiB"
        assert resident_mib() - awake < 30


def test_weights_come_from_memory(old: Path, new: Path) -> None:
    with opened(old) as llm, opened(new) as expected:
        tensors = load_oracle(new).state_dict()
        llm.update_weights_from_tensor((name, tensor) for name, tensor in tensors.items())
        assert generated(llm) == generated(expected)
        llm.update_weights_from_tensor(tensors)
        assert generated(llm) == generated(expected)
        folder = llm.engine._weight_folder
        assert folder is not None
        llm.sleep()
        llm.wake_up()
        assert generated(llm) == generated(expected)
        llm.update_weights_from_disk(old)
        gc.collect()
        assert not folder.path.exists()
        with pytest.raises(ConfigError, match="norm.weight is missing"):
            llm.update_weights_from_tensor((name, each) for name, each in tensors.items() if "model.norm" not in name)


def test_a_path_means_the_same_until_the_next_update(
    old: Path, new: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "octavo")
    monkeypatch.setenv("HOME", str(new.parent))
    with opened(old) as llm:
        llm.update_weights_from_disk(f"~/{new.name}")
        monkeypatch.chdir(new.parent)
        llm.update_weights_from_disk(new.name)
        after = generated(llm)
        monkeypatch.chdir("/")
        llm.sleep()
        llm.wake_up()
        assert generated(llm) == after
        with pytest.raises(InvalidRequest, match="model_path is empty"):
            llm.update_weights_from_disk("")
        with pytest.raises(ConfigError, match=r"~nobody-there/weights: does not exist"):
            llm.update_weights_from_disk("~nobody-there/weights")
    assert "the engine sleeps" in caplog.text
    assert f"computes with the weights of {new}" in caplog.text


def damaged(path: Path) -> Path:
    (path / "model.safetensors").write_bytes(b"none")
    return path


def without_norm(path: Path, *, is_archive: bool) -> Path:
    edit_tensors(path, remove=("model.norm.weight",))
    if is_archive:
        to_pytorch_archive(path)
    return path


def emptied(path: Path) -> Path:
    save_file({}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda folder: folder / "none", "does not exist"),
        (lambda folder: folder, r"has no config\.json"),
        (lambda folder: made("qwen3", folder, 1, num_hidden_layers=3), "its num_layers is 3, that of this engine 2"),
        (
            lambda folder: made("llama", folder, 1),
            "has another model: its family is LlamaForCausalLM, that of this engine Qwen3ForCausalLM",
        ),
        (lambda folder: damaged(made("qwen3", folder, 1)), r"model\.safetensors"),
        (lambda folder: without_norm(made("qwen3", folder, 1), is_archive=False), r"norm\.weight is missing"),
        (lambda folder: without_norm(made("qwen3", folder, 1), is_archive=True), r"norm\.weight is missing"),
        (lambda folder: emptied(made("qwen3", folder, 1)), "are missing, which Qwen3ForCausalLM needs"),
    ],
)
def test_unfit_weights_change_nothing(other: Callable[[Path], Path], said: str, old: Path, tmp_path: Path) -> None:
    with opened(old) as llm:
        before = generated(llm)
        with pytest.raises(ConfigError, match=said):
            llm.update_weights_from_disk(other(tmp_path))
        assert not llm.is_sleeping()
        assert generated(llm) == before


def test_weights_that_cannot_be_read_leave_the_engine_asleep(tmp_path: Path, old: Path) -> None:
    new = made("qwen3", tmp_path, 1)
    file = new / "model.safetensors"
    content = file.read_bytes()
    with opened(old) as llm:
        before = generated(llm)
        llm.sleep()
        file.write_bytes(content[:-100])
        with pytest.raises(ConfigError, match=r"model\.safetensors"):
            llm.update_weights_from_disk(new)
        assert llm.is_sleeping()
        llm.wake_up()
        assert generated(llm) == before


@pytest.mark.parametrize(
    "split", [{"tensor_parallel_size": 2}, pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.long)]
)
def test_ranks_keep_the_same_weights_when_one_cannot_open_or_read_others(
    split: dict[str, int], tmp_path: Path, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, incomplete = made("qwen3", tmp_path, 1), made("qwen3", tmp_path / "incomplete", 1)
    tensors = load_file(incomplete / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]  # which the first of two stages does not read
    save_file(tensors, incomplete / "model.safetensors")
    with opened(old, **split) as llm:
        before = generated(llm)
        with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
            llm.update_weights_from_disk(incomplete)
        llm.sleep()
        llm.wake_up()
        assert generated(llm) == before
        executor = llm.engine.core.executor
        call, file = executor.call, new / "model.safetensors"

        def lose(method: str, *arguments: Any) -> list[Any]:
            if method == "load_again" and file.exists():
                file.unlink()
            return call(method, *arguments)

        monkeypatch.setattr(executor, "call", lose)
        with pytest.raises(ConfigError, match=r"model\.safetensors.*the engine sleeps until it has loaded weights"):
            llm.update_weights_from_disk(new)
        assert llm.is_sleeping()
        llm.update_weights_from_disk(old)
        assert generated(llm) == before


def test_without_the_mode_an_engine_keeps_its_weights(old: Path) -> None:
    with opened(old, enable_sleep_mode=False) as llm:
        llm.wake_up()
        for call in (llm.sleep, lambda: llm.update_weights_from_disk(old)):
            with pytest.raises(ConfigError, match="start it with enable_sleep_mode"):
                call()
    with opened(old) as llm:
        with pytest.raises(InvalidRequest, match="level is 3, must be 0 .a pause., or 1 or 2"):
            llm.sleep(3)
        with pytest.raises(InvalidRequest, match="tags has 'all', expected weights, kv_cache or scheduling"):
            llm.wake_up(["all"])


@pytest.mark.parametrize(
    "args",
    [{"kv_disk": "here"}, {"role": "decode"}, {"record_trace": "here"}, {"executor": "ray"}],
)
def test_what_keeps_weights_elsewhere_rules_the_mode_out(args: dict[str, Any], old: Path) -> None:
    with pytest.raises(ConfigError, match="enable_sleep_mode is set, and"):
        configure(EngineArgs(**arguments(old, **args)))


@pytest.mark.anyio
@pytest.mark.slow
async def test_streams_go_on_with_other_weights_and_a_core_that_is_started_again_has_them(
    old: Path, new: Path, tmp_path: Path
) -> None:
    first = shutil.copytree(old, tmp_path / "first")
    llm = await AsyncLLM.start(EngineArgs(**arguments(first)))
    try:
        with pytest.raises(RequestFailed, match="does not exist"):
            await llm.update_weights_from_disk(str(old / "none"))
        tasks = [asyncio.create_task(stream(llm, number, 100)) for number in range(4)]
        while llm.stats.num_generated_tokens < 40:
            await asyncio.sleep(0.001)
        await llm.sleep()
        assert await llm.is_sleeping()
        late = asyncio.create_task(stream(llm, 9, 20))
        await asyncio.sleep(0.1)
        assert not any(each.done() for each in (*tasks, late))
        await llm.update_weights_from_disk(str(new))
        assert not await llm.is_sleeping()
        assert [len(each) for each in await asyncio.gather(*tasks, late)] == [100] * 4 + [20]
        expected = await stream(llm, 5, 30)
        shutil.rmtree(first)
        os.kill(llm._client._replicas[0].client._core.process.pid, signal.SIGKILL)  # type: ignore[union-attr]
        assert await stream(llm, 5, 30) == expected
    finally:
        await llm.shutdown()
    with opened(new) as again:
        params = SamplingParams(seed=5, max_tokens=30, ignore_eos=True)
        assert list(again.generate(PROMPTS[0], params)[0].outputs[0].token_ids) == expected


@pytest.mark.anyio
@pytest.mark.slow
async def test_replicas_take_weights_from_memory_which_is_given_back(old: Path, new: Path) -> None:
    tensors = load_oracle(new).state_dict()
    llm = await AsyncLLM.start(EngineArgs(**arguments(old, data_parallel_size=2)))
    try:
        before = await stream(llm, 5, 30)
        await llm.update_weights_from_tensor(tensors.items())
        folder = llm._updates._in_use
        assert folder is not None
        after = [await stream(llm, 5, 30) for _ in range(2)]
        assert after[0] == after[1] != before
        with pytest.raises(RequestFailed, match="norm.weight is missing"):
            await llm.update_weights_from_tensor(
                {name: each for name, each in tensors.items() if "model.norm" not in name}
            )
        assert llm._updates._in_use is folder
        await llm.sleep()
        await llm.wake_up()
        assert await stream(llm, 5, 30) == after[0]
        await llm.update_weights_from_disk(old)
        assert not folder.path.exists()
        assert await stream(llm, 5, 30) == before
        await llm.update_weights_from_tensor(tensors)
        folder = llm._updates._in_use
        assert folder is not None
    finally:
        await llm.shutdown()
    assert not folder.path.exists()


async def stream(llm: AsyncLLM, seed: int, count: int) -> list[int]:
    params = SamplingParams(seed=seed, max_tokens=count, ignore_eos=True, output_kind=OutputKind.DELTA)
    token_ids: list[int] = []
    async for output in llm.generate({"prompt_token_ids": PROMPTS[0]}, params):
        assert output.error is None
        token_ids += output.outputs[0].token_ids
    return token_ids
