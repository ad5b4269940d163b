"""The control calls of workers. Imports no torch."""

from __future__ import annotations

from typing import Any, Final

from octavo.config.explain import MemoryPlan
from octavo.errors import ConfigError
from octavo.kv_transfer.messages import PeerRank, TierFolder

CALLS: Final[dict[str, Any]] = {
    "prepare": MemoryPlan,
    "load": MemoryPlan,
    "allocate": None,
    "encode_media": None,
    "op_choices": list[tuple[str, str, str]],
    "identity": dict[str, str],
    "open_tiers": list[TierFolder],
    "time_steps": None,
    "open_transfer": PeerRank | None,
    "release_memory": None,
    "open_weights": str | None,
    "sleep": None,
    "load_again": str | None,
    "wake_up": None,
    "read_adapter": str | None,
    "drop_adapter": None,
    "load_adapter": None,
    "profile": str | None,
}
"""Control calls, and the types of their values."""

STARTING: Final = ("prepare", "load", "allocate", "load_again", "wake_up")
"""The calls of a start, in their order, and those that load weights again or end a sleep."""

UNLIMITED: Final = (*STARTING, "profile")
"""The calls that take as long as a disk does, or a trace of minutes that is written to one."""

MAY_FAIL: Final = ("open_weights", "load_again", "profile")
"""The calls that return why they failed. Where another call fails, so does the rank."""


OF_ADAPTERS: Final = ("read_adapter", "drop_adapter", "load_adapter")
"""The calls that the adapters of the loaded model answer."""


def check_call(method: str) -> None:
    """Raise ConfigError for a name that is none of `CALLS`."""
    if method not in CALLS:
        raise ConfigError(f"{method} is not a call of the worker; there are: {', '.join(CALLS)}")
