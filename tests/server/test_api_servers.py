"""`octavo serve --api-server-count 2` as people run it: processes, a shared address, deaths, signals."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.config.args import EngineArgs
from octavo.config.server_args import ServerArgs
from octavo.server import api_servers
from octavo.server.api_servers import ApiServers
from octavo.server.http.sockets import bind
from tests.server.raw import ask, connect, eventually
from tests.server.test_serve_process import _children, command_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")


class Servers:
    """`octavo serve --api-server-count 2` with the model that ships with octavo."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "octavo", "serve", "octavo-tiny", "--threads", "1", "--api-server-count", "2"]
        self.process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.lines: list[str] = []
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        eventually(lambda: self.process.poll() is not None or self._address())

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.decode())

    def _address(self) -> str | None:
        found = re.search(r"octavo serves .* at (\S+)", "".join(self.lines))
        return None if found is None else found[1]

    @property
    def url(self) -> str:
        address = self._address()
        assert address is not None, "".join(self.lines)
        return address.removesuffix("/v1")

    def pids(self, module: str) -> list[int]:
        """The children that run a module."""
        return [pid for pid in _children(self.process.pid) if module.encode() in command_of(pid)]

    def wait(self) -> int:
        code = self.process.wait(90)
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture(autouse=True)
def _handlers_are_left_as_they_were() -> Iterator[None]:
    """Whatever ends the servers, the program that has called them hears its signals as before."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.fixture
def servers() -> Iterator[Servers]:
    started = Servers("--port", "0", "--shutdown-timeout-s", "60")  # a machine with other work starts cores slowly
    yield started
    started.process.kill()
    started.wait()


def _complete(url: str) -> Any:
    body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    answer = ask(url, "/v1/completions", body)
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["text"]


def test_servers_share_an_address_outlive_each_other_and_end_with_a_signal(servers: Servers) -> None:
    eventually(lambda: len(servers.pids("api_server")) == 2)
    texts = {_complete(servers.url) for _ in range(8)}
    assert len(texts) == 1
    # the counts of a server that takes more than a second to answer the other one are left out
    eventually(lambda: re.search(rb'request_success_total\{finished_reason="length",[^}]*\} 8\.0', _metrics(servers)))
    [core] = servers.pids("core_process")
    first, second = servers.pids("api_server")
    os.kill(first, signal.SIGKILL)
    eventually(lambda: set(servers.pids("api_server")) - {first, second})
    eventually(lambda: _is_served(servers.url) and _num_listening(servers.url) == 2)
    assert all(_is_served(servers.url) for _ in range(30))  # also by the new one
    assert {_complete(servers.url) for _ in range(4)} == texts
    with connect(servers.url) as connection:
        body = b'{"prompt": "Once", "max_tokens": 500, "ignore_eos": true, "stream": true, "temperature": 0}'
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        stream = connection.getresponse()
        assert stream.read(6) == b"data: "
        os.kill(core, signal.SIGKILL)
        servers.process.send_signal(signal.SIGTERM)
        assert stream.read().endswith(b"data: [DONE]\n\n")
    assert servers.wait() == 0, "".join(servers.lines)
    assert not any("Traceback" in line for line in servers.lines), "".join(servers.lines)
    assert not any(Path(f"/proc/{pid}").exists() for pid in (core, first, second))


def _metrics(servers: Servers) -> bytes:
    return ask(servers.url, "/metrics").body


def _is_served(url: str) -> bool:
    """Whether a request is answered. Fails where a server refuses it because it is being started."""
    answer = ask(url, "/v1/models")
    assert answer.status == 200, answer.body
    return True


def _num_listening(url: str) -> int:
    """The number of sockets that accept connections at the address."""
    port = f":{int(url.rpartition(':')[2]):04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(local.endswith(port) and state == "0A" for _, local, _, state, *_ in rows)


def test_what_no_server_can_do_ends_all_with_its_message(tmp_path: Path) -> None:
    servers = Servers("--uds", str(tmp_path / "socket"), "--max-model-len", "999999")
    assert servers.wait() != 0
    assert "max_model_len" in "".join(servers.lines)
    assert not (tmp_path / "socket").exists()


def test_servers_share_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    servers = Servers("--uds", str(path))
    try:
        command = ["curl", "-s", "--unix-socket", str(path), "http://localhost/health"]
        found = subprocess.run(command, capture_output=True, check=True, timeout=100).stdout
        assert b'"state":"ready"' in found
    finally:
        servers.process.send_signal(signal.SIGTERM)
        assert servers.wait() == 0, "".join(servers.lines)
    assert not path.exists()


def test_a_server_that_cannot_be_started_ends_all_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start_cores(config: Any) -> Any:
        await asyncio.sleep(100)

    def spawn(*arguments: Any, **options: Any) -> Any:
        raise OSError("no more processes")

    monkeypatch.setattr(api_servers.processes, "spawn", spawn)
    with bind("127.0.0.1", 0) as listener, pytest.raises(OSError, match="no more processes"):
        ApiServers(EngineArgs(model="octavo-tiny"), ServerArgs(api_server_count=2), listener).run(start_cores)


def test_a_server_that_cannot_be_started_again_is_tried_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start_cores(config: Any) -> Any:
        await asyncio.sleep(100)

    num_tries = 0

    def spawn(*arguments: Any, **options: Any) -> Any:
        nonlocal num_tries
        num_tries += 1
        if num_tries == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        raise OSError("no more processes")

    monkeypatch.setattr(api_servers.processes, "spawn", spawn)
    monkeypatch.setattr(api_servers, "BACK_OFF_S", 0.01)
    with bind("127.0.0.1", 0) as listener:
        servers = ApiServers(EngineArgs(model="octavo-tiny"), ServerArgs(api_server_count=2), listener)
        servers._is_served = True
        assert servers.run(start_cores) == 0
    assert num_tries >= 3


@pytest.mark.anyio
async def test_a_stopped_server_is_killed_and_one_that_goes_on_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_servers, "LOOK_S", 0.05)
    with subprocess.Popen(["sleep", "60"]) as stopped, subprocess.Popen(["sleep", "60"]) as other:
        tasks = [asyncio.create_task(api_servers.kill_if_stopped(each)) for each in (stopped, other)]
        stopped.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(100):
            await tasks[0]
        await asyncio.sleep(0.2)
        assert stopped.wait(100) == -signal.SIGKILL
        assert other.poll() is None
        tasks[1].cancel()
        other.kill()
