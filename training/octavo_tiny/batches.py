"""Batches for training: an endless stream of freshly generated documents, packed into rows without cutting any.

Nothing is ever read twice: document numbers only grow, and a resumed run goes on where the last one stopped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from tokenizers import Tokenizer

from training.octavo_tiny.corpus import EARLY_WEIGHTS, END_OF_TEXT, make_documents
from training.octavo_tiny.tokenizer import token_id

DOCUMENTS_PER_DRAW = 256
IGNORED = -100


@dataclass(frozen=True)
class RowShape:
    """The rows of a batch: how many, and how many tokens each of them holds."""

    rows: int
    length: int


def pack(documents: list[list[int]], shape: RowShape) -> tuple[list[list[int]], list[list[int]]]:
    """Put documents into rows, each into the first row with room; return the rows and the documents left over."""
    rows: list[list[int]] = [[] for _ in range(shape.rows)]
    left = []
    for document in documents:
        for row in rows:
            if len(row) + len(document) <= shape.length:
                row.extend(document)
                break
        else:
            left.append(document)
    return rows, left


class PackedStream:
    """Draws documents from the generator and hands out packed batches of two row lengths."""

    def __init__(
        self, tokenizer: Tokenizer, seed: int, short: RowShape, long: RowShape, next_document: int = 0
    ) -> None:
        self.tokenizer = tokenizer
        self.seed = seed
        self.short, self.long = short, long
        self.next_document = next_document
        self.padding = token_id(tokenizer, END_OF_TEXT)
        self._order = Random(f"{seed}/{next_document}/rows")
        self._short_documents: list[list[int]] = []
        self._long_documents: list[list[int]] = []

    def _draw(self, weights: Sequence[float]) -> None:
        """Generate and tokenise more documents; those too long for a short row wait for a long one."""
        documents = make_documents(self.seed, self.next_document, DOCUMENTS_PER_DRAW, weights=weights)
        self.next_document += DOCUMENTS_PER_DRAW
        for encoding in self.tokenizer.encode_batch_fast([document.text for document in documents]):
            ids = encoding.ids
            if len(ids) <= self.short.length:
                self._short_documents.append(ids)
            elif len(ids) <= self.long.length:
                self._long_documents.append(ids)

    def next_batch(
        self, long_share: float, weights: Sequence[float] = EARLY_WEIGHTS
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Return the input rows and the target rows of a batch, a long-row one with chance `long_share`.

        `weights` are those of the kinds of text, should more have to be generated.

        The targets are the inputs moved by one; positions that only fill a row are `IGNORED`.
        """
        is_long = self._order.random() < long_share
        shape = self.long if is_long else self.short
        wanted = shape.rows * shape.length
        while sum(map(len, self._short_documents)) < 2 * wanted:
            self._draw(weights)
        long_documents = self._long_documents if is_long else []
        rows, left = pack(long_documents + self._short_documents, shape)
        if is_long:
            self._long_documents = [ids for ids in left if len(ids) > self.short.length]
            self._short_documents = [ids for ids in left if len(ids) <= self.short.length]
        else:
            self._short_documents = left
        inputs, targets = [], []
        for row in rows:
            fill = shape.length + 1 - len(row)
            inputs.append((row + [self.padding] * fill)[: shape.length])
            targets.append((row[1:] + [IGNORED] * (fill + 1))[: shape.length])
        return inputs, targets
