"""From a checkpoint to a model that computes: build without memory, compare with the headers, bind, fill, finish."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module

import torch
from torch import Tensor

from octavo.attention.backend import AttentionBackend
from octavo.attention.metadata import IntermediateTensors
from octavo.config.checkpoint import QUANTIZATION, Checkpoint
from octavo.config.explain import RankShare
from octavo.config.safetensors_header import TensorInfo
from octavo.config.schema import PoolingConfig
from octavo.core.model_shape import ModelShape
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, ConfigError, UnsupportedModel
from octavo.layers.embedding import VocabularyShare
from octavo.layers.experts import Experts
from octavo.layers.layer import Binding, Layer, TensorSlot
from octavo.models.content import WeightContent
from octavo.models.decoder import DecoderStack, possible_sizes
from octavo.models.packed_cache import PackedCache, made_of
from octavo.models.packed_folder import PackedFolder
from octavo.models.registry import ModelClass, resolve_model
from octavo.models.stored_names import check_tensors, strip_prefix, tensor_slots
from octavo.models.stored_view import StoredView
from octavo.models.task_adapters import adapted_tensors, adapter_weights
from octavo.models.weight_files import StoredTensor, Wanted, checkpoint_tensors, progress_bar, read_ahead
from octavo.ops.codes import NotFinite
from octavo.ops.memory import zeroed
from octavo.ops.registry import Ops
from octavo.quantization.method import DEFAULT_CODES, STORED, UNQUANTIZED, FromPlain, KeptAs, WeightMethod
from octavo.quantization.registry import stored_format
from octavo.quantization.stored import CODED

_READ_AHEAD_BYTES = 64 << 20
"""Most bytes of tensors that are read while the one before them is packed."""

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class LoadedModel:
    """A checkpoint's model as one rank of a mesh has it: first opened without memory, then loaded."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        mesh: Mesh,
        dtype: torch.dtype,
        method: str,
        model: DecoderStack,
        shape: ModelShape,
        view: StoredView | None,
    ) -> None:
        """shape: the sizes of this rank's part, its layers and its heads. view: of a quantised checkpoint."""
        self.dtype = dtype
        self.model = model
        self.shape = shape
        self.plain_bytes = model.plain_bytes()
        """The bytes of all parameters before any layer is finished."""
        self._checkpoint = checkpoint
        self.mesh = mesh
        """The place of this rank."""
        self._method, self._view = method, view

    @classmethod
    def open(
        cls,
        checkpoint: Checkpoint,
        mesh: Mesh,
        dtype: torch.dtype = torch.float32,
        method: WeightMethod | None = None,
        kept_as: KeptAs = DEFAULT_CODES,
        pooling: PoolingConfig | None = None,
        reads_images: bool = True,
        model_class: ModelClass | None = None,
    ) -> LoadedModel:
        """Build the model on the meta device: shapes and names in `dtype`, no memory, and no weight is read.

        `method` keeps the weights that are multiplied; by default they stay as the checkpoint has them, and those of
        a quantised one are multiplied as `kept_as` says. pooling: of a model that makes vectors,
        which has no head for tokens unless it judges by them. Raises CheckpointError, or ConfigError where the model
        cannot be shared by the ranks of the mesh, or is quantised already.

        reads_images: False leaves an encoder of images out. model_class: in place of that of the architecture.
        """
        model_class = model_class or resolve_model(checkpoint, makes_text=pooling is None, reads_images=reads_images)
        config = model_class.read(checkpoint)
        if pooling is not None and not pooling.token_ids:
            config = replace(config, has_head=pooling.has_vocabulary, tied=pooling.has_vocabulary)
        shape = config.shape(mesh)
        with torch.device("meta"), possible_sizes(checkpoint):
            model = model_class(config, mesh)
            if pooling is not None and not pooling.is_causal and not model.sees_ahead:
                raise UnsupportedModel(
                    f"{checkpoint.origin('is_causal', 'architectures')}: tokens see those behind them, which is not "
                    "implemented for this family"
                )
            if pooling is not None and pooling.labels and not pooling.token_ids and model.is_last:
                model.add_scores(len(pooling.labels), pooling.head)
            if pooling is not None and pooling.has_vocabulary:
                model.add_scores(config.vocab_size, "vocabulary")
            if pooling is not None:  # the pooler reads them
                model.leave_out(strip_prefix(model, dense.prefix) for dense in pooling.dense if dense.is_among_weights)
            model.to(dtype)
            view = _view(checkpoint, model, method, kept_as)
            methods = (lambda _: method or UNQUANTIZED) if view is None else view.method_of
            for path, layer in model.layers_by_path():
                layer.use(methods, path)
        if mesh.expert.size > 1 and mesh.pipeline.size == 1 and _experts(model) is None:
            raise ConfigError("enable_expert_parallel is set, but this model has no experts; leave it out")
        keeps_codes = view is not None and view.requantized_by is None
        name = STORED if keeps_codes else (method or UNQUANTIZED).name
        return cls(checkpoint, mesh, dtype, name, model, shape, view)

    def share(self) -> RankShare | None:
        """Return this rank's share of the model; None where there are no other ranks."""
        mesh, config = self.mesh, self.model.config
        if mesh.size == 1:
            return None
        rows, layers = VocabularyShare.of(config.vocab_size, mesh), self.model.layer_range
        return RankShare(
            rank=mesh.rank,
            num_ranks=mesh.size,
            layers=(layers.start, layers.stop),
            num_layers=config.num_layers,
            num_heads=self.shape.num_heads,
            num_kv_heads=self.shape.num_kv_heads,
            vocabulary=(rows.start, rows.start + rows.length),
            experts=_experts(self.model),
        )

    def stored_as(self) -> list[tuple[str, str, str]]:
        """Return (weights, the form kept in memory, the stored form) for each way of quantisation."""
        return [] if self._view is None else self._view.explain(self.dtype)

    def position_bytes(self) -> int:
        """Return the bytes that tables with a row for each position take per position."""
        return self.model.config.position_bytes()

    def received_buffers(self, num_tokens: int, device: torch.device | str) -> IntermediateTensors | None:
        """Return buffers for the tensors that a step of `num_tokens` receives, from the stage before this one or the
        model that a head reads; None where it receives none."""
        if self.model.received_size is None:
            return None
        shape = num_tokens, self.model.received_size
        hidden = torch.empty(shape, dtype=self.dtype, device=device)
        return IntermediateTensors(hidden, torch.empty_like(hidden) if self.model.carries_residual else None)

    def check_tensors(self) -> None:
        """Compare the names and shapes of the checkpoint with what the model reads. Raises CheckpointError."""
        checkpoint = self._checkpoint
        if self._view is not None:
            stored: Iterable[TensorInfo | StoredTensor] = list(self._view.tensors())
        else:  # archives have no headers
            stored = adapted_tensors(checkpoint) or checkpoint.tensors.values() or list(checkpoint_tensors(checkpoint))
        check_tensors(checkpoint, self.model, stored)

    def load(
        self,
        ops: Ops,
        backend: AttentionBackend,
        *,
        device: torch.device | str = "cpu",
        dummy_seed: int | None = None,
        packed: PackedFolder | None = None,
        max_positions: int | None = None,
        max_model_len: int | None = None,
        progress: bool = False,
    ) -> DecoderStack:
        """Return the model ready to run on `device`.

        `dummy_seed` draws random weights instead of reading any, the same for every number of ranks. A layer is
        brought into the form that computes best as soon as its tensors have arrived: there is no second copy of more
        than the layers in between. `packed` keeps the result for the next start. `max_positions` bounds the tables that
        are made per position. Raises CheckpointError for files and tensors that do not fit, ConfigError for a folder
        that cannot be made.
        """
        model = self.model
        if dummy_seed is None and (self._view is not None or self._checkpoint.tensors):  # else `_fill` compares
            self.check_tensors()
        longest = model.config.max_positions
        positions, served = (longest if each is None else min(each, longest) for each in (max_positions, max_model_len))
        binding = Binding(ops, backend, positions, served, device)
        for _, layer in model.layers_by_path():
            layer.bind(binding)
        cache = None
        if packed is not None and dummy_seed is None:
            cache = self._packed_cache(packed, ops)
            state = cache.read(model.state_specs(ops))
            if state is not None:
                model.restore(state, ops)
                return model
            cache.prepare()
        with torch.no_grad():
            if dummy_seed is None:
                self._fill(device, progress)
            else:
                for path, layer in model.layers_by_path():
                    self.mesh.check()
                    for slot in layer.tensor_slots(path):
                        if slot.required:
                            slot.fill(
                                random_tensor(slot.name, slot.shape, dummy_seed, slot.dtype or self.dtype, device)
                            )
                    layer.finish()
        binding.scratch.clear()
        if cache is not None:
            cache.keep(model.state())
        return model

    @contextmanager
    def bound_dry(self, ops: Ops, backend: AttentionBackend) -> Iterator[DecoderStack]:
        """Bind the model, its weights without data, for a forward pass on the meta device; afterwards it is as before.

        Tables that are made per position have one row.
        """
        layers = [layer for _, layer in self.model.layers_by_path()]
        parameters = [dict(layer.named_parameters(recurse=False)) for layer in layers]
        specs = self.model.state_specs(ops)
        with torch._C.DisableTorchFunction():  # weights and tables are not what is measured here
            # on the meta device torch imports seconds of Python before it computes a table
            ropes = self.model.config.all_ropes()
            tables: dict[Hashable, Tensor] = {rope: torch.empty((1, rope.dim), device="meta") for rope in ropes}
            state = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()}
        binding = Binding(ops, backend, max_positions=1, device="meta", made=tables)
        for layer in layers:
            layer.bind(binding)
        self.model.restore(state, ops)
        try:
            yield self.model
        finally:
            for layer, own in zip(layers, parameters, strict=True):
                for name, parameter in own.items():
                    layer.register_parameter(name, parameter)

    def _fill(self, device: torch.device | str, progress: bool) -> None:
        """Read every file once and fill the slot of each tensor."""
        checkpoint, model = self._checkpoint, self.model
        if self._view is not None:
            stored = list(self._view.tensors())
        else:
            stored = adapted_tensors(checkpoint) or list(checkpoint_tensors(checkpoint))
            if not checkpoint.tensors:  # archives have no headers, which would have been checked before
                check_tensors(checkpoint, model, stored)
        slots, arrivals = tensor_slots(model), _Arrivals(model)
        wanted = [(slots[name], tensor) for tensor in stored if (name := strip_prefix(model, tensor.name)) in slots]
        # tensors that repeat others are compared with them, so they come last
        wanted.sort(key=lambda pair: not pair[0].required)
        reads = [Wanted(tensor, slot.parts) for slot, tensor in wanted]
        show: AbstractContextManager[Callable[[int], None]] = nullcontext(lambda _: None)
        if progress:
            show = progress_bar(f"Loading {checkpoint.path.name}", sum(each.nbytes for each in reads))
        with show as advance:
            for (slot, tensor), (read, values) in zip(wanted, read_ahead(reads, _READ_AHEAD_BYTES), strict=True):
                self.mesh.check()  # a rank that has failed meanwhile is no reason to read on
                try:
                    arrivals.take(slot, values.to(device))
                except CheckpointError as error:
                    raise CheckpointError(f"{checkpoint.path}: {error}") from error
                tensor.release()
                advance(read.nbytes)

    def _packed_cache(self, packed: PackedFolder, ops: Ops) -> PackedCache:
        """Open the cache of packed weights. Raises ConfigError for a folder that cannot be made."""
        checkpoint = self._checkpoint
        layouts = {kept.layout for _, layer in self.model.layers_by_path() for kept in layer.formats(ops)}
        made = made_of(
            checkpoint,
            dtype=self.dtype,
            method=self._method,
            layout=" ".join(sorted(layouts)),
            ranks=self.mesh.description,
        )
        files = [*(file.path for file in checkpoint.weight_files()), *adapter_weights(checkpoint)]
        packed.make()
        return PackedCache(packed, checkpoint.path.name, WeightContent(files, packed.threads), made)


