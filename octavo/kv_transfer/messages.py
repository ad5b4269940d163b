"""Messages of KV transfers: between the scheduler's side and the ranks, sent with the steps, and between engines.

A transfer is the KV of one prompt, which a decode engine requests from a prefill engine. Its digests are those of the
prompt's full blocks and, last, that of its tail (`BlockManager.transfer_digests`); blocks are counted from its first.
"""

from __future__ import annotations

import msgspec


class PeerRank(msgspec.Struct, frozen=True):
    """The address at which a rank of another engine sends blocks, and its share: first and end of its layers and, in
    each cache group, of its heads.

    host: an address, or the path of a Unix socket, which begins with "/"; then `port` is 0.
    """

    host: str
    port: int
    layers: tuple[int, int]
    heads: list[tuple[int, int]]


# ---- with a step, to all ranks ----


class SendBlocks(msgspec.Struct, frozen=True):
    """Blocks `first`, `first + 1`, … of a transfer can be sent.

    block_ids: for each cache group; 0 for a block that nothing reads. is_fresh: the step with this command computes
    them, so each layer can be sent once the step has computed it.
    """

    transfer: bytes
    first: int
    block_ids: list[list[int]]
    is_fresh: bool


class FetchBlocks(msgspec.Struct, frozen=True):
    """Write blocks `first`, … of a transfer, from the ranks of another engine, into these blocks.

    block_ids: for each cache group; 0 for a block that is not needed. epoch: the start of the other engine; pieces of
    another start are not written. patience_s: seconds for which a rank may send nothing.
    """

    fetch_id: int
    transfer: bytes
    first: int
    block_ids: list[list[int]]
    peers: list[PeerRank]
    epoch: bytes
    patience_s: float = 120.0


class LoadBlocks(msgspec.Struct, frozen=True):
    """Write the blocks with these digests from a tier into these blocks, for each cache group; 0: not needed."""

    fetch_id: int
    tier: str
    digests: list[bytes]
    block_ids: list[list[int]]


class SaveBlocks(msgspec.Struct, frozen=True):
    """Store these blocks under these digests in tiers, after the step with this command."""

    save_id: int
    tiers: list[str]
    digests: list[bytes]
    block_ids: list[list[int]]


class TierFolder(msgspec.Struct, frozen=True):
    """Where a rank keeps blocks: the name of the tier, its folder, the key of the rank's blocks (`folder_key`), and the
    most bytes of all files in the folder."""

    tier: str
    folder: str
    key: bytes
    max_bytes: int


class RankCommands(msgspec.Struct, omit_defaults=True):
    """The commands of a step. Blocks are moved after all earlier steps.

    ends: transfers to forget, on either side; the note `ended` follows when no thread reads or writes their blocks.
    drops: digests of content that was found to be wrong, to be removed from all tiers.
    """

    sends: list[SendBlocks] = []
    fetches: list[FetchBlocks] = []
    loads: list[LoadBlocks] = []
    saves: list[SaveBlocks] = []
    ends: list[bytes] = []
    drops: list[bytes] = []

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__struct_fields__)

    def __add__(self, other: RankCommands) -> RankCommands:
        return RankCommands(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


# ---- from a rank, at any time ----


class Fetched(msgspec.Struct, frozen=True, omit_defaults=True):
    """A fetch or a load has ended on this rank; `error` is empty when all blocks have the right content."""

    fetch_id: int
    error: str = ""
    num_bytes: int = 0
    seconds: float = 0.0

    def beside(self, other: Fetched) -> Fetched:
        """Return the combination of two ranks' notes: the first error, the most bytes and the longest time."""
        num_bytes, seconds = max(self.num_bytes, other.num_bytes), max(self.seconds, other.seconds)
        return Fetched(self.fetch_id, other.error or self.error, num_bytes, seconds)


class RankNotes(msgspec.Struct, omit_defaults=True):
    """The operations that have ended on a rank: fetches and loads, saves, transfers."""

    fetched: list[Fetched] = []
    saved: list[int] = []
    ended: list[bytes] = []


# ---- between engines ----


class PeerHello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of either end. identity: names and values that the bits of KV depend on; they must be the same
    at both ends. layout: memory layout of a block. epoch: 16 random bytes of the engine's start. ranks: the ranks that
    send blocks; empty on the side that fetches.
    """

    identity: dict[str, str]
    layout: str
    block_size: int
    epoch: bytes
    ranks: list[PeerRank] = []


class Want(msgspec.Struct, frozen=True, tag="want"):
    """Requests a transfer, named by 16 random bytes, that holds the blocks with these digests until `TransferDone`."""

    transfer: bytes
    digests: list[bytes]


class TransferAwaited(msgspec.Struct, frozen=True, tag="fetching"):
    """The ranks of the fetching side wait for this transfer, which was requested before."""

    transfer: bytes


class TransferRefused(msgspec.Struct, frozen=True, tag="refused"):
    """A transfer, or with an empty name the connection, is refused."""

    transfer: bytes
    reason: str


class TransferGone(msgspec.Struct, frozen=True, tag="gone"):
    """The blocks of a transfer are no longer held."""

    transfer: bytes


class TransferDone(msgspec.Struct, frozen=True, tag="done"):
    """The side that fetches needs a transfer no longer."""

    transfer: bytes


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sent by either end every few seconds, so that each notices when the other has stopped."""


PeerMessage = PeerHello | Want | TransferAwaited | TransferRefused | TransferGone | TransferDone | Heartbeat
