"""Prompts of pairs of texts, of which a model says how well they go together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from octavo.core.pooling import CLASSIFY
from octavo.core.prompt import Prompt
from octavo.engine.chat_template import ChatTemplate
from octavo.engine.vector_input import VectorInput
from octavo.errors import InvalidRequest

_RERANKER: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruct}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""What Qwen3-Reranker was trained with; without it its scores mean nothing."""
_INSTRUCT: Final = "Given a web search query, retrieve relevant passages that answer the query"


def pair_of(
    vectors: VectorInput, template: ChatTemplate | None, query: str, document: str, instruct: str | None
) -> Prompt:
    """Return the prompt of a pair for a model that scores pairs.

    A model that judges by its next token gets the pair in its chat template, where that has roles for query and
    document, else in Qwen3-Reranker's. instruct: what is judged, for such a model. Raises InvalidRequest.
    """
    for name, text in (("query", query), ("document", document)):
        if not isinstance(text, str):
            raise InvalidRequest(f"{name} is {type(text).__name__}, expected text", field=name)
    if not vectors.checked(CLASSIFY).token_ids:
        return Prompt(text=query, second=document)
    if template is not None and all(f'"{role}"' in template.source for role in ("query", "document")):
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        if instruct is not None:
            messages.insert(0, {"role": "system", "content": instruct})
        return Prompt(text=template.render(messages), add_special_tokens=False)
    text = _RERANKER.format(instruct=instruct or _INSTRUCT, query=query, document=document)
    return Prompt(text=text, add_special_tokens=False)


def matched(queries: Sequence[str], documents: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of one query with each document, or of each with its own. Raises InvalidRequest."""
    if len(queries) == 1:
        return [(queries[0], document) for document in documents]
    if len(queries) != len(documents):
        raise InvalidRequest(
            f"there are {len(queries)} first texts and {len(documents)} second ones; give one first text, or as many",
            field="text_1",
        )
    return list(zip(queries, documents, strict=True))
