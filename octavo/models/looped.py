"""Decoders whose layers run several times over one token, with the same weights and a cache for each time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.config.section import MOST_LAYERS
from octavo.distributed.mesh import Mesh
from octavo.layers.layer import CachedLayer, Layer
from octavo.layers.norm import Norm
from octavo.models.blocks import GatedDecoder, SandwichLayer
from octavo.models.config import DecoderConfig
from octavo.models.fields import BIAS, UNRELEASED, Read, fields


@dataclass(frozen=True, kw_only=True)
class LoopedConfig(DecoderConfig):
    """The layers of all loops; those of the first are stored."""

    num_stored: int
    """Layers of one loop."""
    has_norm_between: bool
    """Whether each loop begins with the output of the last norm."""

    @classmethod
    def looped(cls, c: Checkpoint, *, key: str, has_norm_between: bool = True, **own: Any) -> Self:
        """Read the config, with the number of loops from `key`. Raises CheckpointError or UnsupportedModel."""
        stored, loops = c.positive("num_hidden_layers"), c.positive(key, 1)
        if stored * loops > MOST_LAYERS:
            raise c.error(key, f"at most {MOST_LAYERS // stored}: {stored} layers a loop, {MOST_LAYERS} in all")
        return cls.common(c, num_layers=stored * loops, num_stored=stored, has_norm_between=has_norm_between, **own)


class _LoopStart(nn.Module):
    """The first layer of a later loop, which reads the output of the last norm."""

    def __init__(self, layer: nn.Module, norm: Norm) -> None:
        super().__init__()
        self.layer = layer
        self._shared = (norm,)  # a module of the model, not of this layer

    def forward(self, x: Tensor, residual: Tensor | None, batch: ModelInput) -> tuple[Tensor, Tensor | None]:
        """Return the layer's results, each [tokens, hidden]."""
        x, _ = self._shared[0].add(x, residual)
        found: tuple[Tensor, Tensor | None] = self.layer(x, None, batch)
        return found


def _share_weights(layer: nn.Module, first: nn.Module) -> None:
    """Make a layer compute with the modules of another one, all but those that have a cache."""
    for name, module in first.named_children():
        if isinstance(module, CachedLayer):
            continue
        if isinstance(module, Layer):
            setattr(layer, name, module)
        else:
            _share_weights(getattr(layer, name), module)


class LoopedDecoder(GatedDecoder):
    """A stack of which each layer with a number beyond the first loop has the weights of the one that it repeats."""

    COMMON = LoopedConfig.looped

    def __init__(self, c: LoopedConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        self.need_one_stage("the layers of this model run several times, which stages do not pass on")
        assert self.norm is not None
        for index in range(c.num_stored, c.num_layers):
            layer = self.layers[str(index)]
            _share_weights(layer, self.layers[str(index % c.num_stored)])
            if index % c.num_stored == 0 and c.has_norm_between:
                self.layers[str(index)] = _LoopStart(layer, self.norm)


class NanbeigeForCausalLM(LoopedDecoder):
    """Nanbeige 4.2: Llama whose layers run `num_loops` times. Source: https://huggingface.co/Nanbeige/Nanbeige4.2-3B."""

    REFUSED = {
        UNRELEASED: (
            *("enable_double_loop_split", "loop_share_kv", "enable_hyper_connection", "enable_mhc", "qk_layernorm"),
            *("enable_depth_attention", "ngram_insert_all_layers", "insert_ngram_layer_idx", "emb_neighbor_num"),
        ),
        "it is of training; state num_loops alone": ("loop_loss_weights",),
    }
    FIELDS = fields(
        key="num_loops", has_norm_between=Read(lambda c: not c.bool("skip_loop_final_norm", False)), bias=BIAS
    )


class OuroForCausalLM(LoopedDecoder):
    """Ouro: norms before and after attention and MLP; layers run `total_ut_steps` times, and no token leaves earlier.

    Source: https://arxiv.org/abs/2510.25741.
    """

    RENAMED = {"attention_output_norm": "input_layernorm_2", "mlp_output_norm": "post_attention_layernorm_2"}
    IGNORED = (*GatedDecoder.IGNORED, r"early_exit_gate\.(weight|bias)")
    EXPECTED = fields(early_exit_threshold=1.0, use_sliding_window=False)
    FIELDS = fields(key="total_ut_steps", layer=SandwichLayer)
