"""Qwen3-Next: three layers of the gated delta rule for each one of gated full attention, and mixtures of experts.

Source: https://qwen.ai/blog?id=qwen3-next.
"""

from __future__ import annotations

from octavo.distributed.mesh import Mesh
from octavo.models.qwen_linear import QwenLinearConfig, QwenLinearDecoder, picks_by_key_head

ARCHITECTURES = ("Qwen3NextForCausalLM",)


class Qwen3NextForCausalLM(QwenLinearDecoder):
    """The whole model."""

    Config = QwenLinearConfig

    def __init__(self, c: QwenLinearConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh, picks_by_key_head)


MODEL = Qwen3NextForCausalLM
