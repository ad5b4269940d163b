"""What a person may set about the device, the ranks and the machines that a model runs on; a part of `args`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from octavo.config.fields import Arg, check_values, names_its_arguments
from octavo.devices import DEVICES

TensorParallelReduce = Literal["gather", "sum"]


@dataclass(frozen=True, kw_only=True)
class ComputeArgs:
    """Where and how a rank computes."""

    heading: ClassVar = "Device"

    device: Annotated[
        str,
        Arg(
            "Where the model runs: cuda is a GPU of NVIDIA, cpu has compiled kernels, reference is plain torch, auto "
            "is the best that can run here.",
            choices=("auto", *DEVICES),
        ),
    ] = "auto"
    threads: Annotated[
        int | None,
        Arg(
            "Threads that compute, at most one per core. By default that many, and a single one in steps that are "
            "too short for more.",
            ge=1,
            le=4096,
        ),
    ] = None
    instruction_set: Annotated[
        str,
        Arg(
            "What compiled CPU kernels run at; by default the best that the processor has. reference is "
            "another name for the device reference, amx_emulated a slow software model of AMX for checking.",
            choices=("auto", "amx", "avx512_bf16", "avx512", "avx2", "reference", "amx_emulated"),
        ),
    ] = "auto"
    batch_invariant: Annotated[
        bool,
        Arg(
            "On CUDA: results never depend on what else is computed beside a request, which costs speed. The compiled "
            "kernels of the cpu always compute so."
        ),
    ] = False
    enforce_eager: Annotated[
        bool,
        Arg(
            "Run every step by Python. By default small steps are recorded and repeated: kernel calls, or CUDA graphs."
        ),
    ] = False
    op_overrides: Annotated[
        dict[str, str], Arg("Implementation of single operators, such as rms_norm=reference, instead of the best one.")
    ] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ParallelArgs:
    """How a model is divided among ranks, and how they are started."""

    heading: ClassVar = "Ranks"

    tensor_parallel_size: Annotated[
        int, Arg("Ranks that share each layer. The results are those of one.", ge=1, le=1024)
    ] = 1
    tensor_parallel_reduce: Annotated[
        TensorParallelReduce,
        Arg(
            "How ranks that share a layer put it together. gather gives the bits of one rank; sum sends fewer bytes "
            "where a network lies between the ranks, and gives the same bits each time."
        ),
    ] = "gather"
    enable_expert_parallel: Annotated[
        bool,
        Arg(
            "Share the experts of a mixture among the ranks of tensor_parallel_size, instead of cutting each of them. "
            "The results are those of one rank."
        ),
    ] = False
    pipeline_parallel_size: Annotated[
        int, Arg("Stages that share the layers, each with a step in flight. The results are those of one.", ge=1, le=8)
    ] = 1
    executor: Annotated[
        str,
        Arg(
            "How several ranks are started: multiprocess, as processes of this machine and by `octavo rank` on others; "
            "ray, on the machines of a Ray cluster.",
            choices=("multiprocess", "ray"),
        ),
    ] = "multiprocess"
    nnodes: Annotated[
        int, Arg("Machines that the ranks are on, as many on each; on others than the first runs `octavo rank`.", ge=1)
    ] = 1


@dataclass(frozen=True, kw_only=True)
class ClusterArgs:
    """How the machines of an engine find and trust each other; `octavo rank` has them, too."""

    heading: ClassVar = "Ranks"

    master_addr: Annotated[str, Arg("Address of the first machine at which it waits for the ranks of the others.")] = (
        "127.0.0.1"
    )
    master_port: Annotated[int, Arg("Port at master_addr; the next one is used, too.", ge=1, le=65534)] = 29501
    cluster_secret_file: Annotated[
        str | None,
        Arg("File with the secret of at least 16 characters that all machines of an engine prove to each other."),
    ] = None
    distributed_timeout_seconds: Annotated[
        float,
        Arg(
            "Seconds that a rank waits for another one, in a step and when they meet at the start; then the engine "
            "ends.",
            gt=0,
            le=86400,
        ),
    ] = 120.0


@dataclass(frozen=True, kw_only=True)
class DeviceArgs(ClusterArgs, ParallelArgs, ComputeArgs):
    """Where and how the model runs."""


@names_its_arguments
@dataclass(frozen=True, kw_only=True)
class RankArgs(ClusterArgs):
    """What a person wrote about the ranks of a machine that serves nothing itself."""

    node_rank: Annotated[
        int, Arg("Number of this machine among the --nnodes of the engine, whose first one is 0.", ge=1)
    ] = 1
    rank_model: Annotated[
        str | None,
        Arg("Hub name or directory of the model on this machine; by default it is where the first machine has it."),
    ] = None

    def __post_init__(self) -> None:
        check_values(self)
