"""Facts of a model from its config.json alone: sizes, and the arithmetic and bytes of a token."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import expanduser
from pathlib import Path
from typing import Any, Final

import msgspec

from octavo.config.checkpoint import CONFIG, Checkpoint
from octavo.config.hub import locate
from octavo.config.section import Section, read_json_object
from octavo.errors import UnsupportedModel


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a decoder. Parameters are numbers of weights.

    num_active_parameters: parameters that one token is multiplied with. num_expert_parameters: parameters of all routed
    experts, of which a token uses the share expert_share. intermediate_size: activations of a token within the
    feed-forward part of a layer. windowed_share: share of the layers with the sliding window. bytes_per_parameter: of
    the stored weights. latent: elements that a token has in each layer instead of keys and values, and how many of them
    are the value; None for keys and values of heads. state_elements: elements of a sequence's state in the
    `num_recurrent_layers`, which keep no keys and values.
    """

    name: str
    num_parameters: float
    num_active_parameters: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    sliding_window: int | None = None
    windowed_share: float = 1.0
    bytes_per_parameter: float = 2.0
    is_fp8: bool = False
    num_expert_parameters: float = 0.0
    expert_share: float = 1.0
    latent: tuple[int, int] | None = None
    num_recurrent_layers: int = 0
    state_elements: float = 0.0

    @property
    def kv_elements_per_head(self) -> int:
        """Elements that a layer keeps per token for each head of keys and values."""
        return 2 * self.head_dim if self.latent is None else self.latent[0]

    @property
    def elements_per_pair(self) -> int:
        """Elements that a head multiplies for a query and a key: those of the key, and those of the value."""
        return 2 * self.head_dim if self.latent is None else sum(self.latent)


def read_model_facts(model: str) -> ModelFacts:
    """Return the facts of a model of `NAMED`, of a config.json, of a directory that has one, or of a model on the hub,
    of which only config.json is loaded.

    Raises CheckpointError.
    """
    if model in NAMED:
        return NAMED[model]
    path = Path(expanduser(model))
    if not path.is_file():
        path = locate(model, with_weights=False, text_files=(CONFIG,)) / CONFIG
    config = Checkpoint.open(path).values if path.suffix == ".gguf" else read_json_object(path)
    section = Section(config, str(path))
    return facts_of(model.rstrip("/").rpartition("/")[2], section.section("text_config") or section)


def facts_of(name: str, config: Section) -> ModelFacts:
    """Return the facts of a config. Raises CheckpointError for what is missing, UnsupportedModel for other shapes."""
    _refuse_other_layers(config)
    hidden = _first(config, "hidden_size", "n_embd")
    num_layers = _first(config, "num_hidden_layers", "n_layer")
    num_heads = _first(config, "num_attention_heads", "n_head")
    head_dim = config.optional_positive("head_dim") or hidden // num_heads
    num_kv_heads = config.optional_positive("num_key_value_heads") or num_heads
    embedding = config.positive("vocab_size") * hidden
    latent: tuple[int, int] | None = None
    if config.values.get("kv_lora_rank") is not None:
        attention, latent, head_dim = _latent(config, hidden, num_heads)
        num_kv_heads = 1
    else:
        num_gates = num_heads * ("linear_num_key_heads" in config.values)  # attention of these families has a gate
        attention = hidden * head_dim * (2 * num_heads + num_gates + 2 * num_kv_heads)
    num_recurrent, recurrence, state = _recurrence(config, hidden, num_layers)
    dense, routed, share, width = _feed_forward(config, hidden, num_layers)
    ties_by_default = "n_embd" in config.values or str(config.values.get("model_type")).startswith(("opt", "gemma"))
    tied = config.bool("tie_word_embeddings", ties_by_default)
    common = (num_layers - num_recurrent) * attention + num_recurrent * recurrence + dense
    bits, is_fp8 = _weight_format(config)
    return ModelFacts(
        name=name,
        num_parameters=common + routed + embedding * (1 if tied else 2),
        # an embedding is looked up; the output layer is a product, also where both are one
        num_active_parameters=common + share * routed + embedding,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        intermediate_size=width,
        **_window(config),
        bytes_per_parameter=bits / 8,
        is_fp8=is_fp8,
        num_expert_parameters=routed,
        expert_share=share,
        latent=latent,
        num_recurrent_layers=num_recurrent,
        state_elements=num_recurrent * state,
    )


def _latent(config: Section, hidden: int, num_heads: int) -> tuple[int, tuple[int, int], int]:
    """Return the parameters of a layer's attention over latents, `ModelFacts.latent`, and the size of a head's
    value."""
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    rank, turned, plain, value = map(config.positive, names)
    source, query = hidden, config.optional_positive("q_lora_rank")
    num_parameters = hidden * (rank + turned) + num_heads * (rank * (plain + value) + value * hidden)
    if query is not None:
        num_parameters, source = num_parameters + hidden * query, query
    return num_parameters + source * num_heads * (plain + turned), (rank + turned, rank), value


