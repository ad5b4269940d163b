"""Youtu-LLM: attention over latents and gated MLPs. Source: https://arxiv.org/abs/2512.24618."""

from __future__ import annotations

from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.models.latent import LatentConfig, LatentDecoder

ARCHITECTURES = ("YoutuForCausalLM",)


class YoutuConfig(LatentConfig):
    """The head shares the embedding unless the config says otherwise."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        return cls.common_latent(c, tied=c.bool("tie_word_embeddings", True))


class YoutuForCausalLM(LatentDecoder):
    """The whole model."""

    Config = YoutuConfig


MODEL = YoutuForCausalLM
