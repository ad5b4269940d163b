"""A GGUF file in the layout of Hugging Face: what its config.json would say, and the names of its tensors there."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Final

from octavo.errors import CheckpointError
from octavo.gguf.architectures import ARCHITECTURES, Architecture, architecture_of
from octavo.gguf.encoders import pooling
from octavo.gguf.metadata import Metadata
from octavo.gguf.names import LAYER, OWN, TOPS
from octavo.gguf.orders import ORDERED, Order
from octavo.gguf.reader import Array, GGUFFile, GGUFTensor

_TENSOR: Final = re.compile(r"blk\.(\d{1,9})\.([\w.]+?)(\.weight|\.bias)?")
_UNREAD: Final = re.compile(r"(blk\.\d+\.)?(rope_freqs|rope_factors_(long|short)|attn_rot_embd|nextn\..*)(\.weight)?")
"""Tensors that only the config is made from, or that generating text does not need."""
_SCALINGS: Final = ("none", "linear", "yarn", "longrope")
"""Kinds of stretched positions; longrope without tensors of factors stretches none."""
_ADAPTER_TENSOR: Final = re.compile(r"blk\.([0-9]{1,9})\.([\w.]+)\.weight\.lora_([ab])")
_MODULE: Final = re.compile(r"[\w.]+\w")


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor, or one expert's part of it. name: in a checkpoint in Hugging Face layout; behind `OWN` that in the
    model."""

    name: str
    tensor: GGUFTensor
    expert: int | None = None
    part: str = ""
    heads: int = 0
    """The number of heads whose rows RoPE turns in pairs of neighbours, not in halves; 0 where rows are in halves."""
    shift: float = 0.0
    """The number that was added to the values."""
    behind: tuple[GGUFTensor, ...] = ()
    """Tensors of the same type and shape that are joined with it: rows, or frames of a kernel."""
    form: tuple[int, ...] | None = None
    """The dimensions in a checkpoint, where they differ from those in the file."""
    order: Order = field(default_factory=Order)
    """The places of its rows and columns in the file."""
    is_power: bool = False
    """Values are -e^x in the file, x in a checkpoint."""
    is_kernel: bool = False
    """A kernel [outputs, channels, rows, columns] is a matrix [outputs, rows * columns * channels] in a checkpoint."""

    @property
    def parts(self) -> tuple[GGUFTensor, ...]:
        """This tensor, then those that are joined to it."""
        return self.tensor, *self.behind

    @property
    def nbytes(self) -> int:
        """The bytes of `parts` in the file."""
        total = sum(each.nbytes for each in self.parts)
        if self.order.rows:
            total = total // self.tensor.shape[0] * _length(self.order.rows)
        return total if self.expert is None else total // self.tensor.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""
        if self.form is not None:
            return self.form
        if self.behind:
            first, *rest = self.tensor.shape
            count = len(self.parts)
            return (first, rest[0], count, *rest[1:]) if len(rest) == 3 else (count * first, *rest)
        if self.order.rows:
            return (_length(self.order.rows), *self.tensor.shape[1:])
        inner = self.tensor.shape if self.expert is None else self.tensor.shape[1:]
        return (1, *inner) if self.name.endswith("shared_expert_gate.weight") and len(inner) == 1 else inner


