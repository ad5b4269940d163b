"""Threads that use one engine take turns, in the order in which they ask."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ThreadTurns:
    """A lock that its owner may take again. Whoever releases it gives it to the thread that has waited longest: one
    that steps the engine in a loop would otherwise have it again before any other thread runs."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._mutex:
            if self._owner in (None, me):
                self._owner = me
                self._depth += 1
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()
        except BaseException:  # Ctrl-C; the turn may have come meanwhile
            with self._mutex:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                else:
                    self._pass_on()
            raise
        self._owner, self._depth = me, 1

    def __exit__(self, *exception: object) -> None:
        with self._mutex:
            self._depth -= 1
            if self._waiting and not self._depth:
                self._pass_on()
            elif not self._depth:
                self._owner = None

    def release_during(self, wait: Callable[[], object]) -> None:
        """Call `wait` without the turn, which others may have meanwhile, and take it again, as often as it was taken.
        Raises what `wait` raises."""
        with self._mutex:
            depth = self._depth
            self._pass_on()
        try:
            wait()
        finally:
            self._take_again(depth)

    def _take_again(self, depth: int) -> None:
        interrupt: BaseException | None = None
        while self._owner != threading.get_ident():
            try:
                self.__enter__()
            except BaseException as error:  # Ctrl-C; the callers of this one are to release a turn that is theirs
                interrupt = error
        self._depth = depth
        if interrupt is not None:
            raise interrupt

    def _pass_on(self) -> None:
        self._owner, self._depth = None, 0
        if self._waiting:
            self._owner = -1  # nobody else may take it before the thread runs
            self._waiting.popleft().release()


class Wakes:
    """Counts the reasons for a core that waits to step again, so that threads can wait for the next one. None is lost:
    whoever waits says up to which number it knows them.

    number: of the reasons. death: why a rank of the core has ended; None while all run.
    """

    def __init__(self) -> None:
        self._counted = threading.Condition()
        self.number = 0
        self.death: str | None = None

    def notify(self) -> None:
        """Count a reason; from any thread."""
        with self._counted:
            self.number += 1
            self._counted.notify_all()

    def notify_death(self, reason: str) -> None:
        """Count the end of a rank; from any thread."""
        self.death = self.death or reason
        self.notify()

    def wait_beyond(self, number: int) -> None:
        """Wait until there are more than `number` reasons."""
        with self._counted:
            self._counted.wait_for(lambda: self.number > number)


S = TypeVar("S", bound=Any)


def in_turn(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Let a method run while no other thread runs one of its object, which has `turns`. Afterwards threads that wait
    for its `wakes` look again."""

    def run(self: S, /, *arguments: P.args, **keywords: P.kwargs) -> T:
        with self.turns:
            try:
                return method(self, *arguments, **keywords)
            finally:
                self.wakes.notify()

    return functools.update_wrapper(run, method)
