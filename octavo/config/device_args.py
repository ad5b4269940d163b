"""What a person may set about the device, the ranks and the machines that a model runs on; a part of `args`."""

from __future__ import annotations

from typing import Literal

from octavo.config.fields import ArgumentGroup, Arguments, arg
from octavo.devices import DEVICES

TensorParallelReduce = Literal["gather", "sum"]


class ComputeArgs(ArgumentGroup, heading="Device"):
    """Where and how a rank computes."""

    device: str = arg(
        "auto",
        "Where the model runs: cuda is a GPU of NVIDIA, cpu has compiled kernels, reference is plain torch, auto "
        "is the best that can run here.",
        choices=lambda: ("auto", *DEVICES),
    )
    threads: int | None = arg(
        None,
        "Threads that compute, at most one per core. By default that many, and a single one in steps that are "
        "too short for more.",
        ge=1,
        le=4096,
    )
    instruction_set: Literal["auto", "amx", "avx512_bf16", "avx512", "avx2", "reference", "amx_emulated"] = arg(
        "auto",
        "Instruction set of the compiled CPU kernels; by default the best that the processor has. reference "
        "is another name for the device reference, amx_emulated a slow software model of AMX for checking.",
    )
    batch_invariant: bool = arg(
        False,
        "On CUDA: the results of a request do not depend on others in its batch, which costs speed. The "
        "compiled kernels of the cpu always compute so.",
    )
    enforce_eager: bool = arg(
        False,
        "Run every step by Python. By default small steps are recorded and repeated: kernel calls, or CUDA graphs.",
    )
    op_overrides: dict[str, str] = arg(
        {}, "Implementation of single operators, such as rms_norm=reference, instead of the best one."
    )


class ParallelArgs(ArgumentGroup, heading="Ranks"):
    """How a model is divided among ranks, and how they are started."""

    tensor_parallel_size: int = arg(
        1, "Ranks that share each layer. The results are the same as with one rank.", ge=1, le=1024
    )
    tensor_parallel_reduce: TensorParallelReduce = arg(
        "gather",
        "How ranks that share a layer put it together. gather gives the bits of one rank; sum sends fewer bytes "
        "where a network lies between the ranks, and gives the same bits each time.",
    )
    enable_expert_parallel: bool = arg(
        False,
        "Give each rank of tensor_parallel_size some whole experts of a mixture, instead of a part of every "
        "expert. The results are the same as with one rank.",
    )
    pipeline_parallel_size: int = arg(
        1,
        "Stages that share the layers, each with a step in flight. The results are the same as with one stage.",
        ge=1,
        le=8,
    )
    executor: Literal["multiprocess", "ray"] = arg(
        "multiprocess",
        "How several ranks are started: multiprocess, as processes of this machine and by `octavo rank` on others; "
        "ray, on the machines of a Ray cluster.",
    )
    nnodes: int = arg(
        1, "Machines that the ranks are on, as many on each; on others than the first runs `octavo rank`.", ge=1
    )


class ClusterArgs(ArgumentGroup, heading="Ranks"):
    """How the machines of an engine find and trust each other; `octavo rank` has them, too."""

    master_addr: str = arg("127.0.0.1", "Address of the first machine at which it waits for the ranks of the others.")
    master_port: int = arg(29501, "Port at master_addr; the next one is used, too.", ge=1, le=65534)
    cluster_secret_file: str | None = arg(
        None, "File with the secret of at least 16 characters that all machines of an engine prove to each other."
    )
    distributed_timeout_seconds: float = arg(
        120.0,
        "Seconds that a rank waits for another rank, in a step and when they connect at the start; after them "
        "the engine ends.",
        gt=0,
        le=86400,
    )


class DeviceArgs(ComputeArgs, ParallelArgs, ClusterArgs):
    """Where and how the model runs."""


class RankArgs(Arguments, ClusterArgs):
    """What a person wrote about the ranks of a machine that serves nothing itself."""

    node_rank: int = arg(1, "Number of this machine among the --nnodes of the engine, whose first one is 0.", ge=1)
    rank_model: str | None = arg(
        None, "Hub name or directory of the model on this machine; by default it is where the first machine has it."
    )