def read_config(file: GGUFFile) -> dict[str, Any]:
    """Return what a `config.json` would say. Raises CheckpointError and UnsupportedModel."""
    meta = Metadata(file)
    kept = architecture_of(meta)
    numbers = [int(found[1]) for name in meta.types if (found := _TENSOR.fullmatch(name))]
    if meta.positive("block_count") <= (last := max(numbers, default=0)):
        raise meta.error("block_count", f"more than {last}, the number of the last layer that the file has")
    embeddings = meta.types.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise CheckpointError(f"{file.path}: token_embd.weight is missing, expected a table of embeddings")
    heads = meta.one("attention.head_count", may_lack=kept.has_states, may_vary=kept.may_vary)
    dim = meta.optional_positive("attention.key_length") or max(1, meta.positive("embedding_length") // heads)
    eps = meta.values.get("attention.layer_norm_rms_epsilon", meta.values.get("attention.layer_norm_epsilon", 1e-5))
    base: dict[str, Any] = {
        "architectures": [kept.family],
        "hidden_size": meta.positive("embedding_length"),
        "num_hidden_layers": meta.num_layers,
        "intermediate_size": meta.one("feed_forward_length", may_lack=kept.has_states, may_vary=kept.may_vary),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.one("attention.head_count_kv", may_lack=kept.has_states, may_vary=kept.may_vary)
        if "attention.head_count_kv" in meta.values
        else heads,
        "head_dim": dim,
        **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps"), eps),
        "max_position_embeddings": meta.positive("context_length"),
        "vocab_size": embeddings.shape[0],
        "tie_word_embeddings": "output.weight" not in meta.types,
        "rope_theta": meta.positive_float("rope.freq_base", 10_000.0),
        "rope_scaling": _scaling(meta, dim),
        "attention_bias": meta.has("attn_q.bias"),
        "mlp_bias": meta.has("ffn_up.bias"),
        "sliding_window": meta.values.get("attention.sliding_window") or None,
        "dtype": _dtype(file),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "quantization_config": {"quant_method": "gguf"},
        **pooling(meta),
    }
    return {**base, **kept.make(meta, base)}


def placed_tensors(file: GGUFFile) -> Iterator[Placed]:
    """Yield the tensors under the names of modules. Raises CheckpointError for one that is not known."""
    meta = Metadata(file)
    kept, num_layers = architecture_of(meta), meta.num_layers
    names, tops = {**LAYER, **kept.names}, {**TOPS, **kept.tops}
    yield from _of_numbers(kept, meta)
    for tensor in file.tensors:
        found = _TENSOR.fullmatch(tensor.name)
        is_behind = tensor.name in kept.apart or (found is not None and int(found[1]) >= num_layers)
        if is_behind or _UNREAD.fullmatch(tensor.name):
            continue
        top, _, suffix = tensor.name.rpartition(".")
        if found is None and top in tops:
            name, is_norm = f"{OWN}{tops[top]}.{suffix}", tensor.name.endswith("norm.weight")
            stacked = range(tensor.shape[0]) if "{}" in name else (None,)
            # tables of one row have no dimension of rows
            form = (1, *tensor.shape) if top in ("token_types", "cls.output") and suffix == "weight" else None
            form = form if len(tensor.shape) == 1 else None
            shift = kept.shift * is_norm
            yield from (Placed(name.format(each), tensor, each, shift=shift, form=form) for each in stacked)
            continue
        if found is None or found[2] not in names:
            raise CheckpointError(f"{file.path}: holds {tensor.name}, which {kept.family} does not read")
        yield from _of_layer(kept, meta, tensor, int(found[1]), found[2], found[3] or "", names[found[2]])


def _of_numbers(kept: Architecture, meta: Metadata) -> Iterator[Placed]:
    for key, (name, shape) in kept.numbers.items():
        value = meta.file.metadata.get(key)
        for layer in range(meta.num_layers):
            number = value.number(layer, shape) if isinstance(value, Array) else None
            if number is None:
                raise CheckpointError(f"{meta.where}: {key} is {value!r}, expected a float32 for each layer")
            yield Placed(f"{OWN}layers.{layer}.{name}", number)


def adapter_tensors(file: GGUFFile, family: str) -> Iterator[tuple[str, str, GGUFTensor, str]]:
    """Yield the tensors of an adapter: the name of the module, A or B, and q or k where rows of B are
    those of queries or keys in pairs that turn together. family: the class of the model.

    Raises CheckpointError for a tensor that is not known, and for an adapter of another architecture.
    """
    meta = Metadata(file)
    kept = architecture_of(meta)
    expected = dict.fromkeys(name.partition(" ")[0] for name, each in ARCHITECTURES.items() if each.family == family)
    if expected and meta.architecture not in expected:
        raise CheckpointError(
            f"{file.path}: general.architecture is {meta.architecture!r}, expected {' or '.join(expected)}, as "
            f"{family} has; give an adapter of this model"
        )
    names = {**LAYER, **kept.names}
    for tensor in file.tensors:
        found = _ADAPTER_TENSOR.fullmatch(tensor.name)
        name = names.get(found[2], "/") if found else "/"
        if found is None or not _MODULE.fullmatch(name):
            raise CheckpointError(f"{file.path}: {tensor.name} is no A or B of a linear layer that adapters may change")
        if kept.rows is not None and found[2] in ORDERED:
            raise CheckpointError(
                f"{file.path}: {tensor.name} changes a layer whose heads are in another order in GGUF files, which is "
                "not implemented; give the adapter in the layout of PEFT"
            )
        turned = found[2][-1] if kept.is_permuted and found[2] in ("attn_q", "attn_k") and found[3] == "b" else ""
        yield f"{OWN}layers.{found[1]}.{name}", found[3].upper(), tensor, turned


def _of_layer(
    kept: Architecture, meta: Metadata, tensor: GGUFTensor, layer: int, own: str, suffix: str, name: str
) -> Iterator[Placed]:
    heads = 0
    if kept.is_permuted and own in ("attn_q", "attn_k"):
        count = "attention.head_count" if own == "attn_q" else "attention.head_count_kv"
        heads = meta.each(count)[layer] if kept.may_vary else meta.one(count, may_lack=kept.has_states)
        if not heads or tensor.shape[0] % (2 * heads):
            raise CheckpointError(f"{meta.where}: {tensor.name} has {tensor.shape[0]} rows, expected {heads} heads")
    path, _, part = name.partition("/")
    full = f"{OWN}layers.{layer}.{path}"
    if own.endswith("norm"):
        suffix = suffix or ".weight"  # some converters leave it out
    if full.endswith(("!", "_")):
        full = full[:-1] + ("_bias" if full.endswith("_") and suffix == ".bias" else "")
    else:
        full += suffix
    shift = kept.shift if own.endswith("norm") and own != "ssm_norm" and suffix == ".weight" else 0.0
    if "{}" not in full:
        order = _order(kept, meta, tensor, own)
        is_power = full.endswith("A_log")
        yield Placed(full, tensor, None, part, heads, shift, (), _form(full, own, tensor), order, is_power)
        for name, rows in order.beside:
            beside = full.replace(path, {**LAYER, **kept.names}[name])
            yield Placed(beside, tensor, order=replace(order, rows=rows))
        return
    experts = meta.positive("expert_count")
    if tensor.shape[0] != experts:
        raise CheckpointError(f"{meta.where}: {tensor.name} has {tensor.shape[0]} experts, expected {experts}")
    for expert in range(experts):
        yield Placed(full.format(expert), tensor, expert)


def _form(name: str, own: str, tensor: GGUFTensor) -> tuple[int, ...] | None:
    """Return the dimensions of a tensor that has others in a checkpoint, None for one that has not."""
    first, *rest = tensor.shape
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        # kernels of single channels are stored without the dimension of inputs, or with another one in front
        return (first, 1, *rest) if len(rest) < 3 else (rest[0], 1, rest[-1])
    if name.endswith("self_attn.A_log"):
        return (1, 1, prod(tensor.shape), 1)
    return (prod(tensor.shape),) if own in ("ssm_a", "ssm_d", "ssm_norm") and name[-2:] != ".A" else None


def _order(kept: Architecture, meta: Metadata, tensor: GGUFTensor, own: str) -> Order:
    order, sizes = kept.rows(meta, own) if kept.rows is not None and own in ORDERED else Order(), tensor.shape
    both = (*order.rows, *(each for _, rows in order.beside for each in rows)), order.columns
    for size, runs in zip((sizes[0], sizes[-1]), both, strict=True):
        if runs and (_length(runs) != size or any(each.stop > size for each in runs)):
            raise CheckpointError(f"{meta.where}: {tensor.name} has shape {list(sizes)}, expected {_length(runs)}")
    return order


def _length(runs: Iterable[slice]) -> int:
    return sum(each.stop - each.start for each in runs)


def _dtype(file: GGUFFile) -> str:
    """Return the type that most bytes have; bfloat16 where they are quantised."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors:
        sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.nbytes
    largest = max(sizes, key=lambda each: sizes[each], default="F32")
    return {"F32": "float32", "F16": "float16"}.get(largest, "bfloat16")


def _scaling(meta: Metadata, dim: int) -> dict[str, Any] | None:
    """Return how positions are stretched: what the metadata say, or factors that a tensor holds."""
    original = meta.optional_positive("rope.scaling.original_context_length")
    short, long = (meta.file.floats(f"rope_factors_{each}.weight") for each in ("short", "long"))
    if short is not None and long is not None:
        length = original or meta.positive("context_length")
        stretch = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        return {**stretch, "original_max_position_embeddings": length}
    factors = meta.file.floats("rope_freqs.weight")
    if factors is not None:
        return _llama3(meta, factors)
    # files of older converters have rope.scale_linear
    factor = "rope.scale_linear" if "rope.scale_linear" in meta.values else "rope.scaling.factor"
    kind = meta.expect("rope.scaling.type", *_SCALINGS, default="linear" if factor in meta.values else "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": meta.positive_float(factor)}
    if kind != "yarn":
        return None
    found: dict[str, Any] = {"rope_type": "yarn", "factor": meta.positive_float("rope.scaling.factor")}
    found["original_max_position_embeddings"] = original or meta.positive("context_length")
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if f"rope.scaling.{theirs}" in meta.values:
            found[ours] = meta.positive_float(f"rope.scaling.{theirs}")
    return found


def _llama3(meta: Metadata, factors: list[float]) -> dict[str, Any]:
    """Return Llama 3's scaling where it makes these divisors of frequencies, otherwise the divisors themselves."""
    theta, pairs, factor = meta.positive_float("rope.freq_base", 10_000.0), len(factors), max(factors)
    for low, high, original in ((1.0, 4.0, 8192), (1.0, 4.0, meta.positive("context_length"))):
        made = []
        for pair in range(pairs):
            turns = original * theta ** (-pair / pairs) / (2 * math.pi)
            smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
            made.append(1 / ((1 - smooth) / factor + smooth))
        if all(math.isclose(one, other, rel_tol=1e-4) for one, other in zip(made, factors, strict=True)):
            own = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
            return {"rope_type": "llama3", "factor": factor, **own}
    length, lists = meta.positive("context_length"), {"short_factor": factors, "long_factor": factors}
    own = {"factor": 1.0, "attention_factor": 1.0, "original_max_position_embeddings": length}
    return {"rope_type": "longrope", **own, **lists}
