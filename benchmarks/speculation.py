"""Decoding with and without guesses, in turns: `python -m benchmarks.speculation --model DIRECTORY`.

One engine computes each batch twice, with its speculation and without. Of `--text edit` and `new` the model computes
and draws as always, and then a given text takes the place of what it drew: an edit of a file from the history of a git
repository, behind the file as it was, or another file, behind nothing like it. So the speed is that of a model that
writes such text, whatever its weights. `--text own` is what the model itself writes behind a file, `chat` what
octavo-tiny answers. `bound` is the speed-up that the same steps would give if they took what steps of as many tokens
take in the middle. `interval` holds the median of the pairs with a probability of 95 % (resampled).
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
from torch import Tensor

from octavo.cli.report import report
from octavo.core.sampling_params import SamplingParams
from octavo.engine.engine_core import EngineCore
from octavo.llm import LLM
from octavo.sampling.metadata import RowSamples, SamplingRow

_QUESTIONS = (
    "Tell me a story about a dog.", "What is 3 + 4?", "Who are you?", "What is a KV cache?", "Write a poem.",
    "What is the opposite of hot?", "Tell me a story about a girl and her cat.", "What is the capital of France?",
)  # fmt: skip


class Dictated:
    """A sampler that draws, and returns the next token of a given text instead; a request's seed is its text."""

    def __init__(self, sampler: Any, texts: Sequence[Sequence[int]]) -> None:
        self._sampler, self._texts = sampler, texts

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[RowSamples]:
        """Draw for each row."""
        drawn = []
        for row, samples in zip(rows, self._sampler.sample(logits, rows), strict=True):
            text = self._texts[row.sequence.params.seed or 0]
            token = text[min(row.position - row.sequence.num_prompt_tokens, len(text) - 1)]
            drawn.append(RowSamples([msgspec.structs.replace(samples.tokens[0], token_id=token)]))
        return drawn


def edits(repository: str, most_bytes: int) -> list[tuple[str, str]]:
    """Return files before and after commits that changed a few lines of them, the newest first."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", repository, *words], capture_output=True, text=True, check=True).stdout

    found = []
    for line in git("log", "-300", "--diff-filter=M", "--format=>%H", "--numstat", "--", "*.py").splitlines():
        if line.startswith(">"):
            commit = line[1:]
        elif line and len(parts := line.split("\t")) == 3 and 4 <= int(parts[0]) <= 40 and int(parts[1]) <= 40:
            before, after = (git("show", f"{each}:{parts[2]}") for each in (f"{commit}^", commit))
            if most_bytes // 2 < len(before) < most_bytes:
                found.append((before, after))
        if len(found) == 32:
            break
    return found


class Engine:
    """An engine whose speculation can be switched off, and how long its steps took by their tokens."""

    def __init__(self, texts: Sequence[Sequence[int]] | None, **options: Any) -> None:
        """texts: what is written in place of what is drawn; None leaves that."""
        self.llm = LLM(**options)
        core = self.llm.engine.core
        assert isinstance(core, EngineCore)
        if texts is not None:
            drawing = core.executor._runner.drawing  # type: ignore[attr-defined]
            drawing._sampler = Dictated(drawing._sampler, texts)
        self._scheduler, self.is_on = core.scheduler, True
        self._seam = core.scheduler._rows._proposer, core.scheduler._drafts
        self.seconds: dict[tuple[bool, int], list[float]] = defaultdict(list)
        self._num_prompt_tokens: dict[int, int] = {}
        self._plan, self._update = core.scheduler.schedule, core.scheduler.update
        core.scheduler.schedule, core.scheduler.update = self._schedule, self._done  # type: ignore[method-assign]

    def _schedule(self, now: float) -> Any:
        began = time.perf_counter()
        step = self._plan(now)
        if step is not None:
            self._began, self._step = began, step
            self._num_prompt_tokens.update((each.seq_id, each.num_prompt_tokens) for each in step.new_sequences)
        return step

    def _done(self, output: Any, now: float) -> Any:
        done = self._update(output, now)
        # of a row that decodes, what it computes but for drafts is the last token, and right drafts before it
        if all(row.start >= self._num_prompt_tokens[row.seq_id] for row in self._step.rows):
            seconds, count = time.perf_counter() - self._began, self._step.num_tokens
            self.seconds[self.is_on, count].append(seconds)
            self.decode_s += seconds
            self.num_steps[count] += 1
            self.num_rows += len(self._step.rows)
        return done

    def decode(self, prompts: Sequence[Any], params: Sequence[SamplingParams], *, is_on: bool) -> float:
        """Return the seconds of all steps that compute no prompt, with or without speculation."""
        scheduler, self.is_on = self._scheduler, is_on
        scheduler._rows._proposer, scheduler._drafts = self._seam if is_on else (None, None)
        scheduler._registry._waits_for_results = is_on
        self.decode_s, self.num_rows = 0.0, 0
        self.num_steps: dict[int, int] = defaultdict(int)
        generate = self.llm.generate if isinstance(prompts[0][0], int) else self.llm.chat
        generate(list(prompts), list(params), use_tqdm=False)
        return self.decode_s


class Workload:
    """The prompts of each batch, and what is written behind them."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        self.texts: list[list[int]] | None = None if asked.text in ("chat", "own") else []
        self._pairs = [] if asked.text == "chat" else edits(asked.repository, 6000)

    def batch(self, number: int, engine: Engine) -> tuple[list[Any], list[SamplingParams]]:
        """Return the prompts of a batch and their parameters."""
        asked, size, is_chat = self._asked, self._asked.batch, self._asked.text == "chat"
        params = [
            SamplingParams(
                seed=number * size + i if self.texts is None else i, max_tokens=asked.tokens, ignore_eos=not is_chat,
                temperature=asked.temperature if self.texts is None else 1.0,
            )
            for i in range(size)
        ]  # fmt: skip
        places = [number * size + i for i in range(size)]
        if is_chat:
            return [[{"role": "user", "content": _QUESTIONS[at % len(_QUESTIONS)]}] for at in places], params
        pairs, encode = self._pairs, engine.llm.get_tokenizer().encode
        prompts = [encode(pairs[at % len(pairs)][0])[: asked.prompt_tokens] for at in places]
        if self.texts is None:
            return prompts, params
        shift = len(pairs) // 2 if asked.text == "new" else 0
        written = [pairs[(at + shift) % len(pairs)][1] for at in places]
        self.texts[:] = [encode(each)[: asked.tokens + 2] for each in written]
        return prompts, params


