"""The messages between the control plane and the device plane: steps to the workers, results back."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from octavo.core.media import MediaInput, View
from octavo.core.outputs import RequestError
from octavo.core.pooling import PooledPrompt
from octavo.core.sampling_params import SamplingParams
from octavo.core.step_times import PartTime

# The structs that come once per row have `gc=False`: they hold no cycles, and a thousand of them a step would otherwise
# set the garbage collector off every few steps. What most rows lack is an empty tuple, for which nothing is allocated.


class NewSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence whose state the worker does not hold, or no longer holds."""

    seq_id: int
    index: int
    epoch: int
    token_ids: list[int]
    """All known tokens; of a fork, those that follow the shared ones."""
    num_prompt_tokens: int
    block_tables: list[list[int]]
    """Block ids in each cache group."""
    params: SamplingParams
    end_token_ids: tuple[int, ...] = ()
    """All ids that end the sequence (end-of-sequence and stop ids): banned until `min_tokens` is reached."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    parent_id: int | None = None
    """A sequence that the worker still holds, of which this one is a fork."""
    num_shared_tokens: int = 0
    """Leading tokens that are the parent's."""
    adapter: int = 0
    """Index of the adapter that its rows use, from 1 on; 0 for none."""
    grids: tuple[tuple[int, ...], ...] = ()
    """(offset, rows, columns) of the prompt's images and of the frames of its videos, if positions depend on them
    (M-RoPE); after these the times of frames that are one span."""
    are_grids_apart: bool = False
    """`MediaInput.is_apart` of these."""
    whole_spans: tuple[tuple[int, int], ...] = ()
    """(offset, length) of the prompt's tokens that attend to each other, as those of images may."""
    views: tuple[View, ...] = ()
    """Vectors of encoders' outputs that its tokens see, where layers read these through caches."""
    media: tuple[MediaInput, ...] = ()
    """Inputs whose encoders' outputs are written to its blocks before its first row, where layers read these through
    caches."""
    pooled: PooledPrompt | None = None
    """Set if the prompt becomes a vector."""
    is_drafted: bool = False
    """Whether the worker's own draft model computes its prompt too."""


class TableChange(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The block table of a sequence in one cache group is `block_ids` from entry `first_index` on."""

    group: int
    first_index: int
    block_ids: list[int]


class ScheduledSequence(msgspec.Struct, frozen=True, gc=False):
    """One row of the batch: compute the KV of tokens [start, start + num_tokens) of a sequence."""

    seq_id: int
    epoch: int
    start: int
    num_tokens: int
    """Drafts included."""
    num_samples: int
    """Tokens to draw from the logits of the last position: 0 in the middle of a prompt, 1, or n at its end. Sample i of
    n is drawn for the child with index i."""
    table_changes: tuple[TableChange, ...] = ()
    """Changes of its block tables since its last row: at most one in each cache group, mostly none."""
    num_prompt_logprobs: int = 0
    """Positions of this row, from its first, whose successor's log-probability is wanted."""
    num_candidates: int = 0
    """Number of the likeliest tokens after the last position to return instead of drawing (beam search)."""
    token_ids: tuple[int, ...] = ()
    """The last known tokens of the sequence, which were chosen or drawn since its previous row. They are sent for
    groups that wait for results, and to workers that do not draw tokens."""
    drafts: tuple[int, ...] = ()
    """Guesses that follow the known tokens, the last of the row's tokens. A token is drawn after the last known token
    and after each draft. The result is the drawn tokens up to and with the first that differs from the draft in its
    place, so it does not depend on the drafts."""
    num_proposals: int = 0
    """Guesses that the worker's own draft model makes after the drawn tokens, for a later row. The row's blocks have
    room for as many more tokens."""


class Proposals(NamedTuple):
    """What rows request from the worker's draft model: `num_tokens` guesses each, at most `num_rows` rows.

    catches_up: also rows of sequences whose prompts the draft model has not computed.
    """

    num_tokens: int
    num_rows: int
    catches_up: bool = False


NO_PROPOSALS: Final = Proposals(0, 0)


class BlockCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copy the content of one block to another, in all layers of a cache group."""

    source: int
    target: int
    group: int = 0


class BlockOps(msgspec.Struct, frozen=True, kw_only=True):
    """Moves and copies of blocks that take effect before the forward pass, in this order."""

    swap_outs: list[BlockCopy] = []
    swap_ins: list[BlockCopy] = []
    copies: list[BlockCopy] = []


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One step. Order of effect: new sequences are added, finished ones dropped, then BlockOps, then the rows.

    `finished_ids` are sequences whose state the worker drops (finished, aborted, preempted). They are dropped after the
    new ones are added because a fork may name one of them as its parent. An id in both lists was preempted and comes
    back in the same step: its new state stays.

    connector: commands of KV transfers from the scheduler's side to the ranks (`kv_transfer.messages.RankCommands`);
    None for none. A step without rows may carry them alone.
    """

    step_id: int
    new_sequences: list[NewSequence]
    rows: list[ScheduledSequence]
    finished_ids: list[int]
    block_ops: BlockOps
    connector: bytes | None = None

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Log-probabilities at one position. `logprob` and `rank` (1 is the likeliest) are those of `token_id`;
    `top_ids` and `top_logprobs` are the likeliest tokens in falling order. `logprob` is None where it is not requested.

    ranks: ranks of `top_ids` if these are not the likeliest tokens but those that the request names. scores: for the
    candidates of a beam, which are in falling order of them: `top_logprobs` after the processors, -inf for a barred
    token; empty if no processor changes a log-probability. stop_places: for the candidates of a beam, the indexes in
    `top_ids` of those that complete a stop string.
    """

    token_id: int
    logprob: float | None = None
    rank: int = 0
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    ranks: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    stop_places: tuple[int, ...] = ()


class PromptLogprobs(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Log-probabilities of the prompt tokens at positions first_position, first_position + 1, …"""

    first_position: int
    tokens: list[TokenLogprobs]


class RowOutput(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Results of one row, in the order of the step's rows."""

    seq_id: int
    epoch: int
    tokens: list[TokenLogprobs]
    """The drawn tokens: one, or several after drafts. In a row with several samples, token i is the first one of the
    child with index i."""
    prompt_logprobs: PromptLogprobs | None = None
    error: RequestError | None = None
    """Ends the request of this row; others continue."""
    candidates: TokenLogprobs | None = None
    """The likeliest tokens, of a row with `num_candidates`; its own `token_id` is the first."""
    is_undrawn: bool = False
    """The row should have drawn and has to be computed again, because its grammar is not compiled yet."""
    forced: tuple[int, ...] = ()
    """Tokens that the grammar determines after the drawn ones, if guesses are wanted."""
    proposed: tuple[int, ...] = ()
    """Guesses of the worker's draft model after `forced`, at most the row's `num_proposals`."""
    pooled: bytes | None = None
    """The vector of a completed prompt, float32."""


class ModelRunnerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one step.

    swap_s: seconds that moving blocks to and from the host took; 0 where it is not known.
    has_guesses: whether a row has `forced` or `proposed` tokens.
    draft_s: seconds that the worker's draft model took, and num_draft_passes its forward passes.
    times: the time of each part of the step on the device, if requested from the workers.
    """

    step_id: int
    rows: list[RowOutput]
    swap_s: float = 0.0
    has_guesses: bool = False
    draft_s: float = 0.0
    num_draft_passes: int = 0
    times: dict[str, PartTime] | None = None
