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
"""`model_type` of the models whose tokens also see later ones."""
SIGLIP: Final = ("siglip", "siglip_text_model")
"""`model_type` of a family whose texts are all padded to the longest length that it reads."""
EMBEDDING_GEMMA: Final = "embedding_gemma2_text"
"""`model_type` of a family whose own layer makes the vectors of tokens, `embedding_dim` wide."""
MODES: Final = ("cls", "lasttoken", "mean", "max", "weightedmean", "mean_sqrt_len_tokens")


def sees_both(c: Checkpoint) -> bool:
    """Return whether a checkpoint's tokens also see later ones: in encoders, and in decoders trained for it."""
    return (
        c.str("model_type", "") in (*ENCODERS, EMBEDDING_GEMMA, "eurobert", "openai_privacy_filter", *SIGLIP)
        or c.values.get("use_bidirectional_attention") is True
        or c.values.get("is_causal") is False
        or "Bidirectional" in str(c.values.get("architectures"))
    )


class DenseModule(msgspec.Struct, frozen=True):
    """A linear layer after the model."""

    folder: str
    """Folder of its weights; "" for weights among those of the model."""
    inputs: int
    outputs: int
    activation: str = "identity"
    bias: bool = True
    """Whether it has a bias."""
    file: str | None = None
    """File of its weights, where they are not in the folder."""
    prefix: str = "linear."
    """Prefix of the names `weight` and `bias` in the file."""

    @property
    def is_among_weights(self) -> bool:
        """Whether the files of the model's weights have it."""
        return not self.folder and self.file is None


class TokenHeads(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that make a vector and a weight of each token beside the vector of a prompt (BGE-M3)."""

    vectors: DenseModule
    """Applied to all tokens but the first."""
    weights: DenseModule
    """Applied to all tokens but the first and the last."""
    first: int
    """Token id at the start of a prompt."""
    last: int
    """Token id at the end of a prompt."""


class LateInteraction(msgspec.Struct, frozen=True, kw_only=True):
    """How queries and documents of a late-interaction model are written: it compares one vector of each token."""

    query_prefix: str = ""
    """A token in the second place of a query, or text before it."""
    document_prefix: str = ""
    """A token in the second place of a document, or text before it."""
    query_length: int | None = None
    """Most tokens of a query; None for as many as the model takes."""
    document_length: int | None = None
    """Most tokens of a document; None for as many as the model takes."""
    expanded_length: int = 0
    """Tokens to which a query is filled up with `expansion`."""
    expansion: str | None = None
    """The token that fills queries up; None for the mask token."""
    is_expansion_seen: bool = False
    """Whether tokens of a query attend to those that fill it up."""
    skipped: tuple[str, ...] = ()
    """Words whose vectors do not count in documents."""
    num_paddings: int = 0
    """Number of padding tokens at the end of a query, before `query_suffix`."""
    query_suffix: str = ""
    """The text at the end of a query."""


class PoolingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How vectors or scores are made of the hidden states of a prompt."""

    task: str = EMBED
    modes: tuple[str, ...] = ("lasttoken",)
    """Names in `MODES`; where there are several, their vectors stand side by side. "scores" alone takes the mean of the
    scores of all tokens."""
    is_causal: bool = True
    normalize: bool = False
    dense: tuple[DenseModule, ...] = ()
    labels: tuple[str, ...] = ()
    """The names of the scores."""
    head: str = "classifier"
    """The layers that make scores: "classifier", "token" (one linear layer), "reward" or "dense" (two), "value" or
    "lm_head" (one without a bias, stored as `v_head` or `lm_head`), "vocabulary" (the head for masked tokens)."""
    activation: str = "identity"
    """The activation of scores: "sigmoid", "softmax" or "identity"."""
    step_token_id: int | None = None
    """The token that ends a step, in a model that judges steps: only its rows are returned."""
    token_ids: tuple[int, ...] = ()
    """The tokens for true and, if given, false, in a model that judges by its next token."""
    has_template: bool = True
    """Whether pairs are written as for Qwen3-Reranker where no chat template writes them, in such a model."""
    prompts: dict[str, str] = {}
    """Texts before a prompt, by name."""
    default_prompt: str = ""
    max_tokens: int | None = None
    """Most tokens of a prompt, where the checkpoint states it."""
    size: int = 0
    """Elements of a vector."""
    late: LateInteraction | None = None
    """Settings of a late-interaction model, whose task is "token_embed"."""
    row_token_ids: tuple[int, ...] = ()
    """The tokens whose vectors alone are returned, those of the first id before those of the next; () for all."""
    padded_length: int = 0
    """Tokens to which texts are padded; 0 for none."""
    token_heads: TokenHeads | None = None
    """Heads of a model that makes rows of tokens beside the vector of a prompt."""
    sparse: str | None = None
    """How the weights of a prompt's tokens are reduced, "max" or "sum", in a model whose vectors have a weight for each
    token of the vocabulary (SPLADE)."""
    num_logs: int = 1
    """How often log(1 + x) is taken of the weights before they are reduced."""

    @property
    def has_vocabulary(self) -> bool:
        """Whether a vector, or the row of a token, has a value for each token of the vocabulary."""
        return self.sparse is not None or self.head == "vocabulary"

    @property
    def needs_whole_prompts(self) -> bool:
        """Whether all tokens of a prompt are computed in one step."""
        return not self.is_causal or self.modes != ("lasttoken",) or self.task in TOKEN_TASKS

    def num_values(self, params: PoolingParams, num_tokens: int) -> int:
        """Return the numbers that are made of a prompt. params: with a task."""
        rows = num_tokens if params.task in TOKEN_TASKS else 1
        if params.task in (CLASSIFY, TOKEN_CLASSIFY):
            return rows * (self.size if self.head == "vocabulary" else max(1, len(self.labels)))
        size = self.size if self.token_heads is None or rows == 1 else self.token_heads.vectors.outputs
        return rows * min(size, params.dimensions or size)

    @property
    def tasks(self) -> tuple[str, ...]:
        """What the model makes, its own task first."""
        if self.token_heads is not None and self.task == EMBED:
            return self.task, TOKEN_EMBED, TOKEN_CLASSIFY
        has_tokens = self.task == EMBED and self.needs_whole_prompts
        return (self.task, TOKEN_EMBED) if has_tokens else (self.task,)
