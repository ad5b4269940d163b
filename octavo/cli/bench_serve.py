"""`octavo bench serve`: a load on any OpenAI-compatible server, in the words and figures of vLLM's bench client."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import aclosing, nullcontext
from itertools import pairwise
from os.path import expanduser
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from octavo.cli.bench_figures import METRICS, Answer, figures, limits_of, percentiles_of, table
from octavo.cli.openai_client import OpenAIClient, read_api_key
from octavo.cli.options import Given, with_options
from octavo.cli.report import check_file, report, rounded, write_file
from octavo.cli.terminal import progress
from octavo.config.fields import Arguments, arg
from octavo.errors import ConfigError, OctavoError, RequestFailed
from octavo.simulate.traces import Workload, generate

_TOKENS: Final = (10, 3_000)
"""Random prompts are of these token ids, which every vocabulary has and which are no special tokens."""
_WORDS: Final = ("time", "year", "day", "way", "man", "thing", "woman", "life", "child", "world", "school", "state")


class ServeOptions(Arguments, heading="Benchmark"):
    """What `octavo bench serve` sends, and where; the names are those of vLLM's bench client."""

    backend: Literal["openai", "vllm", "openai-chat"] = arg(
        "openai", "API that is measured: completions (vllm is another name), or chat."
    )
    base_url: str | None = arg(None, "Address of the server, instead of --host and --port.")
    host: str = arg("127.0.0.1", "Host of the server.")
    port: int = arg(8000, "Port of the server.", ge=1, le=65535)
    endpoint: str | None = arg(None, "Path of the API; by default the backend's.")
    api_key_file: str | None = arg(None, "File whose first line is the API key.")
    header: tuple[str, ...] = arg((), "Header KEY=VALUE that is sent with each request; may be given several times.")
    extra_body: str | None = arg(None, "JSON object whose fields are added to each request.")
    model: str | None = arg(None, "Model to ask for; by default the server's first.")
    tokenizer: str | None = arg(
        None,
        "Directory or tokenizer.json with which tokens of sharegpt are counted; without it, four characters "
        "count as one token.",
    )
    dataset_name: Literal["random", "sharegpt", "custom"] = arg(
        "random",
        "Prompts: random tokens (words for chat), conversations of a ShareGPT file, or a custom file of JSON lines "
        "with prompt and perhaps output_tokens.",
    )
    dataset_path: str | None = arg(None, "File of the dataset sharegpt or custom.")
    random_input_len: int = arg(1024, "Tokens of a random prompt.", ge=1)
    random_output_len: int = arg(128, "Tokens to generate for a random prompt.", ge=1)
    random_range_ratio: float = arg(
        0.0, "Random lengths are uniform from 1 - this to 1 + this, times their mean; 0 makes all alike.", ge=0, le=1
    )
    random_prefix_len: int = arg(0, "Tokens with which all random prompts begin.", ge=0)
    sharegpt_output_len: int | None = arg(None, "Tokens to generate, instead of the answers' lengths.", ge=1)
    custom_output_len: int = arg(256, "Tokens to generate where a line has no output_tokens.", ge=1)
    num_prompts: int = arg(1000, "Requests.", ge=1)
    request_rate: str = arg("inf", "Requests a second; inf sends all at once.")
    burstiness: float = arg(
        1.0, "Shape of the gamma distribution of gaps: 1 is a Poisson process, less comes in bursts.", gt=0
    )
    max_concurrency: int | None = arg(
        None, "Most requests at once; the others wait in the client, and their waiting is not measured.", ge=1
    )
    seed: int = arg(0, "Seed of prompts and arrivals.")
    ignore_eos: bool = arg(False, "Ask the server to go on after an end-of-sequence token.")
    temperature: float | None = arg(None, "Sent with each request; by default the server's.", ge=0)
    top_p: float | None = arg(None, "Sent with each request; by default the server's.", gt=0, le=1)
    num_warmups: int = arg(1, "Warm-up requests before the measurement; they are not counted.", ge=0)
    goodput: tuple[str, ...] = arg(
        (),
        "Goodput: the limit in ms that a request must keep to count, as ttft:200, tpot:50 or e2el:5000; may "
        "be given several times.",
    )
    percentile_metrics: str = arg(
        ",".join(METRICS), "Metrics whose percentiles are reported, between commas: some of ttft, tpot, itl, e2el."
    )
    metric_percentiles: str = arg("99", "Percentiles to report, as in 50,90,99.")
    save_result: bool = arg(False, "Write the JSON to a file as well.")
    save_detailed: bool = arg(False, "With --save-result: also the times of each request.")
    result_dir: str = arg(".", "With --save-result: folder for the file.")
    result_filename: str | None = arg(
        None, "With --save-result: name of the file; by default from backend, rate, model and time."
    )

    @property
    def rate(self) -> float:
        """Return the number of `request_rate`. Raises ConfigError."""
        try:
            rate = float(self.request_rate)
        except ValueError:
            rate = -1.0
        if not rate > 0:
            raise ConfigError(f"request_rate is {self.request_rate!r}, expected inf or a number above 0")
        return rate


