"""Engines with roles and a proxy, each a process: every answer is that of one engine, whatever is killed or started
again."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from octavo import LLM, CompletionOutput, SamplingParams

pytestmark = pytest.mark.slow

STORY = "Once upon a time there was a little bear who lived in a big forest. Every day the bear "
PROMPTS = [STORY * 3, STORY + "was happy", "The", STORY * 2 + "and his friend"]
MAX_TOKENS = 60
SETTINGS: dict[str, Any] = {
    "n": 2,
    "temperature": 0.8,
    "top_p": 0.95,
    "top_k": 100,
    "min_p": 0.01,
    "presence_penalty": 0.3,
    "repetition_penalty": 1.1,
    "logprobs": 2,
    "ignore_eos": True,
}

Run = Callable[..., "Running"]


class Running:
    """`octavo` with these arguments. `where` is the address in the first line that it writes, once it is there."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._errors = (directory / f"{time.monotonic_ns()}.log").open("w+")
        command = [sys.executable, "-m", "octavo", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._errors, text=True)

    @property
    def where(self) -> str:
        assert self.process.stdout is not None
        found = re.search(r"127\.0\.0\.1:[0-9]+", self.process.stdout.readline())
        assert found is not None, self.log()
        return found[0]

    def log(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(200)

    def close(self) -> None:
        print(self.log())  # what a failure shows
        self.process.kill()
        self.process.wait()
        self._errors.close()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    started: list[Running] = []

    def start(*arguments: str) -> Running:
        started.append(Running(tmp_path, *arguments))
        return started[-1]

    yield start
    for each in started:
        each.close()


def engine(run: Run, role: str, port: str = "0") -> Running:
    settings = ("--threads", "1", "--num-gpu-blocks-override", "256", "--swap-space", "0")
    return run("serve", "octavo-tiny", "--role", role, "--port", port, *settings)


def answer(url: str, body: dict[str, Any]) -> Any:
    """What a server answers to a body."""
    request = Request(url, json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    with urlopen(request, timeout=120) as response:
        return json.load(response)


def completion(url: str, number: int) -> Any:
    """Texts and log-probabilities of both sequences of a request, which is sent again while there is no engine."""
    body = {"prompt": PROMPTS[number], "max_tokens": MAX_TOKENS, "seed": number, **SETTINGS}
    try:
        answered = answer(f"{url}/v1/completions", body)
    except HTTPError as error:
        error.close()
        if error.code != 503 or "Retry-After" not in error.headers:
            raise
        time.sleep(0.1)
        return completion(url, number)
    return [(choice["text"], choice["logprobs"]["token_logprobs"]) for choice in answered["choices"]]


def of_one_engine() -> list[Any]:
    llm = LLM(threads=1, num_gpu_blocks_override=256, swap_space=0)
    params = [SamplingParams(max_tokens=MAX_TOKENS, seed=number, **SETTINGS) for number in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, params)
    llm.engine.core.shutdown()
    return [[(each.text, logprobs_of(each)) for each in output.outputs] for output in outputs]


def logprobs_of(output: CompletionOutput) -> list[float]:
    assert output.logprobs is not None
    return [entries[token_id].logprob for token_id, entries in zip(output.token_ids, output.logprobs, strict=True)]


def metric(url: str, name: str) -> float:
    """The sum of a metric over all engines."""
    with urlopen(f"{url}/metrics", timeout=120) as response:
        return sum(map(float, re.findall(rf"^octavo:{name}{{.*}} ([0-9.]+)", response.read().decode(), re.MULTILINE)))


def until(condition: Callable[[], object], because: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline, because()
        time.sleep(0.01)


def test_answers_are_those_of_one_engine_whatever_dies_or_comes_back(run: Run, tmp_path: Path) -> None:
    prefill, decodes = engine(run, "prefill"), [engine(run, "decode")]
    expected = of_one_engine()
    at = {"prefill": prefill.where, "decode": decodes[0].where}
    file = tmp_path / "engines"
    file.write_text("".join(f"{role} {where}\n" for role, where in at.items()))
    arguments = ("proxy", "octavo-tiny", "--engines", str(file), "--port", "0", "--split-min-tokens", "16")
    proxy = run(*arguments)
    url = f"http://{proxy.where}"

    def disturbed(disturb: Callable[[], Any]) -> list[Any]:
        """The answers to all prompts when `disturb` is called after some tokens of each."""
        before = metric(url, "generation_tokens_total")
        with ThreadPoolExecutor() as pool:
            answers = [pool.submit(completion, url, number) for number in range(len(PROMPTS))]
            until(lambda: metric(url, "generation_tokens_total") > before + 20, proxy.log)
            disturb()
            return [each.result() for each in answers]

    def restart() -> None:
        assert decodes[-1].end(signal.SIGKILL) == -signal.SIGKILL
        decodes.append(engine(run, "decode", at["decode"].rpartition(":")[2]))

    assert disturbed(lambda: None) == expected
    assert metric(url, "handovers_total") > 0
    assert metric(url, "handover_mismatches_total") == 0
    assert disturbed(restart) == expected  # the only one that decodes: requests wait for the next
    assert metric(url, "core_restarts_total") == 1
    assert metric(url, "requests_resumed_total") > 0
    assert disturbed(lambda: prefill.end(signal.SIGKILL)) == expected

    assert proxy.end(signal.SIGKILL) == -signal.SIGKILL
    proxy = run(*arguments)
    url = f"http://{proxy.where}"
    assert [completion(url, number) for number in range(2)] == expected[:2]
    assert proxy.end() == 0
    assert decodes[-1].end() == 0
