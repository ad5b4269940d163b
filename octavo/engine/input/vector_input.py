"""Prompts that become vectors or scores: one text or a pair, with all special tokens, cut at the end where asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from octavo.config.pooling.pooling_config import PoolingConfig
from octavo.core.messages import CoreReady
from octavo.core.pooling import CLASSIFY, EMBED, TOKEN_CLASSIFY, TOKEN_EMBED, PooledPrompt, PoolingParams, cosine
from octavo.core.prompt import Prompt, check_token_ids, checked_text
from octavo.core.sampling_params import OutputKind, SamplingParams
from octavo.engine.input.late_interaction import LatePrompts
from octavo.engine.text.chat_template import ChatTemplate
from octavo.engine.text.tokenizer import Tokenizer
from octavo.errors import ContextTooLong, InvalidRequest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")
Writer = Callable[[str], Prompt]

_SIDES: Final = ("query", "document")
_PATHS: Final = {EMBED: "/v1/embeddings", CLASSIFY: "/classify"}
"""Endpoints that return what a model is made for, by its task; that of the others is /pooling."""
FOR_VECTORS: Final = SamplingParams(max_tokens=1, seed=0, detokenize=False, output_kind=OutputKind.FINAL_ONLY)
"""The sampling parameters of requests that draw nothing."""


_RERANKER: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruct}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""What Qwen3-Reranker was trained with; without it its scores mean nothing."""
_INSTRUCT: Final = "Given a web search query, retrieve relevant passages that answer the query"


class VectorInput:
    """Checks requests for vectors against the model, which `config` describes; None of one that writes text."""

    def __init__(self, config: PoolingConfig | None, tokenizer: Tokenizer, ready: CoreReady) -> None:
        self.config = config
        self._tokenizer = tokenizer
        self._ready = ready

    def refuse_text(self) -> None:
        """Raise InvalidRequest where the model makes vectors or scores and no text."""
        if self.config is not None:
            made = "vectors" if self.config.task in (EMBED, TOKEN_EMBED) else "scores"
            raise InvalidRequest(
                f"the model makes {made} and writes no text; use embed, score, classify or encode (by HTTP POST "
                "/v1/embeddings, /score, /classify or /pooling), or start it with runner generate if it can generate",
                code="unsupported_task",
            )

    def read(self, prompt: Prompt, params: PoolingParams) -> tuple[list[int], PooledPrompt]:
        """Return the token ids of a prompt, and what the core needs to know. Raises InvalidRequest."""
        params = self._resolved(params)
        token_ids, second_start = self.read_ids(prompt, params)
        if self.config is not None and self.config.padded_length and not prompt.multi_modal_data:
            token_ids += [self._padding] * (self.config.padded_length - len(token_ids))
        return token_ids, PooledPrompt(params, second_start, num_unseen_of(prompt, len(token_ids)))

    @cached_property
    def _padding(self) -> int:
        """The token that fills texts up. Raises InvalidRequest where the tokenizer has none."""
        found = self._tokenizer.token_id(self._tokenizer.special_tokens.get("pad_token"))
        if found is None:
            raise InvalidRequest("texts are filled up with padding, and the tokenizer has no pad_token", field="prompt")
        return found

    @cached_property
    def late(self) -> LatePrompts | None:
        """What writes and scores queries and documents of a late-interaction model; None for any other."""
        if self.config is None or self.config.late is None:
            return None
        return LatePrompts(self.config.late, self._tokenizer, self._ready.max_model_len)

    @property
    def ranks_lists(self) -> bool:
        """Whether the model compares a query with all documents of one prompt (jina-reranker-v3)."""
        return self.config is not None and bool(self.config.row_token_ids)

    def checked(self, task: str | None) -> PoolingConfig:
        """Return the config of a model that is made for a task; None is any. Raises InvalidRequest."""
        config = self.config
        if config is None:
            kind = CLASSIFY if task == CLASSIFY else EMBED
            raise InvalidRequest(
                f"the model writes text and does not {task or EMBED}; start it with runner pooling and convert {kind}, "
                "or use a model that is made for it",
                field="task",
                code="unsupported_task",
            )
        if task == TOKEN_EMBED and config.task == EMBED and not config.needs_whole_prompts:
            raise InvalidRequest(
                "task is token_embed, but the model computes prompts in pieces, of which some may be in the prefix "
                "cache; use the task embed",
                field="task",
                code="unsupported_task",
            )
        if task is not None and task not in config.tasks:
            found = f"; POST {_PATHS.get(config.task, '/pooling')} and LLM.encode return it"
            found += ", POST /score and /rerank compare texts by it" if self.late is not None else ""
            raise InvalidRequest(
                f"task is {task}, but the model is made for {' and '.join(config.tasks)}{found}"
                + (f"; or start it with convert {task} if it can" if task in (EMBED, CLASSIFY) else ""),
                field="task",
                code="unsupported_task",
            )
        return config

    def prompted(self, prompt: Prompt, name: str | None = None) -> Prompt:
        """Return a text behind the checkpoint's prompt of this name, or its default one. Raises InvalidRequest."""
        config = self.checked(None)
        if self.late is not None and name in _SIDES:
            if prompt.text is None:
                return prompt
            return self.late.query(prompt.text) if name == "query" else self.late.document(prompt.text)
        if name is not None and name not in config.prompts:
            known = ", ".join([*config.prompts, *(_SIDES if self.late is not None else ())]) or "none"
            raise InvalidRequest(
                f"prompt_name is {name!r}, must be a prompt of the checkpoint ({known})", field="prompt_name"
            )
        before = config.default_prompt if name is None else config.prompts[name]
        return (
            prompt if prompt.text is None or not before else msgspec.structs.replace(prompt, text=before + prompt.text)
        )

    def writers(self) -> tuple[Writer, Writer]:
        """Return what writes the prompts of queries and documents whose vectors are compared. Raises InvalidRequest."""
        self.checked(TOKEN_EMBED if self.late is not None else EMBED)
        if self.late is not None:
            return self.late.query, self.late.document
        return (lambda text: self.prompted(Prompt(text=text)),) * 2

    def match(self, query: NDArray[np.float32], document: NDArray[np.float32], document_ids: Sequence[int]) -> float:
        """Return how well two texts match: the cosine of their vectors, [size], or MaxSim of those of their tokens,
        [tokens, size]."""
        if self.late is None:
            return cosine(query, document)
        return self.late.score(query, document, document_ids)

    def _resolved(self, params: PoolingParams) -> PoolingParams:
        """Return the parameters with the task. Raises InvalidRequest for one that the model is not made for."""
        config = self.checked(params.task)
        task = params.task or config.task
        is_sparse = config.sparse is not None and task == EMBED
        has_scores = task in (CLASSIFY, TOKEN_CLASSIFY) or is_sparse
        if params.dimensions is not None and (has_scores or params.dimensions > config.size):
            raise InvalidRequest(
                f"dimensions is {params.dimensions}, but {'weights of tokens' if is_sparse else 'scores'} have none"
                if has_scores
                else f"dimensions is {params.dimensions}, must be at most {config.size}, the size of the vectors",
                field="dimensions",
            )
        return msgspec.structs.replace(params, task=task)

    def read_ids(self, prompt: Prompt, params: PoolingParams) -> tuple[list[int], int]:
        """Return the token ids of a prompt, and where the second text of a pair begins if the model is to know; else 0.

        Longer prompts are cut as `params` say. Raises InvalidRequest.
        """
        num_kept = params.truncate_prompt_tokens
        if prompt.token_ids is not None:
            return self._fitting(prompt.token_ids, params), prompt.second_start
        texts = [checked_text(text, "prompt") for text in (prompt.text or "", prompt.second) if text is not None]
        if prompt.cuts:  # a conversation, which has its special tokens
            whole = self._tokenizer.encode(texts[0], prompt.add_special_tokens, prompt.cuts)
            return self._fitting(whole, params), 0
        limit = self._limit(num_kept)
        token_ids, second_start = self._tokenizer.encode_whole(
            texts, None if num_kept is None else limit, prompt.add_special_tokens, params.truncation_side
        )
        return self._fitting(token_ids, params), second_start

    def _limit(self, num_kept: int | None) -> int:
        longest = self._ready.max_model_len
        return longest if num_kept is None or num_kept < 0 else min(num_kept, longest)

    def _fitting(self, token_ids: Sequence[int], params: PoolingParams) -> list[int]:
        """Return token ids that fit the model. Raises InvalidRequest."""
        num_kept, kept = params.truncate_prompt_tokens, list(token_ids)
        if num_kept is not None:
            num_cut = max(0, len(kept) - self._limit(num_kept))
            kept = kept[num_cut:] if params.truncation_side == "left" else kept[: len(kept) - num_cut]
        limit = self._ready.max_model_len
        if not kept:
            raise InvalidRequest("the prompt is empty; it must have a token", field="prompt", code="empty_prompt")
        if len(kept) > limit:
            raise ContextTooLong(
                f"the prompt has {len(kept)} tokens, but this model's maximum context length is {limit}; shorten it, "
                "or set truncate_prompt_tokens to -1 to keep its beginning",
                field="prompt",
            )
        check_token_ids(kept, self._ready.vocab_size, "prompt")
        return kept


