"""Encoders, whose tokens see those behind them too: BERT, ALBERT, ELECTRA, ERNIE, RoBERTa, NomicBERT, GTE, ModernBERT.

A prompt is computed whole in one step, and nothing of it is kept: all layers write their keys and values to one cache.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any, Final

from torch import Tensor

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.config.section import MOST_LAYERS
from octavo.distributed.mesh import Mesh
from octavo.errors import UnsupportedModel
from octavo.layers.elementwise import OPERATOR_OF
from octavo.layers.embedding import Embedding
from octavo.layers.experts import StoredExperts
from octavo.layers.linear import ColumnLinear
from octavo.layers.norm import LayerNorm
from octavo.layers.rope import Rope
from octavo.models.bert_encoder import BertEncoder, Encoder
from octavo.models.encoder_parts import EncoderConfig, PreNormLayer, UpGateMLP, modern_ropes, modern_windows
from octavo.models.fields import fields
from octavo.models.ropes import read_rope
from octavo.models.sparse import read_mixture

_FLASH_NAMES: Final = {
    r"^emb_ln": "embed_norm",
    r"^encoder\.layers\.": "layers.",
    r"\.mixer\.Wqkv": ".self_attn.qkv_proj",
    r"\.mixer\.out_proj": ".self_attn.o_proj",
    r"\.norm1\.": ".input_layernorm.",
    r"\.norm2\.": ".post_attention_layernorm.",
    r"\.mlp\.fc1": ".mlp.up_proj",
    r"\.mlp\.fc2": ".mlp.down_proj",
}
"""Names of Jina's releases of XLM-RoBERTa (xlm-roberta-flash-implementation)."""


class BertModel(BertEncoder):
    """BERT as it is published."""


class DistilBertModel(BertEncoder):
    """DistilBERT: BERT without types of tokens. Source: https://arxiv.org/abs/1910.01108."""

    NAMES = {
        r"^distilbert\.": "",
        r"^embeddings\.word_embeddings": "embed_tokens",
        r"^embeddings\.position_embeddings": "embed_positions",
        r"^embeddings\.LayerNorm": "embed_norm",
        r"^transformer\.layer\.": "layers.",
        r"\.attention\.(q|k|v)_lin\.": r".self_attn.\1_lin.",
        r"\.attention\.out_lin": ".self_attn.o_proj",
        r"\.sa_layer_norm": ".input_layernorm",
        r"\.ffn\.lin1": ".mlp.up_proj",
        r"\.ffn\.lin2": ".mlp.down_proj",
        r"\.output_layer_norm": ".post_attention_layernorm",
        r"^vocab_transform": "masked_head.dense",
        r"^vocab_layer_norm": "masked_head.norm",
        r"^vocab_projector\.bias": "masked_head.decoder.bias",
        r"^vocab_projector\.weight": "lm_head.weight",
        r"^pre_classifier": "score.dense",
        r"^classifier\.": "score.classifier.",
    }

    @classmethod
    def read(cls, c: Checkpoint, **own: Any) -> EncoderConfig:
        reads = ("q_lin", "k_lin", "v_lin")
        return super().read(c, num_types=0, qkv_reads=reads, head_function="relu", **own)


