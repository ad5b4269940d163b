"""Engines of other machines behind one front: found by a list and a file, and connected to again whenever they go.

A file has a line `prefill host:port` or `decode host:port` for each engine; it is read again when it changes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, cast

import msgspec

from octavo.config.schema import EngineConfig
from octavo.config.sources import file_stamp
from octavo.core.messages import CoreReady
from octavo.engine.cores.core_client import ProcessClient
from octavo.engine.cores.core_link import CoreAddress, LinkHello, connect
from octavo.engine.cores.replica import Replica
from octavo.engine.cores.replicas import MAX_WAITING, Replicas
from octavo.engine.cores.router import ROUTERS
from octavo.errors import ConfigError, EngineDeadError, OctavoError

RETRY_S: Final = 0.25
"""The wait after the first attempt to connect to an engine; each further one is twice as long, up to `MOST_RETRY_S`."""
MOST_RETRY_S: Final = 5.0

LOOK_S: Final = 1.0
"""How often the file is looked at."""

_EVERY_HOST: Final = ("0.0.0.0", "::")

_log = logging.getLogger(__name__)


class Engine(NamedTuple):
    """An engine that a front is to use. role: "prefill" or "decode"."""

    role: str
    address: CoreAddress

    def __str__(self) -> str:
        return f"the {self.role} engine at {self.address}"


def read_engines(path: Path) -> list[Engine]:
    """Return the engines of a file. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"engines is {path}, which cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or words[0] not in ("prefill", "decode"):
            raise ConfigError(f"{path}, line {number}: {line!r:.80} is not `prefill host:port` or `decode host:port`")
        try:
            found.append(Engine(words[0], CoreAddress.read(words[1])))
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
    return found


