"""What octavo decided and why, in words and tables: the memory plan, the chosen operators, the facts of a model.

The worker measures and fills `MemoryPlan`; the command line, the log at start and `octavo explain` render it. The
numbers in a plan are bytes unless their name says otherwise.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, zip_longest

import msgspec

from octavo.config.checkpoint import QUANTIZATION, Checkpoint
from octavo.config.schema import EngineConfig
from octavo.config.section import Section
from octavo.core.cache_limits import CacheLimits
from octavo.core.model_shape import CacheGroup
from octavo.gguf.reader import HELD_AS, PLAIN_TYPES, GGUFFile
from octavo.platform import Platform

_ACTIVATION_ERRORS = {8: "0.8 %", 16: "0.003 %"}
"""Relative root mean square error of a product by bits of activations, for normally distributed rows."""

_FILLS = "█▓▒░"
_BAR_WIDTH = 60
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def render_bytes(count: int) -> str:
    """Return `count` bytes as people read them: 1536 -> "1.50 KiB"."""
    power = min((abs(count).bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{count / 1024**power:.2f} {_UNITS[power]}" if power > 0 else f"{count} B"


def render_table(rows: Iterable[Sequence[str]]) -> str:
    """Return rows of cells as aligned columns; the last column may have any width."""
    table = list(rows)
    widths = [max(map(len, cells)) for cells in zip_longest(*table, fillvalue="")]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in table
    )


def render_bar(shares: Sequence[float], width: int) -> str:
    """Return a bar of `width` characters whose parts have these shares, up to three; the rest is empty.

    A part above 0 has at least one character.
    """
    bar = "".join(fill * max(round(share * width), share > 0) for fill, share in zip(_FILLS, shares, strict=False))
    return bar[:width].ljust(width, _FILLS[-1])


def render_ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers with runs of neighbours as ranges: 0, 1, 2, 5 -> "0-2, 5"."""
    runs = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = [(members[0][1], members[-1][1]) for members in (list(run) for _, run in runs)]
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


