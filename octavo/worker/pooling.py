"""Makes vectors and scores of prompts from the hidden states of a step, one prompt at a time.

The computation for a prompt reads only its own hidden states, so its bits do not depend on other prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.config.checkpoint import Checkpoint
from octavo.config.pooling.pooling_config import DenseModule, PoolingConfig
from octavo.core.pooling import CLASSIFY, EMBED, TOKEN_CLASSIFY, TOKEN_EMBED, TOKEN_TASKS, PoolingParams
from octavo.core.step import RowOutput
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError
from octavo.layers.layer import WHOLE
from octavo.models.decoder import DecoderStack
from octavo.models.weight_files import stored_tensors
from octavo.sampling.chunks import chunks, rows_per_chunk
from octavo.sampling.refusals import not_finite
from octavo.worker.batch.input_batch import BatchRow
from octavo.worker.drawing import LOGITS_BYTES
from octavo.worker.shared_sampler import logits_of_all

_ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: torch.softmax(x, dim=-1),
}


def _weighted_mean(x: Tensor) -> Tensor:
    weights = torch.arange(1, len(x) + 1, dtype=x.dtype, device=x.device)[:, None]
    return (x * weights).sum(0) / weights.sum()


_MODES: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "cls": lambda x: x[0],
    "lasttoken": lambda x: x[-1],
    "mean": lambda x: x.sum(0) / len(x),
    "max": lambda x: x.max(0).values,
    "weightedmean": _weighted_mean,
    "mean_sqrt_len_tokens": lambda x: x.sum(0) / len(x) ** 0.5,
}
"""Functions from float32 hidden states [tokens, hidden] to [hidden]."""


class Pooler:
    """Pools the hidden states of prompts as `config` says, in float32."""

    def __init__(self, config: PoolingConfig, model: DecoderStack, mesh: Mesh, folder: Path) -> None:
        """Read the dense modules in `folder`. Raises CheckpointError."""
        self._config = config
        self._model = model
        self._mesh = mesh
        self._dense = [_Dense.read(folder, each) for each in config.dense]
        heads = config.token_heads
        self._token_heads = {}
        if heads is not None:
            read = {TOKEN_EMBED: heads.vectors, TOKEN_CLASSIFY: heads.weights}
            self._token_heads = {task: [_Dense.read(folder, each)] for task, each in read.items()}

    def results(self, hidden: Tensor, rows: Sequence[BatchRow]) -> list[RowOutput]:
        """Return the vectors of the rows that end a prompt; `hidden` [tokens, hidden] are the last hidden states."""
        outputs = []
        end = 0
        for scheduled, state in rows:
            start, end = end, end + scheduled.num_tokens
            output = RowOutput(state.seq_id, state.epoch, [])
            if scheduled.num_samples and state.pooled is not None:
                values = self._pooled(hidden[start:end], state.pooled.params).cpu().numpy()
                if np.isfinite(values).all():
                    output = RowOutput(state.seq_id, state.epoch, [], pooled=values.tobytes())
                else:
                    output = RowOutput(state.seq_id, state.epoch, [], error=not_finite(state.num_prompt_tokens))
            outputs.append(output)
        return outputs

    def _pooled(self, hidden: Tensor, params: PoolingParams) -> Tensor:
        """Return the float32 values of a prompt with the hidden states [tokens, hidden], of all or of the last ones."""
        config = self._config
        own = self._token_heads.get(params.task or "")
        if params.task in (CLASSIFY, TOKEN_CLASSIFY) and own is None:
            made = _ACTIVATIONS["identity" if params.use_activation is False else config.activation]
            if config.head == "vocabulary":
                return self._of_vocabulary(hidden, made)
            return made(self._scores(hidden, params.task))
        if config.sparse is not None and params.task == EMBED:
            return self._sparse(hidden)
        x = self._picked(hidden, params.task)
        for dense in own or self._dense:
            x = dense(x)
        if params.task == TOKEN_CLASSIFY:
            return x
        x = x[..., : params.dimensions]
        normalizes = config.normalize if params.use_activation is None else params.use_activation
        return F.normalize(x, dim=-1) if normalizes else x

    def _of_vocabulary(self, hidden: Tensor, made: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what is made of the float32 logits of each token, [tokens, vocab], in the host's memory."""
        parts = chunks(len(hidden), rows_per_chunk(self._config.size, LOGITS_BYTES))
        return torch.cat([made(self._model.compute_logits(hidden[start:stop])).cpu() for start, stop in parts])

    def _sparse(self, hidden: Tensor) -> Tensor:
        """Return the float32 weight of each token of the vocabulary, [vocab]. Source: https://arxiv.org/abs/2109.10086."""
        found: list[Tensor] = []
        for start, stop in chunks(len(hidden), rows_per_chunk(self._config.size, LOGITS_BYTES)):
            weights = self._model.compute_logits(hidden[start:stop]).relu()
            for _ in range(self._config.num_logs):
                weights = weights.log1p()
            found.append(weights.amax(0) if self._config.sparse == "max" else weights.sum(0))
        stacked = torch.stack(found)
        return stacked.amax(0) if self._config.sparse == "max" else stacked.sum(0)

    def _picked(self, hidden: Tensor, task: str | None) -> Tensor:
        """Return the float32 rows [tokens, hidden] for a task with a row for each token, else the pooled vector
        [size]."""
        x = hidden.float()
        return x if task in TOKEN_TASKS else torch.cat([_MODES[mode](x) for mode in self._config.modes])

    def _scores(self, hidden: Tensor, task: str | None) -> Tensor:
        """Return the float32 scores of the labels, [labels] or [tokens, labels]."""
        if self._config.token_ids:
            share = self._model.compute_logits(hidden[-1:])
            logits = logits_of_all(share, self._mesh, self._model.config.vocab_size)[0]
            true, *false = (logits[token_id] for token_id in self._config.token_ids)
            return (true - false[0] if false else true)[None]
        assert self._model.score is not None, "a classifier has scores"
        if task == CLASSIFY and self._config.modes == ("scores",):
            of_tokens: Tensor = self._model.score(hidden)
            return of_tokens.float().mean(0)
        x = self._picked(hidden, task).to(hidden.dtype)
        scores: Tensor = self._model.score(x if task == TOKEN_CLASSIFY else x[None])
        return (scores if task == TOKEN_CLASSIFY else scores[0]).float()


