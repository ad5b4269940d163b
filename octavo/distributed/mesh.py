"""A mesh: the ranks that share one model, seen from one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from octavo.distributed.collectives import Collectives
from octavo.distributed.parts import part_name
from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Axis:
    """The place `rank` among `size` ranks along one axis of parallelism."""

    rank: int = 0
    size: int = 1

    def share(self, count: int, name: str = "outputs of a layer") -> tuple[int, int]:
        """Return (start, length) of this rank's share of `count` items; `name` is their name in errors. Raises
        ConfigError if the shares would not be equal.
        """
        if count % self.size:
            raise ConfigError(
                f"tensor_parallel_size is {self.size}, must divide the {count:,} {name} of this model; "
                "choose a size that does, or pipeline_parallel_size, which shares whole layers"
            )
        length = count // self.size
        return self.rank * length, length


@dataclass(frozen=True, slots=True)
class Mesh:
    """The place of one rank: `tensor` ranks share each layer, `pipeline` ranks share the layers, `expert` ranks the
    experts; and the groups for calls to the others. Calls with tensors on the meta device make no communication: a dry
    run gets tensors of the right shapes. Calls that are not recordable pass through a `TorchFunctionMode` like
    functions of torch.
    """

    tensor: Axis = Axis()
    pipeline: Axis = Axis()
    expert: Axis = Axis()
    tensor_group: Collectives = field(default_factory=Collectives)
    """The tensor ranks of this rank's stage."""
    stage_group: Collectives = field(default_factory=Collectives)
    """The pipeline ranks with this rank's place in their stages."""
    reduce: Literal["gather", "sum"] = "gather"
    """How tensor ranks combine the outputs of a layer with a split input: `gather` gives the bits of a single rank,
    `sum` sends fewer bytes."""

    @classmethod
    def single(cls) -> Self:
        """Return the mesh of one rank."""
        return cls()

    @classmethod
    def of_rank(cls, rank: int, *, tensor: int = 1, pipeline: int = 1, whole_experts: bool = False) -> Self:
        """Return the place of `rank`, where the ranks of one pipeline stage are neighbours.

        `whole_experts`: the tensor ranks share the experts of a mixture, instead of splitting each expert.
        """
        stage, place = divmod(rank, tensor)
        own = Axis(place, tensor)
        return cls(own, Axis(stage, pipeline), own if whole_experts else Axis())

    @property
    def size(self) -> int:
        """The number of all ranks."""
        return self.tensor.size * self.pipeline.size

    @property
    def rank(self) -> int:
        """This rank's number among all."""
        return self.pipeline.rank * self.tensor.size + self.tensor.rank

    @property
    def stage_ranks(self) -> range:
        """The ranks that share the layers of this rank's stage, itself among them."""
        first = self.pipeline.rank * self.tensor.size
        return range(first, first + self.tensor.size)

    @property
    def column_ranks(self) -> range:
        """The ranks with this rank's place in their stages, itself among them."""
        return range(self.tensor.rank, self.size, self.tensor.size)

    @property
    def description(self) -> str:
        """Names the part of the weights that this rank has."""
        sizes = {"tensor": self.tensor.size, "pipeline": self.pipeline.size}
        return part_name(self.rank, **sizes, reduce=self.reduce, whole_experts=self.expert.size > 1)

    def layer_range(self, num_layers: int) -> range:
        """Return the layers of this rank's pipeline stage; the first stages have one more where shares differ.

        Raises ConfigError where there are fewer layers than stages.
        """
        stage, stages = self.pipeline.rank, self.pipeline.size
        if num_layers < stages:
            raise ConfigError(
                f"pipeline_parallel_size is {stages}, must be at most {num_layers}, the layers of this model; lower it"
            )
        least, extra = divmod(num_layers, stages)
        start = stage * least + min(stage, extra)
        return range(start, start + least + (stage < extra))

    def share(self, count: int, name: str = "outputs of a layer") -> tuple[int, int]:
        """Return (start, length) of this rank's share of `count` heads or output columns. Raises ConfigError."""
        return self.tensor.share(count, name)

    def gather(self, share: Tensor) -> Tensor:
        """Return the shares [..., n] of all tensor ranks side by side along the last dimension, on every rank."""
        if share.is_meta:
            return share.new_empty((*share.shape[:-1], share.shape[-1] * self.tensor.size))
        group = self.tensor_group
        gathered: Tensor = _call(group, group.gather, share)
        return gathered

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum of the `partial` of every tensor rank, on every rank; `partial` may be written over."""
        group = self.tensor_group
        if partial.is_meta:
            return partial
        total: Tensor = _call(group, group.sum, partial)
        return total

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Write the `tensor` of the tensor rank `source` over those of the other tensor ranks."""
        if not tensor.is_meta:
            _call(self.tensor_group, self.tensor_group.broadcast, tensor, source)

    def send(self, tensor: Tensor, stage: int) -> None:
        """Send to this rank's counterpart in another stage."""
        if not tensor.is_meta:
            _call(self.stage_group, self.stage_group.send, tensor, stage)

    def receive(self, tensor: Tensor, stage: int) -> None:
        """Write what this rank's counterpart in another stage sent next over `tensor`."""
        if not tensor.is_meta:
            _call(self.stage_group, self.stage_group.receive, tensor, stage)

    def check(self) -> None:
        """Raise EngineDeadError where the calls of a step have failed since the host made them."""
        self.tensor_group.check()
        self.stage_group.check()

    def watch(self) -> None:
        """Start the deadline for the calls of tensor ranks launched so far, also those of a replay."""
        self.tensor_group.watch()

    def poison(self, reason: str) -> None:
        """Make waiting and later calls of every rank that this one reaches raise EngineDeadError; from any thread."""
        self.tensor_group.poison(reason)
        self.stage_group.poison(reason)

    def close(self) -> None:
        """Release the groups. Idempotent."""
        self.tensor_group.close()
        self.stage_group.close()


def _call(group: Collectives, call: Callable[..., Any], tensor: Tensor, *rest: int) -> Any:
    """Make a collective call, through the active `TorchFunctionMode` unless the call is recordable."""
    if not group.is_recordable and has_torch_function_unary(tensor):
        return handle_torch_function(call, (tensor,), tensor, *rest)
    return call(tensor, *rest)
