"""Attention on CUDA whose heads are rotated by the launch that writes keys and values to the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.attention.metadata import AttentionMetadata
from octavo.devices.cuda.attention import CudaBackend
from octavo.devices.cuda.ops.rows import rotated, rotation_arguments
from octavo.devices.cuda.runtime import dense
from octavo.ops.rotary import Rotation


class RotatingCudaBackend(CudaBackend):
    """`CudaBackend` that is a `RotatingBackend`."""

    def rotate_and_store(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, metadata: AttentionMetadata, rotation: Rotation
    ) -> Tensor:
        if self._codes:  # another kernel makes them, whose products and sums are not fused
            q, k = rotated(self._runtime, q, k, rotation)
            self._store(k, v, cache, metadata)
            return q
        q, k, v = dense(q), dense(k), dense(v)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        tensors, constants = rotation_arguments(q, k, rotation)
        self._runtime.launch(
            "rows.rotate_and_store",
            (len(q), q.shape[1] + 2 * k.shape[1]),
            *(q, k, v, out, cache[0], cache[1], metadata.slot_mapping, *tensors),
            *(stride for each in (q, k, v) for stride in each.stride()[:2]),
            *(*cache.stride()[1:4], *rotation.eps_and_offset),
            BLOCK=cache.shape[3],
            **constants,
        )
        return out
