"""Adapters of requests: which are in host memory, and which slot of the device each has.

Requests whose adapter is being read wait, and later ones pass them; a read that fails ends them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import Any, Final, NamedTuple

from octavo.core.adapter import LoRARequest
from octavo.core.messages import MOST_ADAPTER_NAMES, EngineCoreOutput
from octavo.core.outputs import RequestError
from octavo.core.sequence import SequenceGroup, SequenceStatus
from octavo.scheduler.registry import Registry
from octavo.scheduler.waiting_groups import AdapterState

_POLL_S: Final = 0.005
"""How soon an idle core asks again whether an adapter has been read."""
_MOST_UNCOLLECTED: Final = 64
"""How many failures of reads are kept until the caller of `read` asks for them."""


class AdapterCalls(NamedTuple):
    """call: makes a control call on every rank. wake: makes a waiting core step; called from any thread."""

    call: Callable[..., list[Any]]
    wake: Callable[[], None]


class Adapters:
    """The adapters in host memory, by their digests: at most `num_host`, and more only for requests that have begun.
    Adapters in one of the slots 1 … `num_slots` are not dropped. Both evict the least recently used adapter.
    """

    def __init__(self, registry: Registry, calls: AdapterCalls, num_slots: int, num_host: int) -> None:
        self._registry = registry
        self._call, self._wake = calls
        self._num_slots = num_slots
        self._num_host = num_host
        self._free = list(range(num_slots, 0, -1))
        self._slots: OrderedDict[str, int] = OrderedDict()
        self._host: OrderedDict[str, None] = OrderedDict()
        self._reading: dict[str, LoRARequest] = {}
        self._failed: dict[str, str] = {}
        self._uncollected: OrderedDict[str, str] = OrderedDict()
        """Failures that no request has ended with, for the next `read`."""
        self._names_of: tuple[int, tuple[str, ...]] = (-1, ())
        """`num_adapter_changes`, and the names of adapters of waiting groups that steps report at that time."""
        self._timer: threading.Timer | None = None

    @property
    def is_reading(self) -> bool:
        return bool(self._reading)

    def read(self, adapter: LoRARequest) -> str | None:
        """Read an adapter into host memory. Returns an empty string when it is there, None while it is being read, and
        else why it cannot be used."""
        digest = adapter.digest
        if digest in self._host:
            self._host.move_to_end(digest)
            return ""
        if digest in self._uncollected:
            return self._uncollected.pop(digest)
        states = self._call("read_adapter", adapter.lora_path, digest)
        error = next(filter(None, states), "")
        if not error and None in states:
            self._reading[digest] = adapter
            self._poll_later()
            return None
        self._end_reading(digest)
        if error:
            self._call("drop_adapter", digest)
            return error
        self._host[digest] = None
        self._trim()
        return ""

    def restart(self) -> None:
        """Assume that the ranks hold no adapter: each is read again when it is needed."""
        self._free = list(range(self._num_slots, 0, -1))
        self._slots.clear()
        self._host.clear()
        for digest in list(self._reading):
            self._end_reading(digest)

    def _trim(self) -> None:
        if len(self._host) <= self._num_host:
            return
        held = self._held()
        for digest in list(self._host)[:-1]:
            if len(self._host) <= self._num_host:
                return
            if digest not in held and digest not in self._slots:
                del self._host[digest]
                self._call("drop_adapter", digest)

    def _poll_later(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(_POLL_S, self._poll)
            self._timer.daemon = True
            self._timer.start()

    def _poll(self) -> None:
        # before the core wakes: it may ask for the next poll while this thread still runs
        self._timer = None
        self._wake()

    def make_ready(self, group: SequenceGroup, *, may_preempt: bool = False) -> str:
        """Return why the group's adapter cannot have a slot now; an empty string when it can. An adapter that is absent
        is read, while fewer are read than there are slots for; until then others pass the waiting groups with it.
        may_preempt: the slots of running groups count as free."""
        adapter = group.request.lora_request
        if adapter is None or adapter.digest in self._host:
            return ""
        digest = adapter.digest
        num_used = 0 if may_preempt else len(self._in_use())
        has_turn = digest not in self._reading and len(self._reading) + num_used < self._num_slots
        if has_turn and digest not in self._failed:
            error = self.read(adapter)
            if error == "":
                return ""
            if error is not None:
                self._failed[digest] = error
        state = AdapterState.READING if digest in self._reading else AdapterState.UNREAD
        self._registry.waiting.set_state(adapter.key, state)
        return f"adapter {adapter.lora_name} is being read"

    def assign(self, group: SequenceGroup) -> None:
        """Give a group that begins to run, and whose adapter is ready, the slot of its adapter."""
        adapter = group.request.lora_request
        if adapter is None:
            return
        slot = self._slots.pop(adapter.digest, None)
        if slot is None:
            if self._free:
                slot = self._free.pop()
            else:
                in_use = self._in_use()
                slot = self._slots.pop(next(digest for digest in self._slots if digest not in in_use))
            self._call("load_adapter", slot, adapter.digest)
            self._registry.log.note("adapter", group.request, f"{adapter.lora_name} is loaded into slot {slot}")
        self._slots[adapter.digest] = group.adapter = slot
        self._host.move_to_end(adapter.digest)

    def _in_use(self) -> set[str]:
        """Return the adapters of groups with blocks on the device."""
        return _digests(self._registry.on_device)

    def _held(self) -> set[str]:
        """Return the adapters of groups that have begun, which may need them again though their files have changed."""
        registry = self._registry
        return _digests(chain(registry.on_device, registry.swapped, registry.waiting.preempted_with_adapters))

    def _end_reading(self, digest: str) -> None:
        """Note that an adapter is not read any more: waiting groups with it are looked at again."""
        self._reading.pop(digest, None)
        for group in self._registry.waiting.one_of_each_adapter():
            if digest in _digests([group]):
                self._registry.waiting.set_state(str(group.request.adapter), AdapterState.READY)

    def stats(self) -> dict[str, Any]:
        """Return the fields of `SchedulerStats` about adapters."""
        waiting = self._registry.waiting
        if waiting.num_adapter_changes != self._names_of[0]:
            first = islice(waiting.one_of_each_adapter(), MOST_ADAPTER_NAMES)
            self._names_of = waiting.num_adapter_changes, _names(first)
        names = self._names_of[1]
        if swapped := self._swapped_alone():
            names = tuple(sorted({*names, *_names(swapped.values())}))[:MOST_ADAPTER_NAMES]
        return {
            "max_adapters": self._num_slots,
            "running_adapters": _names(self._registry.on_device),
            "num_waiting_adapters": waiting.num_adapters + len(swapped),
            "waiting_adapters": names,
        }

    def _swapped_alone(self) -> dict[str, SequenceGroup]:
        """Return one swapped group for each adapter that no waiting group has."""
        return {
            group.request.adapter: group
            for group in self._registry.swapped
            if group.request.adapter is not None and not self._registry.waiting.has_adapter(group.request.adapter)
        }

    def collect(self) -> None:
        """Note reads that have ended, and drop adapters beyond the limit, before a step is planned."""
        for adapter in list(self._reading.values()):
            if error := self.read(adapter):
                self._failed[adapter.digest] = error
        self._trim()

    def end_failed(self, now: float) -> None:
        """End the requests whose adapter could not be read."""
        if not self._failed:
            return
        uncollected = dict(self._failed)
        for group in list(self._registry.groups.values()):
            adapter = group.request.lora_request
            if adapter is None or adapter.digest not in self._failed or group in self._registry.on_device:
                continue
            uncollected.pop(adapter.digest, None)
            message = f"the adapter {adapter.lora_name} cannot be used: {self._failed[adapter.digest]}"
            error = RequestError(message, field="lora_request", code="adapter_unusable")
            self._registry.end_group(group, SequenceStatus.FINISHED_ERROR, now)
            self._registry.send(EngineCoreOutput.failed(group.request_id, error, group.metrics))
        self._failed.clear()
        self._uncollected.update(uncollected)
        while len(self._uncollected) > _MOST_UNCOLLECTED:
            self._uncollected.popitem(last=False)


def _digests(groups: Iterable[SequenceGroup]) -> set[str]:
    return {group.request.lora_request.digest for group in groups if group.request.lora_request is not None}


def _names(groups: Iterable[SequenceGroup]) -> tuple[str, ...]:
    """Return the names of the groups' adapters, sorted, each once."""
    names = {group.request.lora_request.lora_name for group in groups if group.request.lora_request is not None}
    return tuple(sorted(names))
