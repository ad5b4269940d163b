"""`octavo serve` as people run it: two processes, a real (tiny, random) model, the openai client, signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from safetensors.numpy import save_file

from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.server.raw import ask, eventually

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class ServerProcess:
    """`octavo serve` on a free port; `url` is known once it is ready."""

    def __init__(self, model: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "octavo", "serve", str(model), "--port", "0", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.out: list[str] = []
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=lines.extend, args=(pipe,))
            for lines, pipe in ((self.out, self.process.stdout), (self.errors, self.process.stderr))
        ]
        for reader in self._readers:
            reader.start()
        try:
            eventually(lambda: self.out or self.process.poll() is not None)
        except AssertionError:
            self.process.kill()  # nobody else knows of it
            raise
        assert self.out, "".join(self.errors)
        found = re.search(r"http://127\.0\.0\.1:[0-9]+", self.out[0])
        assert found is not None
        self.url = found[0]
        (self.core_pid,) = [each for each in _children(self.process.pid) if b"core_process" in command_of(each)]

    def wait(self) -> int:
        """The exit code, once process and output have ended."""
        code = self.process.wait(100)
        for reader in self._readers:
            reader.join()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.process.stdout.close()
        self.process.stderr.close()
        return code

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait()


def _children(pid: int) -> list[int]:
    """Processes that a process has started, apart from Python's own helpers."""
    listed = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [child for child in listed if b"resource_tracker" not in command_of(child)]


def command_of(pid: int) -> bytes:
    """The words of a process; none of one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama: hidden 32, one layer, two heads. Written by hand: importing transformers takes seconds."""
    hidden, vocab_size = 32, 300
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": vocab_size,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": vocab_size - 1,
        "torch_dtype": "float32",
    }
    matrices = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    norms = ["layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"]
    random = np.random.default_rng(0)
    weights = {
        "model.embed_tokens.weight": random.normal(size=(vocab_size, hidden)),
        **{f"model.layers.0.{name}.weight": random.normal(size=(hidden, hidden)) / hidden**0.5 for name in matrices},
        **{f"model.{name}.weight": np.ones(hidden) for name in norms},
    }
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: weight.astype(np.float32) for name, weight in weights.items()}, path / "model.safetensors")
    return write_byte_tokenizer(path)


@pytest.fixture(scope="module")
def start(model: Path) -> Iterator[Callable[..., ServerProcess]]:
    started: list[ServerProcess] = []

    def start_process(*arguments: str) -> ServerProcess:
        started.append(ServerProcess(model, "--num-gpu-blocks-override", "256", "--threads", "1", *arguments))
        return started[-1]

    yield start_process
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
            server.wait()


@pytest.fixture(scope="module")
def server(start: Callable[..., ServerProcess]) -> ServerProcess:
    """One for tests that leave it as it was."""
    return start("--served-model-name", "tiny")


def test_server_answers_and_rests(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=100) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        conversation = [{"role": "user", "content": "Hello"}]
        fields: Any = {"model": "tiny", "messages": conversation, "max_tokens": 8, "temperature": 0}
        chat: Any = client.chat.completions.create(**fields)
        assert (chat.choices[0].finish_reason, chat.usage.completion_tokens) == ("length", 8)

        pieces = [chunk.choices[0] for chunk in client.chat.completions.create(**fields, stream=True)]
        assert "".join(piece.delta.content or "" for piece in pieces) == chat.choices[0].message.content
        assert (pieces[0].delta.role, pieces[-1].finish_reason) == ("assistant", "length")

        completion: Any = client.completions.create(
            model="tiny", prompt=["ab", "cd"], max_tokens=4, n=2, seed=1, logprobs=2, echo=True
        )
        assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
        for choice, prompt in zip(completion.choices, ("ab", "ab", "cd", "cd"), strict=True):
            assert choice.text.startswith(prompt)
            assert len(choice.logprobs.token_logprobs) == 6

        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt="x" * 3000, max_tokens=1)
        assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    assert b"octavo:generation_tokens_total" in ask(server.url, "/metrics").body

    pids = (server.process.pid, server.core_pid)
    eventually(lambda: ask(server.url, "/health").status == 200)
    before = [_cpu_s(pid) for pid in pids]
    time.sleep(2)
    used = [_cpu_s(pid) - start for pid, start in zip(pids, before, strict=True)]
    assert max(used) <= 0.02, f"server and core used {used} seconds of processor time in 2 idle seconds"