def _view(
    checkpoint: Checkpoint, model: DecoderStack, method: WeightMethod | None, kept_as: KeptAs
) -> StoredView | None:
    """Return the view of a quantised checkpoint, None of another. Raises ConfigError where `method` would quantise its
    weights once more."""
    section = checkpoint.section(QUANTIZATION)
    if section is None:
        return None
    kept = stored_format(section)
    if not isinstance(method, FromPlain) or method is UNQUANTIZED:
        return StoredView(checkpoint, model, kept, kept_as)
    is_lossy = checkpoint.gguf is None or not checkpoint.gguf.is_plain
    if is_lossy and not method.requantizes:
        raise ConfigError(
            f"quantization is {method.name}, but the checkpoint is quantised already ({kept.name}), and quantising it "
            "again would add about 1 % (int8) or 9 % (int4) of error; leave quantization out, use the unquantised "
            "checkpoint, or set allow_requantize, which is for the model and not for a draft model"
        )
    return StoredView(checkpoint, model, kept, requantized_by=method)


def _experts(model: DecoderStack) -> tuple[int, int, int] | None:
    """Return (first, end, of how many) of the experts of this rank, where ranks share them."""
    layers = (layer for _, layer in model.layers_by_path() if isinstance(layer, Experts))
    return next((layer.shared_out for layer in layers), None)


