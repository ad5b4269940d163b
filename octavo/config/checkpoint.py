"""A model directory in Hugging Face layout: its config, its generation defaults, and what its weight files hold.

Nothing here reads weights: safetensors headers say names, types and shapes, which is all that arithmetic needs.
"""

from __future__ import annotations

import builtins
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from octavo.config.listed import other_folder
from octavo.config.overrides import flat_overrides, overridden
from octavo.config.released.layouts import in_todays_layout
from octavo.config.released.mistral import CONSOLIDATED, PARAMS, is_native, native_images, native_layout
from octavo.config.released.ultravox import folders_beside
from octavo.config.safetensors_header import TensorInfo, WeightFile, read_header
from octavo.config.section import LARGEST_SIZE, REQUIRED, Section, read_json_object, shown
from octavo.config.speculators import of_layers
from octavo.config.text_config import TEXT_CONFIG, THINKER_CONFIG, flattened, of_thinker
from octavo.errors import CheckpointError, ConfigError, UnsupportedModel
from octavo.gguf.reader import GGUFFile, is_first_file, is_gguf, is_mmproj

if TYPE_CHECKING:
    from octavo.config.schema import ModelConfig

CONFIG: Final = "config.json"
GENERATION_CONFIG: Final = "generation_config.json"
QUANTIZATION: Final = "quantization_config"

_DTYPE_NAMES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_QUANTIZATION_CONFIGS: Final = ("quantize_config.json", "quant_config.json")
"""Where older tools put the `quantization_config`."""
_SEEN_TOKENS: Final = ("index_topk", "attention_chunk_size")
_CHOOSING: Final = ("axk2", "deepseek_v32", "glm_moe_dsa")
"""By `model_type`, the families that choose `index_topk` tokens of longer contexts here."""
_ALWAYS_CHOOSING: Final = (
    *("deepseek_v4", "glm5_next", "glm5_next_text", "hy_v4", "hy_v4_vl", "hy_v4_vl_text"),
    *("mistral_large4", "mistral_large4_text"),
)
"""Families whose layers for it are the same at any length: they choose tokens, windows of them, or compressed ones."""
_FETCH_AHEAD_BYTES: Final = 2 << 30
"""About what a disk reads while torch is imported."""