def measure(engine: Engine, workload: Workload, num_batches: int, num_pairs: int) -> dict[str, Any]:
    """Return the figures of so many pairs of runs."""
    ratios: list[float] = []
    bounds: list[float] = []
    num_tokens = num_rows = 0
    runs: list[tuple[dict[int, int], dict[int, int]]] = []
    for number in range(-num_batches, num_pairs):  # the first ones only warm up
        prompts, params = workload.batch(number % num_batches, engine)
        taken, steps, rows = {}, {}, {}
        # each batch begins in turns, since the first run of a prompt takes longer
        for is_on in (True, False) if (number + number // num_batches) % 2 else (False, True):
            taken[is_on] = engine.decode(prompts, params, is_on=is_on)
            steps[is_on], rows[is_on] = dict(engine.num_steps), engine.num_rows
        if number < 0:
            engine.seconds.clear()
            continue
        ratios.append(taken[False] / taken[True])
        runs.append((steps[False], steps[True]))
        num_tokens, num_rows = num_tokens + rows[False], num_rows + rows[True]  # without guesses a row is a token
    usual = {key: statistics.median(each) for key, each in engine.seconds.items()}
    for off, on in runs:
        plain, guessed = (
            sum(times * usual[is_on, count] for count, times in each.items())
            for is_on, each in ((False, off), (True, on))
        )
        bounds.append(plain / guessed)
    source = random.Random(0)
    medians = sorted(statistics.median(source.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "speed_up": statistics.median(ratios),
        "interval": [round(medians[50], 3), round(medians[1950], 3)],
        "bound": statistics.median(bounds),
        "tokens_per_row": num_tokens / num_rows,
        "step_ms": {count: round(1e3 * each, 2) for (is_on, count), each in sorted(usual.items()) if is_on},
        "step_ms_off": {count: round(1e3 * each, 2) for (is_on, count), each in sorted(usual.items()) if not is_on},
    }


def main() -> None:
    """Print a JSON report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--repository", default=".")
    parser.add_argument("--text", choices=("edit", "new", "own", "chat"), default="edit")
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--draft", help="the checkpoint of a draft model or a head")
    parser.add_argument("--draft-quantization", choices=("int8", "int4"))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0, help="of chat and own")
    parser.add_argument("--prompt-tokens", type=int, default=2000, help="of the file as it was, at most")
    parser.add_argument("--pairs", type=int, default=20)
    asked = parser.parse_args()
    workload = Workload(asked)
    speculative = {"method": asked.method} | ({"model": asked.draft} if asked.draft else {})
    speculative |= {"quantization": asked.draft_quantization} if asked.draft_quantization else {}
    length = 1024 if asked.text == "chat" else 4096
    engine = Engine(
        workload.texts, model=asked.model, dtype="bfloat16", quantization=asked.quantization, max_model_len=length,
        speculative_config=speculative,
    )  # fmt: skip
    report("speculation", vars(asked), measure(engine, workload, asked.batches, asked.pairs))


if __name__ == "__main__":
    main()