class Asked(msgspec.Struct, frozen=True):
    """A request: when it is sent, in seconds since the begin, its prompt, and the tokens to generate."""

    at_s: float
    prompt: str | list[int]
    output_len: int


@with_options(ServeOptions)
def serve(*, given: Given) -> None:
    """Measure any OpenAI-compatible server under load: times to first token, per token and in all, and throughput."""
    options = given.own(ServeOptions)
    percentiles, limits = percentiles_of(options.metric_percentiles), limits_of(options.goodput)
    shown = options.percentile_metrics.split(",")
    if wrong := set(shown) - set(METRICS):
        raise ConfigError(f"percentile_metrics has {min(wrong)!r}, expected some of {', '.join(METRICS)}")
    if options.save_result:
        check_file("result_filename", str(Path(options.result_dir) / (options.result_filename or "result.json")))
    load = make_load(options)
    with asyncio.Runner() as runner:
        model, answers, seconds = runner.run(Client(options).measure(load))
    result = figures(answers, seconds, percentiles, limits)
    if not result["completed"]:
        raise RequestFailed(f"all {len(load)} requests failed: {next(each.error for each in answers)}")
    text = table(result, shown, percentiles, answers)
    workload = _workload(options, model)
    hidden = [f"_{name}_ms" for name in METRICS if name not in shown]
    result = {key: value for key, value in result.items() if not key.endswith(tuple(hidden))}
    report("serve", workload, result, text)
    if options.save_result:
        detail = {}
        if options.save_detailed:
            detail = {name: [getattr(each, name) for each in answers] for name in Answer.__struct_fields__}
        date, model = time.strftime("%Y%m%d-%H%M%S"), model.rpartition("/")[2]
        name = options.result_filename or f"{options.backend}-{options.rate:g}qps-{model}-{date}.json"
        body = msgspec.json.encode({"date": date} | workload | rounded(result) | detail)
        write_file("result_filename", str(Path(options.result_dir) / name), body + b"\n")


def _workload(options: ServeOptions, model: str) -> dict[str, Any]:
    return {
        "backend": options.backend,
        "model_id": model,
        "dataset_name": options.dataset_name,
        "num_prompts": options.num_prompts,
        "request_rate": "inf" if options.rate == float("inf") else options.rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "seed": options.seed,
    }


# ---- the load ----


def make_load(options: ServeOptions) -> list[Asked]:
    """Return the requests in the order of their times. The same seed makes the same ones. Raises ConfigError."""
    if options.dataset_name == "random":
        prompts = _random_prompts(options)
    elif options.dataset_path is None:
        raise ConfigError(f"dataset_path is not set; give the file of the dataset {options.dataset_name}")
    else:
        try:
            content = Path(expanduser(options.dataset_path)).read_bytes()
            prompts = _sharegpt(options, content) if options.dataset_name == "sharegpt" else _custom(options, content)
        except (OSError, msgspec.MsgspecError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"dataset_path is {options.dataset_path!r}, which is no {options.dataset_name} file: {error}"
            ) from error
    if not prompts:
        raise ConfigError(f"dataset_path is {options.dataset_path!r}, which has no prompts")
    prompts = [prompts[place % len(prompts)] for place in range(options.num_prompts)]
    return [Asked(at_s, *prompt) for at_s, prompt in zip(_arrivals(options), prompts, strict=True)]


def _arrivals(options: ServeOptions) -> list[float]:
    """Return times with gamma gaps; the last one is at number / rate, whatever was drawn, as vLLM's client has it."""
    if options.rate == float("inf"):
        return [0.0] * options.num_prompts
    workload = Workload(
        arrivals="gamma",
        burstiness=options.burstiness**-0.5,  # there a coefficient of variation, here a shape
        request_rate=options.rate,
        num_requests=options.num_prompts,
    )
    times = [request.arrival_s for request in generate(workload, options.seed)]
    scale = options.num_prompts / options.rate / times[-1]
    return [at_s * scale for at_s in times]


def _random_prompts(options: ServeOptions) -> list[tuple[str | list[int], int]]:
    source = random.Random(options.seed)
    is_chat = options.backend == "openai-chat"

    def tokens(count: int) -> list[Any]:
        return source.choices(_WORDS, k=count) if is_chat else source.choices(range(*_TOKENS), k=count)

    def length(mean: int) -> int:
        spread = options.random_range_ratio
        return max(1, source.randint(int(mean * (1 - spread)), int(mean * (1 + spread))))

    prefix, found = tokens(options.random_prefix_len), []
    for _ in range(options.num_prompts):
        prompt = prefix + tokens(length(options.random_input_len))
        found.append((" ".join(prompt) if is_chat else prompt, length(options.random_output_len)))
    return found