class RemoteReplicas:
    """Connects a front to its engines. `start` returns the replicas, and `tend` adds and removes some as the list and
    the file change.
    """

    def __init__(
        self, named: Sequence[Engine], file: Path | None, secret: bytes, hello: LinkHello, *, timeout_s: float = 120.0
    ) -> None:
        """timeout_s: how long a start waits for the first engine that decodes, and requests that have begun for the
        next one when all have gone."""
        self._named = list(named)
        self._file = file
        self._secret = secret
        self._hello = hello
        self._timeout_s = timeout_s
        self._like: tuple[LinkHello, CoreReady] | None = None
        """The properties of the first engine, which all others must share."""
        self._sends_embeds = False
        self._replicas: dict[Engine, Replica] = {}

    def _wanted(self) -> list[Engine]:
        return list(dict.fromkeys(self._named + ([] if self._file is None else read_engines(self._file))))

    async def start(self, config: EngineConfig) -> Replicas:
        """Return the replicas that could be connected to, one that decodes among them; others follow later.

        Raises ConfigError for an engine that cannot be used as it is, and EngineDeadError when there is none in time.
        """
        deadline, logged = time.monotonic() + self._timeout_s, ""
        self._sends_embeds = config.model.embedding_size is not None
        found: dict[Engine, ProcessClient] = {}
        try:
            while True:
                missing = [each for each in self._wanted() if each not in found]
                results = await asyncio.gather(*map(self._connect, missing), return_exceptions=True)
                for engine, result in zip(missing, results, strict=True):
                    if isinstance(result, ProcessClient):
                        found[engine] = result
                failures = [each for each in results if isinstance(each, BaseException)]
                for failure in failures:
                    if not isinstance(failure, EngineDeadError):
                        raise failure
                if any(engine.role == "decode" for engine in found):
                    break
                reasons = "; ".join(map(str, failures)) or "none is named"
                if time.monotonic() > deadline:
                    raise EngineDeadError(f"no engine that decodes for {self._timeout_s:g} s: {reasons}")
                if reasons != logged:
                    logged = reasons
                    _log.warning("waiting up to %g s for an engine that decodes: %s", self._timeout_s, reasons)
                await asyncio.sleep(MOST_RETRY_S / 5)
        except BaseException:
            await asyncio.gather(*(client.shutdown() for client in found.values()))
            raise
        return self._replicas_of(config, found)

    def _replicas_of(self, config: EngineConfig, found: dict[Engine, ProcessClient]) -> Replicas:
        from octavo.engine.cores.split import make_split

        assert self._like is not None, "an engine was found"
        block_size = self._like[1].cache.block_size
        config = msgspec.structs.replace(config, cache=dataclasses.replace(config.cache, block_size=block_size))
        for number, (engine, client) in enumerate(found.items()):
            self._replicas[engine] = self._replica(number, engine, client)
        return Replicas(
            list(self._replicas.values()),
            ROUTERS[config.replicas.router](block_size),
            depth=config.scheduler.max_steps_in_flight,
            max_waiting=config.scheduler.max_queued_requests or MAX_WAITING,
            make_split=partial(make_split, config),
            tend=self.tend,
            most_wait_s=self._timeout_s,
        )

    def _replica(self, number: int, engine: Engine, client: ProcessClient) -> Replica:
        _log.info("%s %d is the engine at %s", engine.role, number, engine.address)

        async def start_again(*_: object) -> ProcessClient:
            return await self._connect_until(engine, lambda: replica.is_stopped)

        replica = Replica(number, client, start_again, max_restarts=None, role=engine.role)
        return replica

    # ---- engines that come and go ----

    async def tend(self, replicas: Replicas) -> None:
        """Add the engines that are wanted and missing, and remove those that are not wanted, until cancelled."""
        seen: object = ...  # no stamp
        while True:
            stamp = file_stamp(self._file)
            if stamp != seen:
                seen = stamp
                try:
                    wanted = self._wanted()
                except ConfigError as error:
                    _log.error("%s; the engines stay as they are", error)
                else:
                    await self._change(replicas, wanted)
            if self._file is None:
                return
            await asyncio.sleep(LOOK_S)

    async def _change(self, replicas: Replicas, wanted: Sequence[Engine]) -> None:
        for engine in [each for each in wanted if each not in self._replicas]:
            assert self._like is not None, "an engine was found"
            absent = cast("ProcessClient", _Absent(self._like[1]))
            replica = self._replicas[engine] = self._replica(replicas.free_number(engine.role), engine, absent)
            replica.is_ready = False
            replicas.add(replica)
        for engine in [each for each in self._replicas if each not in wanted]:
            _log.info("%s is not used any more", engine)
            await replicas.remove(self._replicas.pop(engine))

    # ---- connections ----

    async def _connect_until(self, engine: Engine, is_unwanted: Callable[[], bool]) -> ProcessClient:
        """Connect to an engine, however long that takes. Raises EngineDeadError when it is not wanted any more."""
        wait_s, reason = RETRY_S, ""
        while not is_unwanted():
            try:
                return await self._connect(engine)
            except OctavoError as error:
                if str(error) != reason:
                    reason = str(error)
                    _log.warning("%s; trying again every %g s", reason, MOST_RETRY_S)
            await asyncio.sleep(wait_s)
            wait_s = min(MOST_RETRY_S, 2 * wait_s)
        raise EngineDeadError(f"{engine} is not used any more")

    async def _connect(self, engine: Engine) -> ProcessClient:
        client, core = await connect(engine.address, self._secret, self._hello)
        found = (core, client.ready)
        difference = (
            f"{engine} was started with --role {core.role}"
            if core.role != engine.role
            else _difference(self._like or found, found, str(engine))
        )
        if difference is None and self._sends_embeds and not client.ready.takes_embeds:
            difference = (
                f"{engine} takes no prompts that are vectors, as this proxy does; start it with "
                "--enable-prompt-embeds, or the proxy without"
            )
        if difference is not None:
            await client.shutdown()
            raise ConfigError(difference)
        self._like = self._like or found
        host, _, port = (client.ready.transfer or "").rpartition(":")
        if host.strip("[]") in _EVERY_HOST:
            client.ready.transfer = str(CoreAddress(engine.address.host, int(port)))
        return client


def _difference(like: tuple[LinkHello, CoreReady], found: tuple[LinkHello, CoreReady], name: str) -> str | None:
    """Return why an engine cannot serve requests of another one, with both values; None when it can."""
    (hello, ready), (other, other_ready) = like, found
    settings = [
        *((key, hello.build.get(key), other.build.get(key)) for key in hello.build | other.build),
        ("block_size", ready.cache.block_size, other_ready.cache.block_size),
        ("vocab_size", ready.vocab_size, other_ready.vocab_size),
        ("max_model_len", ready.max_model_len, other_ready.max_model_len),
    ]
    for key, expected, value in settings:
        if value != expected:
            return (
                f"{name} is refused: its {key} is {value}, that of the first engine {expected}; a request must get the "
                "same tokens from each: start it as the others, or restart the proxy when all have changed"
            )
    return None


class _Absent:
    """The client of an engine to which there is no connection yet. ready: what it is expected to be."""

    was_ended = True

    def __init__(self, ready: CoreReady) -> None:
        self.ready = ready

    async def receive(self) -> None:
        raise EngineDeadError("it is not connected yet")

    def send(self, message: msgspec.Struct) -> None:
        """Do nothing: calls that last are sent once there is a connection, and others to replicas that are ready."""

    def begin_shutdown(self) -> None:
        """Do nothing: there is no connection to close."""

    async def shutdown(self, timeout_s: float = 0.0) -> None:
        """Do nothing, as `begin_shutdown`."""