class _Dense(NamedTuple):
    """A dense module: the float32 weight [outputs, inputs], the bias [outputs], and the activation."""

    weight: Tensor
    bias: Tensor | None
    function: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., inputs] → [..., outputs]."""
        return self.function(F.linear(x, self.weight, self.bias))

    @classmethod
    def read(cls, folder: Path, dense: DenseModule) -> _Dense:
        """Read it from the checkpoint `folder`. Raises CheckpointError."""
        if dense.is_among_weights:
            file, files = folder, [each.path for each in Checkpoint.open(folder).weight_files()]
        else:
            names = ("model.safetensors", "pytorch_model.bin") if dense.file is None else (dense.file,)
            files = [each for name in names if (each := folder / dense.folder / name).is_file()][:1]
            file = folder / dense.folder / names[0]
        if not files:
            raise CheckpointError(f"{file}: does not exist, and modules.json names a dense module there")
        stored = {tensor.name: tensor for each in files for tensor in stored_tensors(each)}
        shapes: dict[str, tuple[int, ...]] = {f"{dense.prefix}weight": (dense.outputs, dense.inputs)}
        if dense.bias:
            shapes[f"{dense.prefix}bias"] = (dense.outputs,)
        for name, shape in shapes.items():
            found = stored[name].shape if name in stored else None
            if found != shape:
                raise CheckpointError(
                    f"{file}: {name} "
                    + ("is missing" if found is None else f"has shape {list(found)}")
                    + f", expected {list(shape)} by its config.json"
                )
        weight, *bias = (stored[name].values(WHOLE).float().clone() for name in shapes)
        return cls(weight, bias[0] if bias else None, _ACTIVATIONS[dense.activation])