def _sharegpt(options: ServeOptions, content: bytes) -> list[tuple[str | list[int], int]]:
    """Return the first turns of conversations, in random order; lengths of vLLM's client are left out (4 to 1,024
    tokens of prompt, 2,048 in all)."""
    count = _counter(options.tokenizer)
    found: list[tuple[str | list[int], int]] = []
    entries = msgspec.json.decode(content)
    random.Random(options.seed).shuffle(entries)
    for entry in entries:
        if len(found) == options.num_prompts:
            break
        turns = entry.get("conversations") or []
        if len(turns) < 2:
            continue
        prompt, answer = turns[0]["value"], turns[1]["value"]
        prompt_len, output_len = count(prompt), options.sharegpt_output_len or count(answer)
        is_right = 4 <= prompt_len <= 1024 and prompt_len + output_len <= 2048
        if is_right and (options.sharegpt_output_len or output_len >= 4):
            found.append((prompt, output_len))
    return found


def _custom(options: ServeOptions, content: bytes) -> list[tuple[str | list[int], int]]:
    rows = [msgspec.json.decode(line) for line in content.splitlines() if line.strip()]
    return [(str(row["prompt"]), int(row.get("output_tokens") or options.custom_output_len)) for row in rows]


def _counter(tokenizer: str | None) -> Any:
    if tokenizer is None:
        return lambda text: len(text) // 4
    from tokenizers import Tokenizer

    path = Path(expanduser(tokenizer))
    try:
        found = Tokenizer.from_file(str(path / "tokenizer.json" if path.is_dir() else path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"tokenizer is {tokenizer!r}, which cannot be read: {error}") from error
    return lambda text: len(found.encode(text).ids)


# ---- sending it ----


class Client:
    """Sends a load to the server of the options. Raises ConfigError for wrong ones."""

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        headers = dict(text.partition("=")[::2] for text in options.header)
        address = options.base_url or f"http://{options.host}:{options.port}"
        self.server = OpenAIClient(address, read_api_key(options.api_key_file), headers)
        self.path = options.endpoint or ("/v1/chat/completions" if self.is_chat else "/v1/completions")
        own = {"temperature": options.temperature, "top_p": options.top_p, "ignore_eos": options.ignore_eos or None}
        self.fields: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
        try:
            self.fields |= msgspec.json.decode(options.extra_body or "{}", type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ConfigError(f"extra_body is {options.extra_body!r}, expected a JSON object: {error}") from error

    @property
    def is_chat(self) -> bool:
        """Return whether prompts are messages."""
        return self.options.backend == "openai-chat"

    async def measure(self, load: Sequence[Asked]) -> tuple[str, list[Answer], float]:
        """Send the load after the warm-up; return model, answers and seconds. Raises RequestFailed when the first
        request fails, and ServerUnreachable."""
        model = self.options.model or (await self.server.models() or [""])[0]
        for _ in range(self.options.num_warmups):
            if (error := (await self._send(load[0], model)).error) is not None:
                raise RequestFailed(f"the first request failed: {error}")
        limit = asyncio.Semaphore(self.options.max_concurrency) if self.options.max_concurrency else nullcontext()
        num_done = 0
        with progress(f"{len(load):,} requests") as on_done:
            began = time.perf_counter()

            async def send(asked: Asked) -> Answer:
                nonlocal num_done
                async with limit:
                    answer = await self._send(asked, model)
                num_done += 1
                on_done(num_done / len(load))
                return answer

            tasks = []
            for asked in load:
                await asyncio.sleep(max(0.0, began + asked.at_s - time.perf_counter()))
                tasks.append(asyncio.create_task(send(asked)))
            answers = await asyncio.gather(*tasks)
            return model, answers, time.perf_counter() - began

    async def _send(self, asked: Asked, model: str) -> Answer:
        body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        if self.is_chat:
            body |= {"messages": [{"role": "user", "content": asked.prompt}], "max_completion_tokens": asked.output_len}
        else:
            body |= {"prompt": asked.prompt, "max_tokens": asked.output_len}
        usage: dict[str, Any] = {}
        times = [time.perf_counter()]
        try:
            async with aclosing(self.server.events(self.path, body | self.fields)) as events:
                async for event in events:
                    if event.get("choices"):
                        times.append(time.perf_counter())
                    usage = event.get("usage") or usage
        except OctavoError as error:
            return Answer(error=str(error))
        if len(times) < 2:
            return Answer(error="the response has no token")
        return Answer(
            prompt_len=usage.get("prompt_tokens") or 0,
            # without usage an event counts as a token
            output_len=usage.get("completion_tokens") or len(times) - 1,
            ttft=times[1] - times[0],
            itl=[after - before for before, after in pairwise(times[1:])],
            e2el=times[-1] - times[0],
        )
