"""Ranks on the machines of a Ray cluster: Ray places and ends them, and steps go over connections of `cluster`."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.core.process.listening import cut
from octavo.errors import ConfigError, EngineDeadError
from octavo.executor.channel import SEEN_GPUS
from octavo.executor.cluster import Gathering
from octavo.executor.executor import OnNote, OpenWorker, open_rank
from octavo.executor.multiprocess import MultiprocessExecutor, Rank
from octavo.executor.ranks import RANK_MODULE, serve_node, start_ranks

if TYPE_CHECKING:
    from octavo.config.schema import EngineConfig


def start_ray_ranks(
    config: EngineConfig,
    on_death: Callable[[str], None] | None = None,
    on_note: OnNote | None = None,
    *,
    module: str = RANK_MODULE,
    open_worker: OpenWorker = open_rank,
) -> MultiprocessExecutor:
    """Return the executor of ranks that Ray places, on as few machines as have room; rank 0 is in this process.

    Connects to the cluster that RAY_ADDRESS names, or is on this machine, unless the program has done so. Raises
    ConfigError without Ray, and EngineDeadError when there is no room before the deadline.
    """
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError("executor is ray, which is not installed; pip install 'octavo[ray]'") from error
    if not ray.is_initialized():
        ray.init(logging_level="warning", log_to_driver=True, include_dashboard=False)
    device = config.device
    timeout_s = device.distributed_timeout_seconds
    resources = ExitStack()
    try:
        group, nodes, most = _place(device.num_ranks, timeout_s, resources, has_gpus=device.has_gpus)
        address, port = ray.util.get_node_ip_address(), _free_ports()

        def actor_in(bundle: int) -> Any:
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, bundle)
            kind = ray.remote(num_cpus=1, num_gpus=int(device.has_gpus), scheduling_strategy=strategy)(_Place)
            actor = kind.remote()
            resources.callback(ray.kill, actor)
            return actor

        # Ray gives a GPU to an actor alone: where there are GPUs, each rank has one, if only to hold its own
        actors = {bundle: actor_in(bundle) for node in nodes for bundle in node} if device.has_gpus else {}
        try:
            gpus: list[str] = ray.get([actor.gpu.remote() for actor in actors.values()], timeout=timeout_s)
        except ray.exceptions.RayError as error:
            raise EngineDeadError(f"Ray's actors have not said which GPUs they have: {error}") from error
        if gpus:
            _see(gpus[0], resources)

        def gather(_: EngineConfig) -> list[Rank]:
            secret = secrets.token_bytes(32)
            gathering = Gathering(address, port, secret, len(nodes[0]), range(1, len(nodes)))
            ends = []
            for node, bundles in enumerate(nodes[1:], start=1):
                actor = actors.get(bundles[0]) or actor_in(bundles[0])
                ends.append(actor.serve.remote(address, port, secret, node, timeout_s, module))
            ranks = gathering.wait(timeout_s)
            threading.Thread(target=_watch, args=[ends, ranks], name="octavo-ray", daemon=True).start()
            return ranks

        placed = replace(device, nnodes=len(nodes), most_ranks_together=most, master_addr=address, master_port=port)
        return start_ranks(
            msgspec.structs.replace(config, device=placed),
            on_death,
            on_note,
            module=module,
            open_worker=open_worker,
            gather=gather,
            resources=resources,
            gpus=gpus,
        )
    except BaseException:
        resources.close()
        raise


class _Place:
    """An actor: of a machine, whose end is that of its ranks, or of a rank, to hold a GPU for it."""

    def gpu(self) -> str:
        """Return the GPU that Ray has given to this actor, as CUDA_VISIBLE_DEVICES of its machine names it."""
        import ray

        (gpu,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return str(gpu)

    def serve(self, address: str, port: int, secret: bytes, node: int, timeout_s: float, module: str) -> None:
        """Run the ranks of this machine until they end."""
        serve_node(address, port, secret, node=node, timeout_s=timeout_s, module=module)


def _see(gpu: str, resources: ExitStack) -> None:
    """Let this process see that GPU alone until the end. Raises ConfigError where it uses CUDA already."""
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ConfigError(
            "executor is ray, and Ray chooses the GPU of rank 0, which is in this process, but CUDA is in use here "
            "already; start the engine before, or in a process of its own"
        )
    before = os.environ.get(SEEN_GPUS)
    resources.callback(lambda: os.environ.pop(SEEN_GPUS) if before is None else os.environ.update({SEEN_GPUS: before}))
    os.environ[SEEN_GPUS] = gpu


def _place(
    num_ranks: int, timeout_s: float, resources: ExitStack, *, has_gpus: bool = False
) -> tuple[Any, list[list[int]], int]:
    """Return a placement group with a CPU, and perhaps a GPU, for each rank, its bundles by machine, this machine's
    first, and how many ranks a machine has at most.

    Where machines have different numbers of ranks, each rank counts as a machine.
    """
    import ray
    import ray.util

    this_machine = {f"node:{ray.util.get_node_ip_address()}": 0.001}
    each = {"CPU": 1, "GPU": 1} if has_gpus else {"CPU": 1}
    group = ray.util.placement_group([{**each, **this_machine}, *(each for _ in range(num_ranks - 1))])
    resources.callback(ray.util.remove_placement_group, group)
    if not group.wait(timeout_s):
        alive = sum(node["Alive"] for node in ray.nodes())
        found = ray.available_resources()
        free = " and ".join(f"{found.get(kind, 0):g} {kind}s" for kind in each)
        raise EngineDeadError(
            f"Ray has had no room for {num_ranks} ranks of one {' and one '.join(each)} each, the first of them on "
            f"this machine, for {timeout_s:g} s: {free} are free on {alive} machines; add machines or use fewer ranks"
        )
    node_of = ray.util.placement_group_table(group)["bundles_to_node_id"]
    nodes: dict[str, list[int]] = {}
    for bundle in range(num_ranks):
        nodes.setdefault(node_of[bundle], []).append(bundle)
    counts = {len(bundles) for bundles in nodes.values()}
    by_machine = [[bundle] for bundle in range(num_ranks)] if len(counts) > 1 else list(nodes.values())
    return group, by_machine, max(counts)


def _watch(ends: Sequence[Any], ranks: Sequence[Rank]) -> None:
    """Close the connections to a machine when Ray reports the end of its actor, in the order of machines."""
    import ray

    per_node = len(ranks) // len(ends)
    waiting = list(ends)
    while waiting:
        try:
            done, waiting = ray.wait(waiting)
        except ray.exceptions.RayError:
            return  # the program has left the cluster, and the connections end with its ranks
        for end in done:
            first = ends.index(end) * per_node
            for rank in ranks[first : first + per_node]:
                cut(rank.connection)


def _free_ports() -> int:
    """Return a port that is free, as is the next one."""
    while True:
        with socket.create_server(("", 0)) as server, suppress(OSError):
            port: int = server.getsockname()[1]
            with socket.create_server(("", port + 1)):
                return port