def random_tensor(
    name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the tensor `name` of a fresh model: ones for norms, zeros for biases, matrices uniform around zero.

    The values follow from seed, name, shape and type, whichever rank takes a share of them.
    """
    if (kind := name.rpartition(".")[2]) in CODED:
        return _random_codes(kind, name, shape, seed, dtype, device)
    values = zeroed(shape, dtype, torch.device(device))  # given back to the system when it is freed
    if not dtype.is_floating_point:  # a table of numbers, different ones in each row
        return values.copy_(torch.arange(shape[-1]).expand(shape))
    if len(shape) == 1:
        return values.fill_(0.0 if name.endswith("bias") else 1.0)
    generator = _generator(name, seed, values.device)
    bound = (3.0 / shape[1]) ** 0.5
    return values.uniform_(-bound, bound, generator=generator)


def _generator(name: str, seed: int, device: torch.device | str) -> torch.Generator:
    import_module("torch._prims.rng_prims")  # the processes of an engine import torch without what generators need
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))


def _random_codes(
    kind: str, name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Return a tensor of a quantised weight: values are about as large as those of trained ones."""
    if kind == "codes":
        generator = _generator(name, seed, device)
        least = -8 if dtype is torch.int8 else 0
        return torch.randint(least, least + 16, shape, generator=generator, dtype=dtype, device=device)
    if kind == "order":
        return torch.arange(shape[0], dtype=dtype, device=device)
    fixed = {
        "zeros": 8.0,
        "scales": 1.0 if dtype is torch.int8 else 2.0**-8,
        "minimums": 8.0 if dtype is torch.int8 else 2.0**-5,
    }
    return torch.full(shape, fixed.get(kind, 2.0**-8), dtype=dtype, device=device)


class _Arrivals:
    """Fills slots and finishes a layer as soon as it has all its tensors, which releases what it was made from."""

    def __init__(self, model: DecoderStack) -> None:
        self._owner: dict[str, tuple[str, Layer]] = {}
        self._num_awaited: dict[Layer, int] = {}
        for path, layer in model.layers_by_path():
            names = [slot.name for slot in layer.tensor_slots(path) if slot.required]
            self._num_awaited[layer] = len(names)
            self._owner.update(dict.fromkeys(names, (path, layer)))

    def take(self, slot: TensorSlot, stored: Tensor) -> None:
        """Fill `slot`. A tensor that repeats others comes after them. Raises CheckpointError."""
        slot.fill(stored)
        if not slot.required:
            return
        path, layer = self._owner[slot.name]
        self._num_awaited[layer] -= 1
        if self._num_awaited[layer]:
            return
        try:
            layer.finish()
        except NotFinite as error:
            raise CheckpointError(
                f"{_tensor_with_row(path, layer, error.row)} holds NaN or an infinity, which cannot be quantised; "
                "the checkpoint is damaged, download it again"
            ) from error


def _tensor_with_row(path: str, layer: Layer, row: int) -> str:
    """Return which of the tensors that are stacked to the layer's weight holds its row `row`."""
    stacked = [slot for slot in layer.tensor_slots(path) if slot.name.endswith(("weight", "scales"))]
    outputs = 1 if getattr(layer, "transposed", False) else 0
    for slot in stacked:
        size = slot.shape[outputs]
        row -= sum(len(range(size)[part[outputs]]) if len(part) > outputs else size for part in slot.parts)
        if row < 0:
            break
    return slot.name
