"""The log-probabilities of a sequence's tokens in arrays, which become objects where they are read."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from octavo.core.outputs import Logprob
from octavo.core.step import TokenLogprobs


def entries_of(token: TokenLogprobs) -> Iterator[tuple[int, float, int | None]]:
    """Yield (token id, log-probability, rank) of the token at a position first, then of the likeliest ones in falling
    order, or of those that are asked for."""
    assert token.logprob is not None, "computed for a request without logprobs"
    yield token.token_id, token.logprob, token.rank or None
    seen = {token.token_id}
    ranks = token.ranks or range(1, len(token.top_ids) + 1)
    for rank, token_id, logprob in zip(ranks, token.top_ids, token.top_logprobs, strict=True):
        if token_id not in seen:
            seen.add(token_id)
            yield token_id, logprob, rank


class LogprobList(Sequence[dict[int, Logprob]]):
    """A mapping from token id to Logprob for each position. An entry takes 16 bytes; as an object it takes 250.

    A slice shows the same arrays. msgspec encodes it with `enc_hook=list`. text_of: returns the text of a token, None
    for none.
    """

    def __init__(self, text_of: Callable[[int], str | None]) -> None:
        self._text_of = text_of
        self._ids, self._ranks, self._values = array("i"), array("i"), array("d")
        self._ends = array("q", [0])
        """Entries up to the end of each position, behind those before the first."""
        self._shown: range | None = None

    def append(self, token: TokenLogprobs) -> None:
        """Add a position."""
        for token_id, logprob, rank in entries_of(token):
            self._ids.append(token_id)
            self._values.append(logprob)
            self._ranks.append(rank or 0)
        self._ends.append(len(self._ids))

    @property
    def num_entries(self) -> int:
        """Return the entries of all positions."""
        shown = self._places
        return self._ends[shown.stop] - self._ends[shown.start]

    @property
    def _places(self) -> range:
        return range(len(self._ends) - 1) if self._shown is None else self._shown

    def _position(self, place: int) -> dict[int, Logprob]:
        found = {}
        for n in range(self._ends[place], self._ends[place + 1]):
            token_id = self._ids[n]
            found[token_id] = Logprob(self._values[n], self._ranks[n] or None, self._text_of(token_id))
        return found

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[dict[int, Logprob]]: ...
    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | Sequence[dict[int, Logprob]]:
        if not isinstance(index, slice):
            return self._position(self._places[index])
        places = self._places[index]
        if places.step != 1:
            return [self._position(place) for place in places]
        view = LogprobList(self._text_of)
        view._ids, view._ranks, view._values, view._ends = self._ids, self._ranks, self._values, self._ends
        view._shown = range(places.start, max(places.start, places.stop))
        return view

    def __add__(self, other: Sequence[dict[int, Logprob]]) -> list[dict[int, Logprob]]:
        return [*self, *other]

    def __radd__(self, other: Sequence[dict[int, Logprob]]) -> list[dict[int, Logprob]]:
        return [*other, *self]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr([*self])

    def __reduce__(self) -> tuple[Any, ...]:  # for other processes, which have no tokenizer
        return list, ([*self],)
