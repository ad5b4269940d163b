"""A query and all its documents in one prompt, for jina-reranker-v3: a document's score is the cosine of the vectors of
two marks, one behind the document and one behind the query. Source: https://arxiv.org/abs/2509.25085."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from octavo.core.pooling import cosine
from octavo.core.prompt import Prompt
from octavo.engine.input.input_processor import InputProcessor
from octavo.engine.input.vector_input import matched
from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SYSTEM: Final = (
    "You are a search relevance expert who can determine a ranking of the passages based on how relevant they are to "
    "the query. If the query is a question, how relevant a passage is depends on how well it answers the question. If "
    "not, try to analyze the intent of the query and assess how well each passage satisfies the intent. If an "
    "instruction is provided, you should follow the instruction when determining the ranking."
)
"""What the model was trained with, as all that is written around texts; without it its scores mean nothing."""
_BEGINNING: Final = (
    "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nI will provide you with {count} passages, each "
    "indicated by a numerical identifier. Rank the passages based on their relevance to query: {query}\n"
)
_INSTRUCT: Final = "<instruct>\n{}\n</instruct>\n"
_END: Final = "\n</query><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def lists_of(queries: Sequence[str], documents: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return one query with all documents, or each of several with its own. Raises InvalidRequest."""
    pairs = matched(queries, documents)
    return [(queries[0], [*documents])] if len(queries) == 1 else [(query, [one]) for query, one in pairs]


def list_prompt(tools: InputProcessor, query: str, documents: Sequence[str], instruct: str | None = None) -> Prompt:
    """Return the prompt of a query and its documents, in whose texts special tokens are text. Raises InvalidRequest."""
    assert tools.vectors.config is not None, "the model ranks lists"
    of_document, of_query = tools.vectors.config.row_token_ids
    tokenizer = tools.tokenizer
    spellings = tokenizer.spellings_with([tokenizer.token_text(each) for each in (of_document, of_query)])
    query, instruct = (spellings.hide(each, "query") for each in (query, instruct or ""))
    before = _BEGINNING.format(system=_SYSTEM, count=len(documents), query=query)
    before += _INSTRUCT.format(instruct) if instruct else ""
    token_ids: list[int] = []
    for number, document in enumerate(documents):
        before += f'<passage id="{number}">\n{spellings.hide(document, "documents")}'
        token_ids += [*tokenizer.encode(*_shown(spellings.show(before))), of_document]
        before = "\n</passage>\n"
    for text, mark in ((f"{before}<query>\n{query}", [of_query]), (_END, [])):
        token_ids += [*tokenizer.encode(*_shown(spellings.show(text))), *mark]
    if (token_ids.count(of_document), token_ids.count(of_query)) != (len(documents), 1):
        raise InvalidRequest(
            "a text spells the mark of documents or queries, which is no special token of this tokenizer; leave it out",
            field="documents",
        )
    return Prompt(token_ids=token_ids)


def _shown(found: tuple[str, tuple[int, ...]]) -> tuple[str, bool, tuple[int, ...]]:
    text, cuts = found
    return text, False, cuts


def list_scores(rows: NDArray[np.float32]) -> list[float]:
    """Return the score of each document. rows: a vector of each, and behind them that of the query."""
    return [cosine(rows[-1], row) for row in rows[:-1]]
