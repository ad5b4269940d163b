"""Policies and their names."""

from __future__ import annotations

from octavo.config.args import EngineArgs
from octavo.config.fields import arguments
from octavo.scheduler.policies import POLICIES


def test_the_policies_that_may_be_asked_for_are_those_that_there_are() -> None:
    assert arguments(EngineArgs)["scheduling_policy"].arg.choices == tuple(POLICIES)