class Checkpoint(Section):
    """A model directory. Keys of `config.json` are read with the accessors of `Section`, those of `text_config` too."""

    served_len: builtins.int | None = None
    """The longest context that an engine serves, in tokens; None for the longest that the model is made for."""
    gguf: GGUFFile | None = None
    """The GGUF file of a model in llama.cpp's format; None for a directory."""
    mmproj: Path | None = None
    """The GGUF file with the model's vision encoder."""
    image_processor: Mapping[builtins.str, Any] | None = None
    """The settings of the image processor in `mmproj`; other models have a file with them."""

    def __init__(
        self, path: Path, config: Mapping[builtins.str, Any], overrides: Mapping[builtins.str, Any] | None = None
    ) -> None:
        """config: without the overrides."""
        where = str(path if path.is_file() else path / (PARAMS if is_native(path) else CONFIG))
        written, prefix = of_thinker(config, where)
        inner = (overrides or {}).get(THINKER_CONFIG)
        given = {**(overrides or {}), **inner} if prefix and isinstance(inner, Mapping) else overrides or {}
        config = in_todays_layout(overridden(written, given), where)
        super().__init__(flattened(config, where), where, prefix, flat_overrides(written, given))
        self.path = path
        self.stored = Section(config, where, prefix, given)
        """All of `config.json` in its own layout, with the overrides."""

    @classmethod
    def open(
        cls, path: Path, overrides: Mapping[builtins.str, Any] | None = None, mmproj: Path | None = None
    ) -> Checkpoint:
        """Read the config of the directory `path`, or of a GGUF file, with the values of `overrides` (`hf_overrides`).

        mmproj: the file with the vision encoder of a GGUF file. Raises CheckpointError when it is neither, ConfigError
        for overrides that are refused, and for an `mmproj` of a directory.
        """
        path = model_file(path)
        if is_gguf(path):
            from octavo.config.gguf_checkpoint import GGUFCheckpoint

            return GGUFCheckpoint(path, overrides, mmproj)
        if mmproj is not None:
            raise ConfigError(
                f"mmproj is {mmproj}, but the model {path} is no GGUF file: its vision encoder is in its own folder; "
                "leave it out"
            )
        if not path.is_dir():
            state = "is a file" if path.exists() else "does not exist"
            raise CheckpointError(f"{path}: {state}; expected a directory with a {CONFIG} and weights")
        if is_native(path):
            where, found = str(path / PARAMS), read_json_object(path / PARAMS)
            opened = cls(path, native_layout(found, where), overrides)
            opened.image_processor = native_images(found, where)
            return opened
        if not (path / CONFIG).is_file():
            layout = f"expected a model directory in Hugging Face layout{other_folder(path)}"
            raise CheckpointError(f"{path}: has no {CONFIG} and no GGUF file; {layout}")
        config = of_layers(read_json_object(path / CONFIG), str(path / CONFIG))
        for name in _QUANTIZATION_CONFIGS:
            if config.get(QUANTIZATION) is None and (path / name).is_file():
                config[QUANTIZATION] = {"quant_method": "gptq", **read_json_object(path / name)}
        return cls(path, config, overrides)

    @classmethod
    def of(cls, model: ModelConfig) -> Checkpoint:
        """Open the checkpoint of an engine. Raises as `open` does."""
        mmproj = None if model.mmproj is None else Path(model.mmproj)
        opened = cls.open(Path(model.path), model.hf_overrides, mmproj)
        opened.served_len = model.max_model_len
        return opened

    @cached_property
    def generation_config(self) -> Mapping[builtins.str, Any]:
        """All of `generation_config.json`; empty where there is none. Raises CheckpointError when it is damaged."""
        path = self.path / GENERATION_CONFIG
        return read_json_object(path) if path.is_file() else {}

    @cached_property
    def architecture(self) -> builtins.str:
        """The first name in `architectures`, else `model_type` where that key is absent.

        Raises UnsupportedModel for a config that names only code of its own (`auto_map`).
        """
        names = self.values.get("architectures")
        if names is None:
            code = self.section("auto_map")
            if code is not None and code.values:
                where = self.origin("architectures", "auto_map")
                raise UnsupportedModel(
                    f"{where}: auto_map is {shown(code.values)} and architectures is missing: code in the "
                    "directory alone defines the model, which octavo never runs, whatever trust_remote_code says; use "
                    "a model whose architectures names a family that octavo has"
                )
            if "model_type" in self.values:
                return self.str("model_type")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise self.error("architectures", 'a list with the name of the architecture, such as ["LlamaForCausalLM"]')
        return names[0]

    @property
    def text_model_type(self) -> builtins.str | None:
        """The `model_type` of the text model within a model that reads images or sound too; None for other models."""
        text = self.section(TEXT_CONFIG)
        return None if text is None else text.str("model_type", "").removesuffix("_text") or None

    def _path(self, name: builtins.str) -> builtins.str:
        text = self.values.get(TEXT_CONFIG)
        return super()._path(f"{TEXT_CONFIG}.{name}" if text and text.get(name) is not None else name)

    def max_model_len(self, default: builtins.int = REQUIRED) -> builtins.int:
        """Return the longest context the model is made for, in tokens; required when no default is given.

        A number beyond all memory is no reason to refuse: an engine takes the context that fits it.
        """
        others = ("n_positions", "max_target_positions")
        name = next((each for each in others if each in self.values), "max_position_embeddings")
        length = self.int(name, default)
        stretched = self._stretched(min(length, LARGEST_SIZE) if length > 0 else self.positive(name))
        return stretched if self.dense_limit is None else min(stretched, self.positive(self.dense_limit))

    @property
    def dense_limit(self) -> builtins.str | None:
        """The key for how many tokens queries see all of, where they see a part of longer contexts; None elsewhere.

        Only some families compute that part here; in others no context is longer.
        """
        if self.values.get("model_type") in (*_CHOOSING, *_ALWAYS_CHOOSING):
            return None
        return next((name for name in _SEEN_TOKENS if self.values.get(name) is not None), None)

    def chooses_tokens(self, max_model_len: builtins.int | None) -> bool:
        """Return whether queries of contexts of this length choose the tokens that they attend to, by an indexer.

        max_model_len: None for the longest context.
        """
        if self.values.get("model_type") not in _CHOOSING:
            return False
        return (max_model_len or self.max_model_len()) > self.positive("index_topk", 2048)

    def _stretched(self, length: builtins.int) -> builtins.int:
        """Return `length` positions with what rotary scaling adds to them."""
        if self.has_ropes_by_kind():
            return length
        rope = self.rope()
        kind = rope.str("rope_type")
        # linear scaling stretches the positions that max_position_embeddings states; llama3's figure includes it, and
        # yarn's does in some checkpoints
        if kind == "linear":
            return int(min(length * rope.positive_float("factor"), LARGEST_SIZE))
        if kind == "yarn":
            original = rope.positive("original_max_position_embeddings", length)
            return int(max(length, min(original * rope.positive_float("factor"), LARGEST_SIZE)))
        return length

    @property
    def context_note(self) -> builtins.str:
        """The bound of `max_model_len` and its reason, for messages."""
        if self.dense_limit is None or self.max_model_len() < self.positive(self.dense_limit):
            return "the context that the checkpoint was made for"
        return f"its {self.dense_limit}: of longer contexts queries see a part, which octavo does not compute"

    def rope(self, kind: builtins.str = "full_attention") -> Section:
        """Return the rotary parameters in one layout: `rope_type`, `rope_theta` and what the type needs.

        Reads `rope_parameters`, those of one `kind` of layer where they differ, as well as the older `rope_theta` and
        `partial_rotary_factor` (GPT-NeoX: `rotary_emb_base`, `rotary_pct`) beside `rope_scaling`.
        """
        section = self.section("rope_parameters") or self.section("rope_scaling")
        if section is not None and self.has_ropes_by_kind():
            if not isinstance(section.values.get(kind), Mapping):
                raise section.error(kind, "the rotary parameters of such layers")
            section = section.section(kind)
        values: dict[builtins.str, Any] = {**(section.values if section else {})}
        stated = values.get("rope_type") or values.get("type") or "default"
        values["rope_type"] = "yarn" if stated == "deepseek_yarn" else stated
        if values.get("rope_theta") is None:
            theta = self.positive_float("rotary_emb_base", 10_000.0)
            values["rope_theta"] = self.positive_float("rope_theta", theta)
        if self.values.get("original_max_position_embeddings") is not None:
            values["original_max_position_embeddings"] = self.values["original_max_position_embeddings"]
        for name in ("partial_rotary_factor", "rotary_pct"):
            if values.get("partial_rotary_factor") is None:
                values["partial_rotary_factor"] = self.values.get(name)
        prefix, own = (section._prefix, section._overrides) if section else ("", {})
        return Section(values, self.where, prefix, {**self._overrides, **own})

    def has_ropes_by_kind(self) -> builtins.bool:
        """Return whether the rotary parameters differ by kind of layer."""
        section = self.section("rope_parameters")
        return section is not None and any(isinstance(value, Mapping) for value in section.values.values())

    def dtype_name(self) -> builtins.str:
        """Return `float32`, `float16` or `bfloat16`: what the config states, else what most weights have."""
        for name in ("dtype", "torch_dtype"):
            if self.values.get(name) is not None:
                stated = self.str(name).removeprefix("torch.")
                if stated not in _DTYPE_NAMES.values():
                    raise self.error(name, "float32, float16 or bfloat16")
                return stated
        sizes: Counter[builtins.str] = Counter()
        for tensor in (each for each in self.tensors.values() if each.dtype in _DTYPE_NAMES):
            sizes[tensor.dtype] += tensor.nbytes
        return _DTYPE_NAMES[max(sizes, key=sizes.__getitem__, default="F32")]

    def bos_token_id(self) -> builtins.int | None:
        """Return the token that starts a text, where the config names one."""
        return self.optional_int("bos_token_id")

    def eos_token_ids(self, *, with_generation_config: builtins.bool = True) -> tuple[builtins.int, ...]:
        """Return the tokens that end a text: `generation_config.json`'s, else `config.json`'s; there may be none."""
        generation = Section(
            self.generation_config if with_generation_config else {}, str(self.path / GENERATION_CONFIG)
        )
        found = read_token_ids(generation)
        return (read_token_ids(self) or ()) if found is None else found

    def weight_files(self) -> tuple[WeightFile, ...]:
        """Return the files to load, safetensors before `.bin`. Raises CheckpointError when none or not all exist."""
        beside = (file for folder in folders_beside(self.stored) for file in Checkpoint.open(folder).weight_files())
        return (*self._own_files(), *beside)

    def _own_files(self) -> tuple[WeightFile, ...]:
        for stem in (CONSOLIDATED,) if is_native(self.path) else ("model.safetensors", "pytorch_model.bin"):
            index = self.path / f"{stem}.index.json"
            if index.is_file():
                return self._indexed_files(index)
            if (self.path / stem).is_file():
                return (WeightFile(self.path / stem),)
        if named := sorted(self.path.glob("gptq_model*.safetensors")):  # AutoGPTQ calls its one file by bits and group
            return (WeightFile(named[0]),)
        raise CheckpointError(
            f"{self.path}: has no weights; expected model.safetensors, model.safetensors.index.json with its shards, "
            "pytorch_model.bin or pytorch_model.bin.index.json"
        )

    def fetch_ahead(self, limit_bytes: builtins.int = _FETCH_AHEAD_BYTES) -> None:
        """Ask the system to read the first files from disk while the caller does other things."""
        if not hasattr(os, "posix_fadvise"):
            return
        for file in self.weight_files():
            if limit_bytes <= 0:
                return
            # advice: the reader of a file reports that it cannot be opened
            with suppress(OSError), file.path.open("rb") as content:
                os.posix_fadvise(content.fileno(), 0, limit_bytes, os.POSIX_FADV_WILLNEED)
                limit_bytes -= os.fstat(content.fileno()).st_size

    def weights_bytes(self) -> builtins.int:
        """Return the bytes of the weights on disk: exact for safetensors, the files' size for `.bin`."""
        files = self.weight_files()
        if files[0].is_safetensors:
            return sum(tensor.nbytes for tensor in self.tensors.values())
        return sum(file.path.stat().st_size for file in files)

    def num_parameters(self) -> builtins.int | None:
        """Return the number of elements of all tensors, where the headers say (safetensors that are not quantised)."""
        if self.section(QUANTIZATION) is not None:
            return None
        return sum(prod(tensor.shape) for tensor in self.tensors.values()) or None

    @cached_property
    def tensors(self) -> Mapping[builtins.str, TensorInfo]:
        """Every tensor of the safetensors files by name, from their headers; empty for `.bin` files."""
        found: dict[builtins.str, TensorInfo] = {}
        for file in self.weight_files():
            if not file.is_safetensors:
                continue
            header = read_header(file.path)
            missing = sorted((file.names or frozenset()) - header.keys())
            if missing:
                raise CheckpointError(f"{file.path}: lacks {missing[0]}, which the index lists; download it again")
            for name in header.keys() & found.keys():
                raise CheckpointError(
                    f"{file.path}: holds {name}, which {found[name].file} holds too; "
                    "the checkpoint is damaged, download it again"
                )
            found.update(header)
        return found

    def _indexed_files(self, index: Path) -> tuple[WeightFile, ...]:
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: weight_map is missing, expected an object from tensor name to file name")
        names: dict[builtins.str, set[builtins.str]] = {}
        for tensor, file_name in weight_map.items():
            # a shard lies beside its index: a path that leads elsewhere is not followed
            if not isinstance(file_name, str) or Path(file_name).name != file_name:
                raise CheckpointError(f"{index}: {tensor} is in {shown(file_name)}, expected a file beside the index")
            names.setdefault(file_name, set()).add(tensor)
        absent = [name for name in sorted(names) if not os.path.isfile(self.path / name)]
        if absent:
            raise CheckpointError(
                f"{self.path}: lacks {', '.join(map(shown, absent[:3]))} ({len(absent)} of {len(names)} weight files); "
                "download the model again"
            )
        return tuple(WeightFile(self.path / name, frozenset(names[name])) for name in sorted(names))


def read_token_ids(section: Section) -> tuple[int, ...] | None:
    """Return the tokens of `eos_token_id`, one or several; None where it is absent. Raises CheckpointError."""
    ids = section.values.get("eos_token_id")
    if ids is None:
        return None
    listed = ids if isinstance(ids, list) else [ids]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in listed):
        raise section.error("eos_token_id", "a token id or a list of them")
    return tuple(listed)


def model_file(path: Path) -> Path:
    """Return the GGUF file of a directory that has no config but one such model, or the first of its files; otherwise
    `path`. Raises CheckpointError where there are several models."""
    if not path.is_dir() or (path / CONFIG).is_file():
        return path
    files = [each for each in sorted(path.glob("*.gguf")) if is_first_file(each) and not is_mmproj(each)]
    if len(files) > 1:
        names = ", ".join(each.name for each in files[:6])
        raise CheckpointError(f"{path}: holds {len(files)} GGUF models ({names}); name one of the files")
    return files[0] if files else path
