"""Requests with adapters get the bits that they get alone: tokens and log-probabilities, all `==`."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, LoRARequest, SamplingParams
from octavo.cli.main import main
from octavo.core.outputs import RequestOutput
from tests.e2e.test_whisper import heard
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.rank_threads import llm_of_ranks
from tests.fakes.vision import image, make_vision_checkpoint
from tests.fakes.whisper import make_whisper
from tests.lora.adapter_folders import ATTENTION, LINEAR, make_adapter, merge

PROMPTS = [[7 * i % 300 for i in range(length)] for length in (40, 3, 17)]
NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    make_checkpoint("llama", path, vocab_size=300)
    write_byte_tokenizer(path)
    for seed, name in enumerate(NAMES, 1):
        make_adapter(path, path / name, LINEAR, rank=4 * seed, seed=seed)
    return path


def named(base: Path, name: str | None) -> LoRARequest | None:
    return None if name is None else LoRARequest(name, 1 + NAMES.index(name), str(base / name))


def opened(base: Path, **args: Any) -> LLM:
    given = {"block_size": 4, "num_gpu_blocks_override": 400, "threads": 1, "dtype": "float32", "enable_lora": True}
    return LLM(model=str(base), **given | args)


def params_of(number: int) -> SamplingParams:
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 3}, {"seed": 4, "n": 2}]
    return SamplingParams(max_tokens=12, logprobs=2, ignore_eos=True, **kinds[number % 3])


def texts(outputs: list[RequestOutput]) -> list[Any]:
    assert all(each.error is None for each in outputs), [each.error for each in outputs]
    return [each.outputs for each in outputs]


ASKED = [(prompt, name) for name in (*NAMES, None) for prompt in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def alone(base: Path) -> Iterator[list[Any]]:
    """Each request by itself, in an engine with one slot, which its adapters have in turn."""
    with opened(base, max_loras=1) as llm:
        turns = sorted(range(len(ASKED)), key=lambda number: ASKED[number][0])  # another adapter each time
        found = {number: one(llm, base, number) for number in turns}
        assert {number: one(llm, base, number) for number in turns} == found
        yield [found[number] for number in range(len(ASKED))]


def one(llm: LLM, base: Path, number: int) -> Any:
    prompt, name = ASKED[number]
    return texts(llm.generate([PROMPTS[prompt]], params_of(prompt), lora_request=named(base, name)))[0]


def together(llm: LLM, base: Path) -> list[Any]:
    return texts(
        llm.generate(
            [PROMPTS[prompt] for prompt, _ in ASKED],
            [params_of(prompt) for prompt, _ in ASKED],
            lora_request=[named(base, name) for _, name in ASKED],
        )
    )


def test_adapters_change_what_is_generated(alone: list[Any]) -> None:
    assert len({tuple(alone[number][0].token_ids) for number, (prompt, _) in enumerate(ASKED) if prompt == 0}) == 4


@pytest.mark.parametrize(
    "args",
    [
        {"max_loras": 3},
        {"max_loras": 2, "max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"max_loras": 1, "enable_prefix_caching": False},
        {"max_loras": 3, "num_gpu_blocks_override": 40, "preemption_mode": "recompute"},
        {"max_loras": 2, "num_gpu_blocks_override": 40, "preemption_mode": "swap", "scheduling_policy": "prefix-match"},
    ],
    ids=str,
)
def test_requests_together_get_what_they_get_alone(base: Path, alone: list[Any], args: dict[str, Any]) -> None:
    with opened(base, **args) as llm:
        for _ in range(2):
            assert together(llm, base) == alone


def test_prefixes_are_found_for_the_same_adapter_alone_until_its_files_change(base: Path, tmp_path: Path) -> None:
    def cached(llm: LLM, adapter: LoRARequest | None) -> tuple[int, Any]:
        [output] = llm.generate([PROMPTS[0]], params_of(0), lora_request=adapter)
        assert output.error is None, output.error
        return output.num_cached_tokens, output.outputs

    folder = make_adapter(base, tmp_path / "new", LINEAR, seed=5)
    new = LoRARequest("new", 9, str(folder))
    with opened(base, max_loras=2) as llm:
        num_cached, first = cached(llm, new)
        assert num_cached == 0
        assert [cached(llm, each)[0] for each in (None, named(base, "a"))] == [0, 0]
        again, second = cached(llm, new)
        assert again > 30
        assert second == first
        make_adapter(base, folder, LINEAR, seed=6)
        num_cached, other = cached(llm, new)
        assert num_cached == 0
        assert other != first
        make_adapter(base, folder, LINEAR, seed=5)
        assert cached(llm, new) == (again, first)


def test_adapters_that_cannot_be_used_end_their_requests_alone(base: Path, alone: list[Any], tmp_path: Path) -> None:
    wide = make_adapter(base, tmp_path / "wide", LINEAR, rank=32)
    with opened(base, max_loras=2, max_lora_rank=16) as llm:
        adapters = [named(base, "a"), LoRARequest("wide", 8, str(wide)), None, LoRARequest("gone", 9, str(tmp_path))]
        first, wide_one, plain, gone = llm.generate([PROMPTS[0]] * 4, params_of(0), lora_request=adapters)
        assert [first.outputs, plain.outputs] == [alone[0], alone[9]]
        assert wide_one.error is not None
        assert wide_one.error.code == "adapter_unusable"
        assert "rank 32, max_lora_rank is 16" in wide_one.error.message
        assert gone.error is not None
        assert gone.error.field == "lora_path"


def test_the_command_line_uses_an_adapter(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", str(base), "once", "--max-tokens", "12", "--temperature", "0", "--num-gpu-blocks-override", "40"]
    texts = set()
    for more in ([], ["--lora", str(base / "a")]):
        assert main([*words, *more]) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 2


def test_a_conversation_uses_an_adapter(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["chat", str(base), "--max-tokens", "12", "--temperature", "0", "--num-gpu-blocks-override", "40"]
    texts = set()
    for more in ([], ["--lora", str(base / "a")]):
        monkeypatch.setattr("sys.stdin", io.StringIO("once\n"))
        assert main([*words, "--no-history", *more]) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 2


def test_a_conversation_with_a_server_names_its_adapter_by_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9", "--lora", "x"]) == 1
    assert "lora has no effect with url" in capsys.readouterr().err


def test_an_engine_without_adapters_names_the_argument(base: Path) -> None:
    with opened(base, enable_lora=False) as llm:
        [output] = llm.generate([PROMPTS[1]], params_of(0), lora_request=named(base, "a"))
        assert output.error is not None
        assert "enable_lora" in output.error.message


READERS: dict[str, tuple[tuple[str, ...], str]] = {
    "ernie4_5_vl": (("q_proj", "o_proj"), "model.layers"),
    "mllama": (LINEAR, "language_model"),
    "whisper": (("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"), "decoder"),
}
"""Families whose layers read what an encoder makes through caches, or compute tokens of images apart: the modules of
adapters, and where they are."""


@pytest.mark.parametrize("family", READERS)
def test_keys_and_values_of_images_and_sounds_have_the_adapter_of_their_request(family: str, tmp_path: Path) -> None:
    asked: list[tuple[Any, int | None]]
    if family != "whisper":
        path = make_vision_checkpoint(family, tmp_path / "model")
        seen = [{"prompt": f"w1 {'w2 ' * n}<image> w3", "multi_modal_data": {"image": image(n)}} for n in range(3)]
        # tokens that see no image stand beside others in a step
        asked = [(seen[0], 0), ("w5 w6", 1), (seen[1], None), (seen[2], 1), ("w7 w8 w9", 0), (seen[0], 1)]
    else:
        path = make_whisper(tmp_path / "model")
        asked = [(heard(300.0), 0), (heard(440.0), None), (heard(300.0), 1), (heard(520.0), 1)]
    targets, within = READERS[family]
    folders = [make_adapter(path, tmp_path / name, targets, seed=seed, within=within) for seed, name in enumerate("ab")]
    adapters = [LoRARequest(each.name, 1 + number, str(each)) for number, each in enumerate(folders)]
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True)
    # a step has fewer tokens than there are vectors of a sound
    sizes = {"block_size": 16, "num_gpu_blocks_override": 100, "max_num_seqs": 6, "max_num_batched_tokens": 20}
    with opened(path, max_loras=1, **sizes) as llm:
        alone = [
            texts(llm.generate([prompt], params, lora_request=None if number is None else adapters[number]))[0]
            for prompt, number in asked
        ]
    assert alone[0] != alone[-2 if family == "whisper" else -1]
    with opened(path, max_loras=2, **sizes) as llm:
        prompts, chosen = [prompt for prompt, _ in asked], [None if n is None else adapters[n] for _, n in asked]
        for _ in range(2):  # the second time what the encoder makes is in the cache
            assert texts(llm.generate(prompts, params, lora_request=chosen)) == alone
    merged = merge(path, folders[0], tmp_path / "merged", 6 / 4)
    with opened(merged, enable_lora=False, **sizes) as llm:
        [expected] = texts(llm.generate([asked[0][0]], params))
    assert alone[0][0].token_ids == expected[0].token_ids
    assert alone[0][0].cumulative_logprob == pytest.approx(expected[0].cumulative_logprob, rel=1e-3)


def test_adapters_of_encoders_are_refused_on_any_number_of_ranks(tmp_path: Path) -> None:
    path = make_vision_checkpoint("llava", tmp_path / "model")
    adapter = LoRARequest("x", 1, str(make_adapter(path, tmp_path / "x", ATTENTION)))
    for stages in (1, 2):
        with llm_of_ranks(path, 1, stages, enable_lora=True, num_gpu_blocks_override=64) as llm:
            [output] = llm.generate(["w1 w2"], params_of(0), lora_request=adapter)
            assert output.error is not None
            assert "vision_tower" in output.error.message
            assert "is no linear layer of this model that adapters may change" in output.error.message