def num_unseen_of(prompt: Prompt, num_kept: int) -> int:
    """Return how many of the first `num_kept` tokens of a prompt no token sees."""
    return max(0, prompt.num_unseen - len(prompt.token_ids or ()) + num_kept) if prompt.num_unseen else 0


def pair_of(
    vectors: VectorInput, template: ChatTemplate | None, query: str, document: str, instruct: str | None
) -> Prompt:
    """Return the prompt of a pair for a model that scores pairs.

    The pair is written by the chat template where that has roles for query and document, else by Qwen3-Reranker's for a
    model that judges by its next token, and as two texts for any other. instruct: what is judged, in a template. Raises
    InvalidRequest.
    """
    for name, text in (("query", query), ("document", document)):
        if not isinstance(text, str):
            raise InvalidRequest(f"{name} is {type(text).__name__}, expected text", field=name)
    config = vectors.checked(CLASSIFY)
    if template is not None and names_both_roles(template):
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        if instruct is not None:
            messages.insert(0, {"role": "system", "content": instruct})
        return Prompt(text=template.render(messages), add_special_tokens=False)
    if not config.token_ids or not config.has_template:
        return Prompt(text=query, second=document)
    text = _RERANKER.format(instruct=instruct or _INSTRUCT, query=query, document=document)
    return Prompt(text=text, add_special_tokens=False)


def names_both_roles(template: ChatTemplate | None) -> bool:
    """Return whether a chat template writes pairs."""
    source = "" if template is None else template.source
    return all(f'"{role}"' in source or f"'{role}'" in source for role in ("query", "document"))


def matched(queries: Sequence[T], documents: Sequence[T]) -> list[tuple[T, T]]:
    """Return the pairs of one query with each document, or of each with its own. Raises InvalidRequest."""
    if len(queries) == 1:
        return [(queries[0], document) for document in documents]
    if len(queries) != len(documents):
        raise InvalidRequest(
            f"there are {len(queries)} first texts and {len(documents)} second ones; give one first text, or as many",
            field="text_1",
        )
    return list(zip(queries, documents, strict=True))
