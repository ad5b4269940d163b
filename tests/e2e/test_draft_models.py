"""A model that guesses beside the model changes no bit of its results, and what it cannot do is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.core.outputs import CompletionOutput
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.errors import ConfigError
from tests.conformance.runtimes import LEVELS
from tests.e2e.test_drafts import PROMPTS, VOCABULARY, answers
from tests.fakes import proposer
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import load_oracle, make_checkpoint
from tests.fakes.whole_engines import core_of

pytestmark = pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")

MASK = 299
GREEDY = [SamplingParams(temperature=0.0, max_tokens=32, logprobs=1, ignore_eos=True)] * len(PROMPTS)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By name: the model, another one that guesses for it, and some that cannot."""
    found = {}
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128}
    for name, family, own in (
        ("model", "llama", {}),
        ("other", "qwen3", {"num_hidden_layers": 1}),
        ("parallel", "qwen3", {"num_hidden_layers": 1, "pard_token": MASK}),
        ("small vocabulary", "llama", {"vocab_size": 299}),
        ("recurrent", "qwen3_next", {}),
    ):
        path = tmp_path_factory.mktemp("checkpoint")
        make_checkpoint(family, path, **sizes | own)
        found[name] = str(write_byte_tokenizer(path))
    return found


USUAL = {"max_model_len": 128, "num_gpu_blocks_override": 64, "dtype": "bfloat16"}
_PLAIN: dict[str, list[list[CompletionOutput]]] = {}


def check_that_guesses_change_nothing(llm: LLM, model: Path | str, least: int = 50, **options: Any) -> None:
    """Compare with the model without guesses. least: so many are made; options: those of both engines."""
    key = repr((str(model), options))
    if key not in _PLAIN:
        with LLM(str(model), **USUAL | options) as plain:
            _PLAIN[key] = answers(plain)
    for _ in range(2):  # the second time prompts are found in the prefix cache
        assert answers(llm) == _PLAIN[key]
    assert stats(llm).num_draft_tokens > least


def load(paths: dict[str, str], draft: str | None, **options: Any) -> LLM:
    """Return an engine that takes all guesses of a draft model, or that has none."""
    own = USUAL | options
    if draft is None:
        return LLM(paths["model"], **own)
    given = {"method": "draft_model", "model": paths[draft], "num_speculative_tokens": 4}
    llm = LLM(paths["model"], speculative_config=given | own.pop("speculative", {}), **own)
    take_all(llm, own.get("seed"))
    return llm


def take_all(llm: LLM, seed: int | None = None) -> None:
    """Let the engine take guesses whether they pay or not."""
    core = core_of(llm)
    assert llm.config.speculative is not None
    proposer.take_all(core, llm.config.speculative, seed)


def stats(llm: LLM) -> Any:
    core = core_of(llm)
    return core.scheduler.stats()


