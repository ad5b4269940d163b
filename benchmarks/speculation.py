"""Decoding with and without guesses, in turns: `python -m benchmarks.speculation --model DIRECTORY`.

The model computes and draws as always, and then a given text takes the place of what it drew: an edit of a file from
the history of a git repository, behind the file as it was (`--text edit`), or another file, behind nothing like it
(`--text new`). So the speed is that of a model that writes such text, whatever its weights. `bound` is the speed-up
that the same steps would give if they took what steps of as many tokens take in the middle.
"""

from __future__ import annotations

import argparse
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


class Run:
    """An engine, and how long its steps took by their tokens."""

    def __init__(self, texts: Sequence[Sequence[int]], speculative: dict[str, Any], **options: Any) -> None:
        self.llm = LLM(speculative_config=speculative, max_model_len=4096, **options)
        core = self.llm.engine.core
        assert isinstance(core, EngineCore)
        self._core = core
        drawing = core.executor._runner.drawing  # type: ignore[attr-defined]
        drawing._sampler = Dictated(drawing._sampler, texts)
        self.seconds: dict[int, list[float]] = defaultdict(list)
        self._plan, self._update = core.scheduler.schedule, core.scheduler.update
        core.scheduler.schedule, core.scheduler.update = self._schedule, self._done  # type: ignore[method-assign]

    def _schedule(self, now: float) -> Any:
        step = self._plan(now)
        if step is not None:
            self._began, self._step = time.perf_counter(), step
        return step

    def _done(self, output: Any, now: float) -> Any:
        is_decoding = all(row.num_tokens == len(row.drafts) + 1 for row in self._step.rows)
        if is_decoding:
            self.seconds[self._step.num_tokens].append(time.perf_counter() - self._began)
            self.decode_s += self.seconds[self._step.num_tokens][-1]
            self.step_tokens.append(self._step.num_tokens)
        return self._update(output, now)

    def decode(self, prompts: Sequence[list[int]], num_tokens: int) -> float:
        """Return the seconds of all steps that compute no prompt."""
        self.decode_s, self.step_tokens = 0.0, []
        params = [SamplingParams(seed=i, max_tokens=num_tokens, ignore_eos=True) for i in range(len(prompts))]
        self.llm.generate(list(prompts), params, use_tqdm=False)
        return self.decode_s


def main() -> None:
    """Print a JSON report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--repository", default=".")
    parser.add_argument("--text", choices=("edit", "new"), default="edit")
    parser.add_argument("--method", choices=("ngram", "suffix"), default="ngram")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=2000, help="of the file as it was, at most")
    parser.add_argument("--repetitions", type=int, default=5)
    asked = parser.parse_args()
    texts: list[list[int]] = []
    options = {"model": asked.model, "dtype": "bfloat16", "quantization": asked.quantization}
    off, on = Run(texts, {}, **options), Run(texts, {"method": asked.method}, **options)
    encode, batch = off.llm.get_tokenizer().encode, asked.batch
    pairs = edits(asked.repository, 6000)
    ratios, steps = [], []
    for repetition in range(asked.repetitions + 1):
        seconds = [0.0, 0.0]
        for first in range(0, asked.batches * batch, batch):
            chosen = [pairs[(first + i) % len(pairs)] for i in range(batch)]
            prompts = [encode(before)[: asked.prompt_tokens] for before, _ in chosen]
            others = [pairs[(first + i + len(pairs) // 2) % len(pairs)] for i in range(batch)]
            texts[:] = [encode(after)[: asked.tokens + 2] for _, after in (others if asked.text == "new" else chosen)]
            for place, run in enumerate((off, on)):
                seconds[place] += run.decode(prompts, asked.tokens)
            steps += on.step_tokens if repetition else []
        if repetition:  # the first one only warms up
            ratios.append(seconds[0] / seconds[1])
    usual = {count: statistics.median(each) for count, each in on.seconds.items()}
    num_rounds = asked.repetitions * asked.batches * (asked.tokens - 1)
    bound = num_rounds * statistics.median(off.seconds[batch]) / sum(usual[count] for count in steps)
    workload = {key: getattr(asked, key) for key in ("model", "quantization", "text", "method", "batch", "tokens")}
    result = {
        "speed_up": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "bound": bound,
        "tokens_per_row": num_rounds * batch / sum(min(batch, count) for count in steps),
        "step_ms": {count: round(1e3 * seconds, 1) for count, seconds in sorted(usual.items())},
    }
    report("speculation", workload, result)


if __name__ == "__main__":
    main()
