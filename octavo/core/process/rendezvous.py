"""Where the ranks of a mesh meet."""

from __future__ import annotations

import msgspec


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks of a mesh reach each other. A group whose ranks all share memory uses it, any other uses TCP."""

    memory: int | None = None
    """A descriptor from `os.memfd_create`, empty at first, that ranks of one machine inherit. It may be closed when
    the groups are open."""
    shared_ranks: tuple[int, int] | None = None
    """The first of the ranks that have `memory`, and how many; None for all."""
    address: str = "127.0.0.1"
    """Where the first rank listens."""
    port: int = 0
    host: str | None = None
    """The address under which other ranks reach this one; None for the one that it reaches `address` from."""
    deadline_s: float = 60.0
    """How long a call waits for a rank."""

    def shares_memory(self, ranks: range) -> bool:
        """Return whether all of `ranks` share the memory."""
        if self.memory is None or self.shared_ranks is None:
            return self.memory is not None
        first, count = self.shared_ranks
        return first <= ranks[0] and ranks[-1] < first + count