def proposals(llm: LLM) -> list[tuple[int, tuple[int, ...]]]:
    """Return the list that what is guessed will be in, each beside the number of known tokens before it."""
    core = core_of(llm)
    proposer, seen = core.scheduler._drafts._proposer, []  # type: ignore[union-attr]
    noted = proposer.note_proposed

    def note(group: Any, sequence: Any, tokens: tuple[int, ...], num_known: int) -> None:
        seen.append((num_known, tokens))
        noted(group, sequence, tokens, num_known)

    proposer.note_proposed = note  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"seed": 1, "max_steps_in_flight": 3},
        {"quantization": "int8", "speculative": {"quantization": "int4"}},
        {"num_gpu_blocks_override": 13, "preemption_mode": "swap", "swap_space": 0.01, "max_num_batched_tokens": 16},
        {"num_gpu_blocks_override": 13, "preemption_mode": "recompute", "max_num_batched_tokens": 16, "seed": 2},
        {"speculative": {"draft_sample_method": "same_key"}},
        {"enforce_eager": True, "kv_cache_dtype": "int8"},
        pytest.param(
            {"tensor_parallel_size": 2, "threads": 1, "seed": 3, "speculative": {"draft_sample_method": "same_key"}},
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_draft_model_changes_no_bit(options: dict[str, Any], paths: dict[str, str]) -> None:
    plain = {key: options[key] for key in options if key in ("quantization", "kv_cache_dtype")}
    with load(paths, "other", max_num_seqs=8, **options) as llm:
        check_that_guesses_change_nothing(llm, paths["model"], **plain)
        if "preemption_mode" in options:
            assert stats(llm).num_preemptions > 0


def test_a_parallel_draft_model_guesses_at_masks_and_changes_no_bit(paths: dict[str, str]) -> None:
    with load(paths, "parallel", max_num_seqs=8, max_num_batched_tokens=16) as llm:
        check_that_guesses_change_nothing(llm, paths["model"])
    library = load_oracle(Path(paths["parallel"]))
    with load(paths, "parallel", dtype="float32") as llm:
        seen = proposals(llm)
        tokens = [*PROMPTS[3], *llm.generate([PROMPTS[3]], GREEDY[:1], use_tqdm=False)[0].outputs[0].token_ids]
    assert max(len(proposed) for _, proposed in seen) == 4
    for num_known, proposed in seen:
        known = [*tokens[:num_known], *[MASK] * (len(proposed) - 1)]
        with torch.inference_mode():
            assert library(torch.tensor([known])).logits[0, num_known - 1 :].argmax(-1).tolist() == list(proposed)
    with pytest.raises(ConfigError, match="parallel_drafting is set, but .* has no token for masks"):
        load(paths, "other", speculative={"parallel_drafting": True})
    with load(paths, "parallel", speculative={"parallel_drafting": False}) as llm:
        check_that_guesses_change_nothing(llm, paths["model"])


def tokens_per_row(paths: dict[str, str], params: list[SamplingParams], **options: Any) -> float:
    with load(paths, "model", **options) as llm:
        llm.generate(PROMPTS, params, use_tqdm=False)
        assert stats(llm).num_draft_tokens > 0
        return float(stats(llm).num_accepted_tokens / stats(llm).num_draft_tokens)


def test_guesses_of_the_same_model_are_right(paths: dict[str, str]) -> None:
    drawn = [SamplingParams(seed=i, max_tokens=32, top_p=0.95, ignore_eos=True) for i in range(len(PROMPTS))]
    assert tokens_per_row(paths, GREEDY) == 1
    assert tokens_per_row(paths, GREEDY, seed=1) == 1  # also behind tokens that it has not seen when they were drawn
    assert tokens_per_row(paths, drawn, speculative={"draft_sample_method": "same_key"}) == 1
    assert tokens_per_row(paths, drawn) < 0.5


def test_prefix_hits_and_swaps_bring_the_draft_models_part(paths: dict[str, str]) -> None:
    options = {"num_gpu_blocks_override": 13, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    swap = {"preemption_mode": "swap", "swap_space": 0.01}
    assert tokens_per_row(paths, GREEDY, **options, **swap) == 1
    assert tokens_per_row(paths, GREEDY, tensor_parallel_size=2, threads=1) == 1
    with load(paths, "model") as llm:
        prompt = PROMPTS[3]
        llm.generate([prompt], GREEDY[:1], use_tqdm=False)
        found = llm.generate([[*prompt, 5]], GREEDY[:1], use_tqdm=False)[0]
        assert found.num_cached_tokens
        assert stats(llm).num_accepted_tokens == stats(llm).num_draft_tokens


def test_what_was_drawn_while_no_guesses_were_wanted_is_caught_up_behind_a_prefix_hit(paths: dict[str, str]) -> None:
    with load(paths, "model", max_model_len=192) as llm:
        core = core_of(llm)
        eager = core.scheduler._rows._proposer
        assert isinstance(eager, proposer.EagerSpeculation)
        eager._most = 0
        params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
        first = llm.generate([PROMPTS[3]], params, use_tqdm=False)[0]
        assert stats(llm).num_draft_tokens == 0
        eager._most = 4
        prompt = [*PROMPTS[3], *first.outputs[0].token_ids]
        second = llm.generate([prompt], GREEDY[:1], use_tqdm=False)[0]
        assert second.num_cached_tokens >= len(prompt) - 16
        assert stats(llm).num_accepted_tokens == stats(llm).num_draft_tokens > 20


def test_ids_that_only_the_model_has_logits_of_are_read_and_drawn(paths: dict[str, str]) -> None:
    params = SamplingParams(seed=1, logit_bias={VOCABULARY - 1: 4.0}, max_tokens=40, ignore_eos=True)
    prompt, found = [5, VOCABULARY - 1, 7], []
    for draft in (None, "small vocabulary"):
        with load(paths, draft) as llm:
            found.append(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert found[0] == found[1]
    assert VOCABULARY - 1 in found[0]


def test_a_draft_model_is_in_the_memory_plan(paths: dict[str, str]) -> None:
    plans = []
    for draft in (None, "other"):
        with load(paths, draft) as llm:
            core = core_of(llm)
            plans.append((core.ready.plan, core.ready.cache))
    assert len(plans[1][1].groups) == len(plans[0][1].groups) + 1
    assert "layer 2" in plans[1][0]
    with pytest.raises(ConfigError, match=r"kv_cache_memory .* is more than|holds no KV block"):
        load(paths, "other", num_gpu_blocks_override=None, kv_cache_memory=1 << 60)


@pytest.mark.parametrize(
    ("draft", "options", "message"),
    [
        ("small vocabulary", {"draft_sample_method": "same_key"}, r"has 299 tokens, that of the model has 300 \(draft"),
        ("recurrent", {}, "the draft model keeps a state of"),
    ],
)
def test_what_cannot_guess_is_refused(draft: str, options: dict[str, Any], message: str, paths: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=message):
        load(paths, draft, speculative=options)


@pytest.mark.parametrize("draws", ["greedy", "same_key"])
def test_a_draft_of_a_tiny_model_is_exact_beside_texts_forms_and_limits(draws: str) -> None:
    form = StructuredOutputsParams(choice=["a cat", "a dog that sleeps"])
    params = [
        SamplingParams(seed=1, n=2, stop=("e",)),
        SamplingParams(seed=2, n=2, structured_outputs=form, max_tokens=40),
        SamplingParams(seed=3, max_tokens=1, n=2),
        SamplingParams(seed=4, max_tokens=2),
        SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True),  # up to the end of the context
        SamplingParams(temperature=0.0, use_beam_search=True, n=2, best_of=3, max_tokens=12),
    ]
    prompts = ["Once upon a time"] * len(params)

    def texts(**options: Any) -> list[list[CompletionOutput]]:
        with LLM("octavo-tiny", num_gpu_blocks_override=64, max_model_len=96, **options) as llm:
            if options:
                take_all(llm)
            return [each.outputs for each in llm.generate(prompts, params, use_tqdm=False)]

    own = {"method": "draft_model", "model": "octavo-tiny", "num_speculative_tokens": 3}
    own["draft_sample_method"] = draws
    assert texts(speculative_config=own) == texts()