class RankShare(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a model that one rank of several holds. Ranges are (first, end)."""

    rank: int
    num_ranks: int
    layers: tuple[int, int]
    num_layers: int
    num_heads: int
    """Attention heads of this rank in each of its layers."""
    num_kv_heads: int
    vocabulary: tuple[int, int]
    """Rows of the token embedding and of the head."""
    experts: tuple[int, int, int] | None = None
    """(first, end, of how many) where ranks share whole experts."""

    def render(self) -> str:
        """Return the share in one line."""
        (first, end), (start, stop), experts = self.layers, self.vocabulary, ""
        if self.experts is not None:
            experts = f", experts {self.experts[0]}-{self.experts[1] - 1} of {self.experts[2]}"
        return (
            f"layers {first}-{end - 1} of {self.num_layers}, {self.num_heads} heads with {self.num_kv_heads} of keys "
            f"and values, tokens {start:,}-{stop - 1:,}"
            f"{experts}"
        )


_KEPT = "of images and sounds, kept for later prompts; what the encoder itself computes with is not counted"


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How the memory of one worker is divided before a single block is allocated.

    `limit` is what this worker may use in all, for the reason in `limit_because` ("machine", "cgroup",
    "utilization 0.9 of the machine", ...). `cache` holds the numbers of usable KV blocks, for the
    reason in `num_blocks_because` ("kv_cache_memory", "at most 4 GiB on a CPU",
    "num_gpu_blocks_override", "memory left", ...).
    """

    device: str
    total_memory: int
    """Memory that the machine, or the cgroup that confines this process, has."""
    available_memory: int
    """The part of `total_memory` that is free at the time of planning."""
    limit: int
    limit_because: str
    weights_bytes: int
    activation_bytes: int
    """The peak of one step that fills `max_num_batched_tokens` and `max_num_seqs`, sampling included; where it is
    measured, with all that is held beside weights and KV cache."""
    activations_because: str = "peak of the fullest step"
    encodings_bytes: int = 0
    """Outputs of encoders of images and sounds, kept for later prompts; 0 for a model that reads text alone."""
    cache: CacheLimits
    cache_groups: tuple[CacheGroup, ...] = ()
    """This rank's layers by what they keep, counted from its first one."""
    num_blocks_because: str
    kv_bytes: int
    """All device blocks, the null block included."""
    host_bytes: int
    """Swap space. It is counted against `limit` where host and device share the memory."""
    max_model_len: int
    share: RankShare | None = None
    """The part of the model that this rank holds, where there are several ranks."""
    rope_note: str = ""
    """How the rotation of positions follows from `max_model_len`, where it does (LongRoPE)."""

    def limited_to(self, num_blocks: list[int], num_host_blocks: list[int]) -> MemoryPlan:
        """Return the plan with so many blocks of each cache group, where another rank has no room for more."""
        cache = self.cache.with_blocks(num_blocks, num_host_blocks)
        if cache == self.cache:
            return self
        groups = cache.groups
        return msgspec.structs.replace(
            self,
            cache=cache,
            num_blocks_because="what every rank has room for",
            kv_bytes=sum((each.num_blocks + 1) * each.block_bytes for each in groups),
            host_bytes=sum((each.num_host_blocks + 1) * each.block_bytes for each in groups if each.num_host_blocks),
        )

    @property
    def planned_bytes(self) -> int:
        """All bytes that the plan allots on the device: weights, activations, kept encodings, blocks."""
        return self.weights_bytes + self.activation_bytes + self.encodings_bytes + self.kv_bytes

    @property
    def max_concurrency(self) -> float:
        """How many requests of `max_model_len` tokens fit into the device blocks at once."""
        size, length = self.cache.block_size, self.max_model_len
        return min(group.num_blocks / max(1, group.max_blocks(length, 1, 1, size)) for group in self.cache.groups)

    @property
    def window_note(self) -> str:
        """How many tokens a request keeps with sliding windows, in words; empty where they free none."""
        has_several = len(self.cache.groups) > 1
        return "; ".join(
            f"a request keeps at most {group.max_live_tokens:,} tokens: a sliding window of {group.window:,}, and what "
            f"a step computes{f' (cache group {index})' if has_several else ''}"
            for index, group in enumerate(self.cache.groups)
            if group.window is not None
            and group.max_live_tokens is not None
            and group.max_live_tokens < self.max_model_len
        )

    def _render_groups(self) -> Iterator[tuple[str, str, str]]:
        """Yield a row for each cache group: its number, the bytes of its blocks, and what its layers keep in them."""
        first = 0 if self.share is None else self.share.layers[0]
        for number, (group, limits) in enumerate(zip(self.cache_groups, self.cache.groups, strict=False)):
            ranges = render_ranges(first + layer for layer in group.layers)
            layers = f"layer{'' if len(group.layers) == 1 else 's'} {ranges}" if group.layers else "no layer"
            window = "" if group.window is None else f", window {group.window:,}"
            num_blocks = f"{limits.num_blocks:,} blocks of {render_bytes(limits.block_bytes)}"
            num_bytes = render_bytes((limits.num_blocks + 1) * limits.block_bytes)
            yield f"  group {number}", num_bytes, f"{num_blocks}: {group.keeps.render()}{window}, {layers}"

    @property
    def _num_blocks(self) -> str:
        return " + ".join(f"{group.num_blocks:,}" for group in self.cache.groups)

    def summarize(self) -> str:
        """Return the plan in one line."""
        return (
            f"weights {render_bytes(self.weights_bytes)}, activations {render_bytes(self.activation_bytes)}, "
            f"KV cache {render_bytes(self.kv_bytes)} ({self._num_blocks} blocks of {self.cache.block_size} tokens), "
            f"{self.planned_bytes / max(self.limit, 1):.0%} of {render_bytes(self.limit)}"
            + "".join(f"; {note}" for note in (self.window_note, self.rope_note) if note)
        )

    def render_bar(self) -> str:
        """Return the limit as a bar of weights, KV cache, activations and the rest, and what its parts are."""
        sizes = {"weights": self.weights_bytes, "KV": self.kv_bytes, "activations": self.activation_bytes}
        limit = max(self.limit, 1)
        parts = sizes | {"rest": max(0, limit - self.planned_bytes)}
        legend = " ".join(  # a single space: with their indent the parts take less than 80 columns
            f"{fill} {name} {render_bytes(size)}" for fill, (name, size) in zip(_FILLS, parts.items(), strict=True)
        )
        return f"{render_bar([size / limit for size in sizes.values()], _BAR_WIDTH)}\n{legend}"

    def render(self) -> str:
        """Return the plan as a table, with the limit as a bar."""
        bar = self.render_bar().replace("\n", "\n  ")
        rows = [
            *([(f"rank {self.share.rank} of {self.share.num_ranks}", "", self.share.render())] if self.share else []),
            (
                "memory of the machine",
                render_bytes(self.total_memory),
                f"{render_bytes(self.available_memory)} available" + (" to this rank, its share" if self.share else ""),
            ),
            ("limit", render_bytes(self.limit), self.limit_because),
            ("weights", render_bytes(self.weights_bytes)),
            ("activations", render_bytes(self.activation_bytes), self.activations_because),
            *([("encodings", render_bytes(self.encodings_bytes), _KEPT)] if self.encodings_bytes else []),
            (
                "KV cache",
                render_bytes(self.kv_bytes),
                f"{self._num_blocks} blocks of {self.cache.block_size} tokens, "
                f"{' + '.join(render_bytes(group.block_bytes) for group in self.cache.groups)} each: "
                f"{self.num_blocks_because}",
            ),
            *self._render_groups(),
            ("host tier", render_bytes(self.host_bytes), f"{self.cache.num_host_blocks:,} blocks of swap space"),
            (
                "planned",
                render_bytes(self.planned_bytes),
                f"{self.planned_bytes / max(self.limit, 1):.0%} of the limit",
            ),
        ]
        room = (
            f"room for {self.cache.num_tokens:,} tokens: {self.max_concurrency:.1f} requests of "
            f"{self.max_model_len:,} tokens at once"
        )
        room += "".join(f"; {note}" for note in (self.window_note, self.rope_note) if note)
        return f"memory plan ({self.device})\n  {bar}\n{render_table(rows)}\n  {room}"


def render_facts(title: str, facts: Iterable[tuple[str, object]]) -> str:
    return f"{title}\n{render_table([(name, str(value)) for name, value in facts])}"


def platform_facts(platform: Platform) -> list[tuple[str, object]]:
    """Return the facts of the machine, in the order in which its facts are worth reading."""
    vector_sets = [name for name in platform.instruction_sets if name.startswith(("avx", "amx", "asimd", "sve"))]
    memory = platform.memory
    return [
        ("processor", platform.cpu_model),
        ("cores", platform.cores),
        ("memory", f"{render_bytes(memory.total)} ({memory.source}), {render_bytes(memory.available)} available"),
        ("instruction sets", " ".join(vector_sets) or "none that octavo knows"),
        (
            "compiled module",
            platform.native_module or "absent: every operator runs in plain torch; reinstall octavo to build it",
        ),
    ]


def types_of_file(file: GGUFFile) -> str:
    """Return the bytes of each type, most first, and how those are held that take more memory than in the file."""
    sizes: Counter[str] = Counter()
    for tensor in file.tensors:
        sizes[tensor.type] += tensor.nbytes
    notes = {kind: f" ({held})" for kind, held in HELD_AS.items()}
    return ", ".join(f"{kind} {render_bytes(size)}{notes.get(kind, '')}" for kind, size in sizes.most_common())


def _activations(bits: int) -> str:
    error = _ACTIVATION_ERRORS[bits]
    other = "--activation-bits 16 loses less and multiplies twice" if bits == 8 else "each is multiplied twice"
    return f"rounded to {bits} bits a token, {error} of a product of normally distributed values (rms); {other}"


def _has_codes(stored_as: Section, file: GGUFFile | None) -> bool:
    """Return whether some weights of a quantised checkpoint are multiplied as codes, not dequantised while loading."""
    if file is not None:
        return any(each.type not in PLAIN_TYPES and HELD_AS.get(each.type) != "dequantised" for each in file.tensors)
    groups = stored_as.values.get("config_groups")
    if isinstance(groups, dict) and groups:
        kept = [each.get("weights") for each in groups.values() if isinstance(each, dict)]
        return any(
            not isinstance(each, dict) or (each.get("type"), each.get("num_bits")) != ("float", 8) for each in kept
        )
    is_float = str(stored_as.values.get("quant_method")).endswith("fp8")
    return not (is_float or stored_as.values.get("load_in_4bit"))


def model_facts(config: EngineConfig, checkpoint: Checkpoint) -> list[tuple[str, object]]:
    """Return what the checkpoint says, and what octavo takes from it."""
    model, scheduler = config.model, config.scheduler
    has_weights = model.load_format == "auto"
    parameters = checkpoint.num_parameters() if has_weights else None
    stored = f" (the checkpoint: {checkpoint.dtype_name()})" if has_weights else ""
    stored_as = checkpoint.section(QUANTIZATION)
    is_plain = checkpoint.gguf is not None and checkpoint.gguf.is_plain
    kept = ("quantised while loading" if is_plain else "quantised again") if model.quantization else "as it is stored"
    is_quantized = model.quantization or (stored_as is not None and _has_codes(stored_as, checkpoint.gguf))
    context = f"{model.max_model_len:,} tokens"
    if model.max_model_len != checkpoint.max_model_len():
        context += f" of {checkpoint.max_model_len():,}, {checkpoint.context_note}"
    elif checkpoint.dense_limit is not None:
        context += f", {checkpoint.context_note}"
    defaults = ", ".join(f"{name} {value}" for name, value in model.generation_defaults.items())
    return [
        ("name", model.name),
        ("directory", model.path),
        *([("overrides", json.dumps(model.hf_overrides))] if model.hf_overrides else []),
        ("architecture", checkpoint.architecture),
        ("parameters", f"{parameters:,}" if parameters else "not counted: the weights are quantised, or not read"),
        ("number format", f"{model.dtype}{stored}"),
        *([("quantization", f"{model.quantization}, made while loading")] if model.quantization else []),
        *([("guesses of tokens", f"{config.draft.method}: {config.draft.path}")] if config.draft is not None else []),
        *([] if stored_as is None else [("quantization", f"{stored_as.values.get('quant_method')}, {kept}")]),
        *([] if checkpoint.gguf is None else [("weights in the file", types_of_file(checkpoint.gguf))]),
        *([] if checkpoint.mmproj is None else [("vision encoder", checkpoint.mmproj)]),
        *([("activations", _activations(model.activation_bits))] if is_quantized else []),
        ("KV cache in", config.cache.dtype),
        ("vocabulary", f"{model.vocab_size:,} tokens"),
        ("context", context),
        (
            "ends with",
            ", ".join(map(str, model.eos_token_ids)) or "no token: only max_tokens and stop strings end a text",
        ),
        ("sampling defaults", defaults or "octavo's own"),
        (
            "a step has",
            f"at most {scheduler.max_num_batched_tokens:,} tokens of {scheduler.max_num_seqs:,} sequences; "
            f"up to {config.device.threads} threads compute",
        ),
    ]