class ElectraModel(BertEncoder):
    """ELECTRA: BERT, of which small models project narrower embeddings. Source: https://arxiv.org/abs/2003.10555."""

    NAMES = {r"^electra\.": "", **BertEncoder.NAMES}
    IGNORED = (*BertEncoder.IGNORED, r"(discriminator_predictions|generator_(predictions|lm_head))\..*")

    @classmethod
    def read(cls, c: Checkpoint, **own: Any) -> EncoderConfig:
        width = c.positive("embedding_size", 128)
        if "activation" not in own:
            c.expect("hidden_act", "gelu", default="gelu")
        is_narrow = width != c.positive("hidden_size")
        given = {"head_function": "gelu", "embedding_size": width if is_narrow else 0}
        return super().read(c, **given | own)

    def __init__(self, c: EncoderConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        self.embeddings_project = None
        if not c.embedding_size:
            return
        width = c.embedding_size
        self.embed_tokens = Embedding(c.vocab_size, width, mesh)
        self.embed_positions = Embedding(c.max_positions, width, offset=0)
        self.embed_types = Embedding(c.num_types, width)
        self.embed_norm = c.norm(width, c.norm_eps)
        self.embeddings_project = ColumnLinear(width, c.hidden_size, Mesh.single(), bias=True)

    def embed(self, x: Tensor, batch: ModelInput) -> Tensor:
        """Make the first layer's input [tokens, hidden] of embeddings [tokens, embedding_size]."""
        x = super().embed(x, batch)
        return x if self.embeddings_project is None else self.embeddings_project(x)


class ErnieModel(BertEncoder):
    """ERNIE: BERT with embeddings of tasks, of which all texts get the first. Source:
    https://arxiv.org/abs/2107.02137."""

    NAMES = {r"^ernie\.": "", **BertEncoder.NAMES, r"^embeddings\.task_type_embeddings": "embed_tasks"}

    @classmethod
    def read(cls, c: Checkpoint, **own: Any) -> EncoderConfig:
        num_tasks = c.positive("task_type_vocab_size", 3) if c.bool("use_task_id", False) else 0
        return super().read(c, num_tasks=num_tasks, **own)


class AlbertModel(ElectraModel):
    """ALBERT: BERT whose layers share their weights, all of them or those of a group. Source:
    https://arxiv.org/abs/1909.11942."""

    NAMES = {
        r"^albert\.": "",
        r"^embeddings\.word_embeddings": "embed_tokens",
        r"^embeddings\.position_embeddings": "embed_positions",
        r"^embeddings\.token_type_embeddings": "embed_types",
        r"^embeddings\.LayerNorm": "embed_norm",
        r"^encoder\.embedding_hidden_mapping_in": "embeddings_project",
        r"\.attention\.dense": ".self_attn.o_proj",
        r"\.attention\.LayerNorm": ".input_layernorm",
        r"\.attention\.": ".self_attn.",
        r"\.full_layer_layer_norm": ".post_attention_layernorm",
        r"\.ffn\.": ".mlp.up_proj.",
        r"\.ffn_output\.": ".mlp.down_proj.",
        r"^pooler\.": "score.dense.",
        r"^classifier\.": "score.classifier.",
    }
    IGNORED = (*BertEncoder.IGNORED, r"(predictions|sop_classifier)\..*")

    @classmethod
    def read(cls, c: Checkpoint, **own: Any) -> EncoderConfig:
        passes, groups = c.positive("num_hidden_layers"), c.positive("num_hidden_groups", 1)
        inner = c.positive("inner_group_num", 1)
        if groups > passes:
            raise c.error("num_hidden_groups", f"at most num_hidden_layers, which is {passes}")
        if passes * inner > MOST_LAYERS:
            raise c.error("inner_group_num", f"at most {MOST_LAYERS:,} layers in num_hidden_layers passes")
        order = [int(each / (passes / groups)) * inner + place for each in range(passes) for place in range(inner)]
        own |= {"head_function": "tanh", "embedding_size": c.positive("embedding_size", 128)}
        own["activation"] = c.expect("hidden_act", *OPERATOR_OF, default="gelu_new")
        return super().read(c, num_layers=groups * inner, order=tuple(order), group_size=inner, **own)

    def own_name(self, name: str) -> str:
        groups = r"^(albert\.)?encoder\.albert_layer_groups\.(\d+)\.albert_layers\.(\d+)"
        size = self.encoder_config.group_size
        return super().own_name(re.sub(groups, lambda found: f"layers.{int(found[2]) * size + int(found[3])}", name))

    def forward(self, batch: ModelInput) -> Tensor:
        """Apply the layers in the config's order."""
        x, _ = self.begin(batch)
        for place in self.encoder_config.order:
            x, _ = self.layers[str(place)](x, None, batch)
        return x

    def add_scores(self, num_labels: int, head: str = "classifier") -> None:
        Encoder.add_scores(self, num_labels, head)


class RobertaModel(BertEncoder):
    """RoBERTa and XLM-RoBERTa: positions are counted from behind the padding token's id. Source:
    https://arxiv.org/abs/1907.11692, https://arxiv.org/abs/1911.02116."""

    NAMES = {**BertEncoder.NAMES, **_FLASH_NAMES}

    @classmethod
    def read(cls, c: Checkpoint, **own: Any) -> EncoderConfig:
        offset = c.int("pad_token_id", 1) + 1
        if not 0 <= offset < c.max_model_len():
            raise c.error("pad_token_id", "the id of a token, below max_position_embeddings")
        given: dict[str, Any] = {"position_offset": offset, "max_positions": c.max_model_len() - offset}
        if "xlm-roberta-flash" in str(c.values.get("auto_map")):
            given["qkv_reads"] = ()
        return super().read(c, **given, num_types=c.positive("type_vocab_size", 1), **own)


XLMRobertaModel = RobertaModel


def _nomic_mixture(c: Checkpoint) -> dict[str, Any]:
    """Return the experts of every `moe_every_n_layers`-th layer, and which layers these are. Raises CheckpointError."""
    every = c.count("moe_every_n_layers", 0)
    if not every:
        return {}
    is_file = c.gguf is not None  # which has experts one by one, and lacks their bias
    stored = StoredExperts(None, "w1", "w2", is_stacked=not is_file, is_apart=not is_file, is_flat=not is_file)
    own = fields(experts="num_experts", width="intermediate_size", top_k=("moe_top_k", 2), is_normalized=False)
    mixture = read_mixture(c, stored=stored, activation="gelu", has_output_bias=not is_file, **own)
    layers = range(c.positive("num_hidden_layers"))
    return {"mixture": mixture, "sparse": tuple(layer % every == 1 for layer in layers)}


class NomicBertModel(BertEncoder):
    """NomicBERT, with the config of transformers or of its releases: BERT with rotations, and gated MLPs without
    biases, or plain ones and experts (v2). Contexts longer than those of the training are left out.

    Sources: https://arxiv.org/abs/2402.01613, https://arxiv.org/abs/2502.07972.
    """

    NAMES = {
        r"^bert\.": "",
        r"^embeddings\.word_embeddings": "embed_tokens",
        r"^embeddings\.token_type_embeddings": "embed_types",
        r"^emb_ln": "embed_norm",
        r"^encoder\.layers\.": "layers.",
        r"\.attn\.Wqkv": ".self_attn.qkv_proj",
        r"\.attn\.out_proj": ".self_attn.o_proj",
        r"\.mlp\.fc11": ".mlp.up_proj",
        r"\.mlp\.fc12": ".mlp.gate_proj",
        r"\.mlp\.fc1\.": ".mlp.up_proj.",
        r"\.mlp\.fc2": ".mlp.down_proj",
        r"\.mlp\.router\.layer\.": ".mlp.gate.",
        r"\.mlp\.experts\.mlp\.": ".mlp.experts.",
        r"\.mlp\.experts\.bias$": ".mlp.out_bias.bias",
        r"\.norm1\.": ".input_layernorm.",
        r"\.norm2\.": ".post_attention_layernorm.",
    }

    @classmethod
    def read(cls, c: Checkpoint, **own: Any) -> EncoderConfig:
        c.expect_all(rotary_emb_fraction=1.0, rotary_emb_interleaved=False)
        others = ("prenorm", "parallel_block", "use_rms_norm", "expert_choice_router", "num_shared_experts")
        c.refuse(*others, "moe_normalize_expert_weights", because="no release has it, and it is not implemented")
        is_gated = c.expect("activation_function", "swiglu", "gelu") == "swiglu"
        own |= {"qkv_reads": (), "activation": c.expect("hidden_act", "silu") if is_gated else "gelu"}
        own |= {"mlp": None} if is_gated else {}
        config = super().read(c, position_offset=None, **own, **_nomic_mixture(c))
        is_stated = any(c.values.get(name) is not None for name in ("rope_parameters", "rope_theta"))
        rope = read_rope(c, config.heads.dim) if is_stated else Rope(config.heads.dim, 1000.0)
        bias, mlp_bias = c.bool("qkv_proj_bias", False), c.bool("mlp_fc1_bias", False)
        c.expect("mlp_fc2_bias", mlp_bias)
        return replace(config, rope=rope, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)

    def add_scores(self, num_labels: int, head: str = "classifier") -> None:
        raise UnsupportedModel("NomicBERT with a head for labels is not implemented; convert embed makes vectors")


class JinaEmbeddingsV3Model(BertEncoder):
    """Jina Embeddings v3, with the config of transformers: XLM-RoBERTa with rotations in the place of positions.

    Source: https://arxiv.org/abs/2409.10173.
    """

    NAMES = {
        r"^roberta\.": "",
        r"^embeddings\.word_embeddings": "embed_tokens",
        r"^embeddings\.token_type_embeddings": "embed_types",
        **_FLASH_NAMES,
        r"^pooler\.dense": "score.dense",
        r"^classifier\.(weight|bias)": r"score.classifier.\1",
        r"^classifier\.dense": "score.dense",
        r"^classifier\.out_proj": "score.classifier",
    }

    @classmethod
    def read(cls, c: Checkpoint, **own: Any) -> EncoderConfig:
        num_types = c.positive("type_vocab_size", 1)
        config = super().read(c, position_offset=None, num_types=num_types, qkv_reads=(), **own)
        return replace(config, rope=read_rope(c, config.heads.dim))


class GteModel(BertEncoder):
    """GTE (`NewModel` in its published configs): BERT with rotations and gated MLPs. Source:
    https://arxiv.org/abs/2407.19669."""

    NAMES = {
        r"^(new|gte)\.": "",
        r"^embeddings\.word_embeddings": "embed_tokens",
        r"^embeddings\.token_type_embeddings": "embed_types",
        r"^embeddings\.LayerNorm": "embed_norm",
        r"^encoder\.layer\.": "layers.",
        r"\.attention\.": ".self_attn.",
        r"\.attn_ln\.": ".input_layernorm.",
        r"\.mlp_ln\.": ".post_attention_layernorm.",
        r"^pooler\.dense": "score.dense",
        r"^classifier\.": "score.classifier.",
    }

    @classmethod
    def read(cls, c: Checkpoint, **own: Any) -> EncoderConfig:
        c.expect_all(layer_norm_type="layer_norm", logn_attention_scale=False, pack_qkv=True)
        own |= {"activation": c.expect("hidden_act", "gelu"), "qkv_reads": (), "mlp": UpGateMLP}
        config = super().read(c, position_offset=None, num_types=c.count("type_vocab_size", 1), **own)
        return replace(config, rope=read_rope(c, config.heads.dim))


class ModernBertModel(Encoder):
    """ModernBERT: rotations, and in two of three layers a window to both sides. Source:
    https://arxiv.org/abs/2412.13663."""

    NAMES = {
        r"^model\.": "",
        r"^embeddings\.tok_embeddings": "embed_tokens",
        r"^embeddings\.norm": "embed_norm",
        r"^final_norm": "norm",
        r"\.attn_norm\.": ".input_layernorm.",
        r"\.attn\.Wqkv": ".self_attn.qkv_proj",
        r"\.attn\.Wo": ".self_attn.o_proj",
        r"\.mlp_norm\.": ".post_attention_layernorm.",
        r"\.mlp\.Wi": ".mlp.gate_up_proj",
        r"\.mlp\.Wo": ".mlp.down_proj",
        r"^head\.": "score.",
        r"^classifier\.": "score.classifier.",
    }

    @classmethod
    def read(cls, c: Checkpoint) -> EncoderConfig:
        windows = modern_windows(c, c.positive("local_attention", 128) // 2 + 1)
        config = EncoderConfig.encoder(
            c,
            norm=partial(LayerNorm, bias=c.bool("norm_bias", False)),
            norm_eps=c.positive_float("norm_eps", 1e-5),
            bias=c.bool("attention_bias", False),
            mlp_bias=c.bool("mlp_bias", False),
            qkv_reads=(),
            gate_up_reads=(),
            activation=c.expect("hidden_activation", "gelu"),
            windows=windows if any(windows) else (),
            layer=PreNormLayer,
            head_function=c.expect("classifier_activation", *OPERATOR_OF, "silu", default="gelu"),
            head_bias=c.bool("classifier_bias", False),
            is_head_normed=True,
        )
        return replace(config, ropes=modern_ropes(c, config.heads.dim, windows))

    def __init__(self, c: EncoderConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        del self.layers["0"].input_layernorm
