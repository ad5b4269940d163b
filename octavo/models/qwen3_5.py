"""Qwen3.5 and Qwen3.6: three layers of the gated delta rule for each one of gated full attention.

Source: https://qwen.ai/blog?id=qwen3.5.
"""

from __future__ import annotations

from octavo.models.qwen_linear import QwenLinearConfig, QwenLinearDecoder

ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")


class Qwen35ForCausalLM(QwenLinearDecoder):
    """The whole model, with mixtures of experts or without."""

    Config = QwenLinearConfig


MODEL = Qwen35ForCausalLM