def test_killed_core_is_started_again_and_streams_go_on_until_given_up(start: Callable[..., ServerProcess]) -> None:
    server = start("--max-core-restarts", "1")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=100) as client:
        name = client.models.list().data[0].id
        fields: dict[str, Any] = {"model": name, "prompt": "ab", "max_tokens": 1500, "seed": 1, "n": 2}
        fields["extra_body"] = {"ignore_eos": True}
        expected = client.completions.create(**fields)
        fields["extra_body"] = {"ignore_eos": True, "cache_salt": "nothing is cached"}

        stream = client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
        chunks = [next(stream) for _ in range(20)]
        os.kill(server.core_pid, signal.SIGKILL)
        eventually(lambda: ask(server.url, "/health").status == 503)
        answer = ask(server.url, "/health")
        assert answer.status == 200 or (answer.error["code"], answer.headers["retry-after"]) == (
            "engine_restarting",
            "5",
        )
        chunks += stream
        assert ask(server.url, "/health").status == 200
        for index, choice in enumerate(expected.choices):
            pieces = [each.choices[0].text for each in chunks if each.choices and each.choices[0].index == index]
            assert "".join(pieces) == choice.text
        assert chunks[-1].usage == expected.usage

        stream = client.completions.create(**fields, stream=True)
        next(stream)
        (core_pid,) = _children(server.process.pid)
        os.kill(core_pid, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="the engine has stopped"):
            list(stream)
    assert server.wait() == 1
    assert any("1 times within 10 minutes (max_core_restarts), and is given up" in line for line in server.errors)


def test_health_reports_a_stopped_core_and_one_that_continues(server: ServerProcess) -> None:
    for _ in range(2):
        assert ask(server.url, "/health").status == 200
        os.kill(server.core_pid, signal.SIGSTOP)
        eventually(lambda: ask(server.url, "/health").status == 503)
        error = ask(server.url, "/health").error
        assert error["code"] == "engine_unresponsive"
        assert f"kill -CONT {server.core_pid}" in error["message"]
        os.kill(server.core_pid, signal.SIGCONT)
        eventually(lambda: ask(server.url, "/health").status == 200)


def test_a_server_whose_core_is_stopped_ends_at_a_signal_too(server: ServerProcess) -> None:
    os.kill(server.core_pid, signal.SIGSTOP)
    assert server.stop() == 0


def test_no_request_is_lost_at_a_signal_and_nothing_is_left(start: Callable[..., ServerProcess]) -> None:
    server = start()
    body = {"prompt": "ab", "max_tokens": 20, "ignore_eos": True}
    outcomes: list[object] = []

    def client() -> None:
        while True:
            try:
                outcomes.append(ask(server.url, "/v1/completions", body).status)
            except ConnectionRefusedError:
                return  # it never had a connection
            except Exception as error:
                outcomes.append(error)

    clients = [threading.Thread(target=client) for _ in range(24)]
    for each in clients:
        each.start()
    eventually(lambda: len(outcomes) > 24)
    assert server.stop() == 0, "".join(server.errors)
    assert not any("Traceback" in line for line in server.errors), "".join(server.errors)
    assert not Path(f"/proc/{server.core_pid}").exists()
    for each in clients:
        each.join()
    assert set(outcomes) == {200}, outcomes


def test_a_missing_model_is_an_error_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "octavo", "serve", str(tmp_path / "nothing"), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.strip().splitlines()) == 1
    assert "nothing" in done.stderr