def _recurrence(config: Section, hidden: int, num_layers: int) -> tuple[int, int, int]:
    """Return how many layers have a gated delta rule instead of attention, the parameters of one, and the elements of
    its state."""
    if config.values.get("linear_num_key_heads") is None:
        return 0, 0, 0
    kinds = config.values.get("layer_types")
    if not isinstance(kinds, list):
        interval = config.positive("full_attention_interval", 4)
        kinds = ["" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(num_layers)]
    if len(kinds) != num_layers:
        raise config.error("layer_types", f"the kind of each of {num_layers} layers")
    keys, heads = config.positive("linear_num_key_heads"), config.positive("linear_num_value_heads")
    key, value = config.positive("linear_key_head_dim"), config.positive("linear_value_head_dim")
    taps, channels = config.positive("linear_conv_kernel_dim", 4), 2 * keys * key + heads * value
    num_parameters = hidden * (channels + 2 * heads * value + 2 * heads) + channels * taps
    return kinds.count("linear_attention"), num_parameters, (taps - 1) * channels + heads * key * value


def _feed_forward(config: Section, hidden: int, num_layers: int) -> tuple[float, float, float, int]:
    """Return the parameters of dense feed-forward parts and of routed experts, the share of the latter that a token
    uses, and the activations of a token within."""
    is_plain = "n_embd" in config.values or config.values.get("model_type") == "opt"
    num_matrices = 2 if is_plain else 3  # up and down; and a gate
    size = _optional_first(config, "intermediate_size", "ffn_dim", "n_inner") or 4 * hidden
    num_experts = _optional_first(config, "num_experts", "num_local_experts", "n_routed_experts")
    if num_experts is None:
        return num_layers * num_matrices * hidden * size, 0.0, 1.0, size
    size_of_one = config.optional_positive("moe_intermediate_size") or size
    num_used, expert = config.positive("num_experts_per_tok"), 3 * hidden * size_of_one
    shared = expert * config.int("n_shared_experts", 0)
    shared += 3 * hidden * config.int("shared_expert_intermediate_size", 0)
    num_dense = config.int("first_k_dense_replace", 0) + len(config.values.get("mlp_only_layers") or ())
    num_sparse = num_layers - num_dense
    dense = num_dense * 3 * hidden * size + num_sparse * (shared + hidden * num_experts)
    return dense, num_sparse * num_experts * expert, num_used / num_experts, num_used * size_of_one


def _weight_format(config: Section) -> tuple[float, bool]:
    """Return the bits of a weight and whether it is multiplied in 8-bit floating point."""
    quantization = config.section("quantization_config")
    if quantization is None:
        name = str(config.values.get("dtype") or config.values.get("torch_dtype") or "bfloat16")
        return (32 if name == "float32" else 16), False
    method = quantization.str("quant_method")
    if method == "fp8":
        return 8, True
    bits = quantization.optional_positive("bits")
    if bits is None:
        raise UnsupportedModel(
            f"{config.where}: quantization_config.quant_method is {method!r}, whose bits per weight are not known "
            "here; simulate the model that it was made from"
        )
    return bits, False


def _window(config: Section) -> dict[str, Any]:
    """Return the window and the share of layers that have it, by field of `ModelFacts`; {} if none has."""
    kinds = config.values.get("layer_types")
    share = 1.0
    if isinstance(kinds, Sequence) and kinds:
        share = sum(kind == "sliding_attention" for kind in kinds) / len(kinds)
    window = config.optional_positive("sliding_window")
    if window is None or not share or not config.bool("use_sliding_window", True):
        return {}
    return {"sliding_window": window, "windowed_share": share}


def _refuse_other_layers(config: Section) -> None:
    for key in ("mamba_d_state", "ssm_state_size", "state_size", "conv_L_cache"):
        if config.values.get(key) is not None:
            raise UnsupportedModel(
                f"{config.where}: {key} is {config.values[key]}: some layers are recurrent in a way that --model does "
                "not reckon with; give a cost_model file of type roofline with your own figures"
            )

    if config.values.get("block_configs"):
        raise UnsupportedModel(
            f"{config.where}: block_configs: layers differ in heads and widths, which --model does not reckon with; "
            "give a cost_model file of type roofline with your own figures"
        )


def _first(config: Section, *names: str) -> int:
    found = _optional_first(config, *names)
    return config.positive(names[0]) if found is None else found


def _optional_first(config: Section, *names: str) -> int | None:
    values: list[Any] = [config.optional_positive(name) for name in names]
    return next((value for value in values if value is not None), None)


def _shape(
    name: str, billions: float, layers: int, heads: tuple[int, int], sizes: tuple[int, int], window: int | None = None
) -> ModelFacts:
    return ModelFacts(
        name=name,
        num_parameters=1e9 * billions,
        num_active_parameters=1e9 * billions,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=128,
        hidden_size=sizes[0],
        intermediate_size=sizes[1],
        sliding_window=window,
    )


NAMED: Final = {
    facts.name: facts
    for facts in (
        _shape("opt-13b", 12.9, 40, (40, 40), (5120, 20480)),
        _shape("llama-2-13b", 13.0, 40, (40, 40), (5120, 13824)),
        _shape("llama-3.1-8b", 8.03, 32, (32, 8), (4096, 14336)),
        _shape("llama-3.1-70b", 70.6, 80, (64, 8), (8192, 28672)),
        _shape("llama-3.1-405b", 406.0, 126, (128, 8), (16384, 53248)),
        _shape("mistral-7b-v0.1", 7.24, 32, (32, 8), (4096, 14336), 4096),
        _shape("qwen3-0.6b", 0.6, 28, (16, 8), (1024, 3072)),
        _shape("qwen3-4b", 4.02, 36, (32, 8), (2560, 9728)),
        _shape("qwen3-8b", 8.19, 36, (32, 8), (4096, 12288)),
        _shape("qwen3-14b", 14.8, 40, (40, 8), (5120, 17408)),
    )
}
"""Published checkpoints, in bfloat16, that can be named without their config.json."""
