"""The sampler on CUDA: the stages of the reference on the GPU, and a kernel for the race that decides a draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.devices.cuda.runtime import CudaRuntime
from octavo.devices.reference.sampler import ReferenceSampler
from octavo.sampling.filters import Filter
from octavo.sampling.processors import LogitsProcessor
from octavo.sampling.top_tokens import TopTokens

CHUNK_BYTES: Final = 40 << 20
"""Logits that are sampled at a time: those of 64 rows of a vocabulary of 150,000 tokens."""

BLOCK: Final = 1024
"""Columns of a program."""


class CudaSampler(ReferenceSampler):
    """A `Sampler` whose tokens are drawn where the logits are: what comes to the host is tokens."""

    def __init__(self, runtime: CudaRuntime, processors: Sequence[LogitsProcessor], filters: Sequence[Filter]) -> None:
        super().__init__(processors, filters, chunk_bytes=CHUNK_BYTES)
        self._runtime = runtime

    def _race(
        self, probabilities: Tensor, owners: NDArray[np.int64], keys: NDArray[np.uint32], *, sparse: bool
    ) -> NDArray[np.int64]:
        return self._winners(probabilities, None, owners, keys).cpu().numpy()

    def _race_among(self, top: TopTokens, owners: NDArray[np.int64], keys: NDArray[np.uint32]) -> NDArray[np.int64]:
        token_ids = top.token_ids.contiguous()
        columns = self._winners(top.weights.contiguous(), token_ids, owners, keys)
        rows = torch.from_numpy(owners).to(columns.device)
        return token_ids[rows, columns].cpu().numpy()

    def _winners(
        self, weights: Tensor, ids: Tensor | None, owners: NDArray[np.int64], keys: NDArray[np.uint32]
    ) -> Tensor:
        """Return the column that wins each draw, int64 [draws]."""
        from octavo.devices.cuda.kernels.sampling import race

        device, num_columns = weights.device, weights.shape[1]
        num_blocks = -(-num_columns // BLOCK)
        scores = torch.empty((len(keys), num_blocks), dtype=torch.float64, device=device)
        places = torch.empty((len(keys), num_blocks), dtype=torch.int32, device=device)
        race[(len(keys), num_blocks)](
            weights,
            weights if ids is None else ids,
            torch.from_numpy(keys.view(np.int32)).to(device),
            torch.from_numpy(owners.astype(np.int32)).to(device),
            *(scores, places, num_columns, weights.stride(0)),
            BLOCK=BLOCK,
            HAS_IDS=ids is not None,
            **self._runtime.options,
        )
        best = scores.amax(dim=1, keepdim=True)
        return places.where(scores == best, num_columns).amin(dim=1).long()
