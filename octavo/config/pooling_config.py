"""How vectors, scores and labels are made of hidden states, as far as a checkpoint says it."""

from __future__ import annotations

from typing import Final

import msgspec

from octavo.config.checkpoint import Checkpoint
from octavo.core.pooling import CLASSIFY, EMBED, TOKEN_CLASSIFY, TOKEN_EMBED, TOKEN_TASKS, PoolingParams

ENCODERS: Final = frozenset(
    {
        *("bert", "roberta", "xlm-roberta", "modernbert", "nomic_bert", "gte", "new", "camembert", "deberta-v2"),
        *("albert", "distilbert", "electra", "ernie", "jina_bert", "jina_embeddings_v3", "mpnet"),
    }
)
"""`model_type` of the models whose tokens see those behind them too."""
SIGLIP: Final = ("siglip", "siglip_text_model")
"""Likewise, of a family whose texts are all as long as it can read, filled up with padding."""
EMBEDDING_GEMMA: Final = "embedding_gemma2_text"
"""`model_type` of a family whose own layer makes the vectors of tokens, `embedding_dim` wide."""
MODES: Final = ("cls", "lasttoken", "mean", "max", "weightedmean", "mean_sqrt_len_tokens")


def sees_both(c: Checkpoint) -> bool:
    """Return whether a checkpoint's tokens see those behind them too: of encoders, and of decoders that are made so."""
    return (
        c.str("model_type", "") in (*ENCODERS, EMBEDDING_GEMMA, "eurobert", "openai_privacy_filter", *SIGLIP)
        or c.values.get("use_bidirectional_attention") is True
        or c.values.get("is_causal") is False
        or "Bidirectional" in str(c.values.get("architectures"))
    )


class DenseModule(msgspec.Struct, frozen=True):
    """A linear layer behind the model: its folder or its file, its activation and whether it has a bias.

    folder: "" for one among the weights of the model. prefix: what stands in the file before `weight` and `bias`.
    """

    folder: str
    inputs: int
    outputs: int
    activation: str = "identity"
    bias: bool = True
    file: str | None = None
    prefix: str = "linear."

    @property
    def is_among_weights(self) -> bool:
        """Whether the files of the model's weights have it."""
        return not self.folder and self.file is None


class TokenHeads(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that make a vector and a weight of each token beside the vector of a prompt (BGE-M3).

    first, last: the token ids at the ends of a prompt. Vectors are of all tokens but the first, weights of all others.
    """

    vectors: DenseModule
    weights: DenseModule
    first: int
    last: int


class LateInteraction(msgspec.Struct, frozen=True, kw_only=True):
    """How queries and documents are written whose vectors, one of each token, are compared one by one.

    query_prefix, document_prefix: a token in the second place, or text. query_length, document_length: most tokens of
    either, None for as many as the model takes. expanded_length: tokens to which a query is filled up with the token
    `expansion`, by default the one for masks. is_expansion_seen: whether tokens see those. skipped: words whose vectors
    do not count in documents. num_paddings, query_suffix: so many tokens for padding, and a text behind
    them, stand at the end of a query.
    """

    query_prefix: str = ""
    document_prefix: str = ""
    query_length: int | None = None
    document_length: int | None = None
    expanded_length: int = 0
    expansion: str | None = None
    is_expansion_seen: bool = False
    skipped: tuple[str, ...] = ()
    num_paddings: int = 0
    query_suffix: str = ""


class PoolingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How vectors or scores are made of the hidden states of a prompt.

    modes: of `MODES`; the parts of a vector stand side by side where there are several.
    labels: the names of the scores. head: what makes them, "classifier", "token" (a linear layer), "reward" (two),
    "value" or "lm_head" (one without a bias, stored as `v_head` or `lm_head`).
    activation: of scores, "sigmoid", "softmax" or "identity". step_token_id: of a model that judges steps, the token
    that ends one; its rows alone are returned.
    token_ids: of a model that judges by its next token, the tokens for true and, if given, false.
    has_template: whether pairs are written for them as Qwen3-Reranker's where no chat template does.
    prompts: texts before a prompt by name. max_tokens: of a prompt, where the checkpoint says. size: elements of a
    vector. late: of a late-interaction model, whose task is "token_embed". row_token_ids: the tokens whose
    vectors are returned alone, those of the first id before those of the next; () for all. padded_length: tokens
    to which texts are filled up, 0 for none. token_heads: of a model that
    makes rows of tokens beside vectors. sparse: of a model whose vectors have a weight for each token of the vocabulary
    (SPLADE), how those of a prompt's tokens are reduced, "max" or "sum"; num_logs: how often log(1 + x) is taken of
    them first.
    """

    task: str = EMBED
    modes: tuple[str, ...] = ("lasttoken",)
    is_causal: bool = True
    normalize: bool = False
    dense: tuple[DenseModule, ...] = ()
    labels: tuple[str, ...] = ()
    head: str = "classifier"
    activation: str = "identity"
    step_token_id: int | None = None
    token_ids: tuple[int, ...] = ()
    has_template: bool = True
    prompts: dict[str, str] = {}
    default_prompt: str = ""
    max_tokens: int | None = None
    size: int = 0
    late: LateInteraction | None = None
    row_token_ids: tuple[int, ...] = ()
    padded_length: int = 0
    token_heads: TokenHeads | None = None
    sparse: str | None = None
    num_logs: int = 1

    @property
    def needs_whole_prompts(self) -> bool:
        """Whether all tokens of a prompt are computed in one step."""
        return not self.is_causal or self.modes != ("lasttoken",) or self.task in TOKEN_TASKS

    def num_values(self, params: PoolingParams, num_tokens: int) -> int:
        """Return the numbers that are made of a prompt. params: with a task."""
        rows = num_tokens if params.task in TOKEN_TASKS else 1
        if params.task in (CLASSIFY, TOKEN_CLASSIFY):
            return rows * max(1, len(self.labels))
        size = self.size if self.token_heads is None or rows == 1 else self.token_heads.vectors.outputs
        return rows * min(size, params.dimensions or size)

    @property
    def tasks(self) -> tuple[str, ...]:
        """What the model makes, its own task first."""
        if self.token_heads is not None and self.task == EMBED:
            return self.task, TOKEN_EMBED, TOKEN_CLASSIFY
        has_tokens = self.task == EMBED and self.needs_whole_prompts
        return (self.task, TOKEN_EMBED) if has_tokens else (self.task,)
