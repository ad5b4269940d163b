"""`octavo explain [MODEL]`: what octavo would do with a model on this machine, and why. Needs no weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from os.path import expanduser, isdir, isfile
from pathlib import Path
from textwrap import fill

from octavo.cli.options import Given, with_options
from octavo.cli.start import mention_demonstration_model
from octavo.cli.terminal import say
from octavo.config.args import BUILTIN_MODEL, EngineArgs
from octavo.config.explain import MemoryPlan, model_facts, platform_facts, render_facts, render_table
from octavo.config.replicas import replica_config
from octavo.config.schema import EngineConfig, ModelConfig
from octavo.core.cache_limits import CacheLimits
from octavo.core.messages import CoreReady
from octavo.platform import Platform

_MANY, _INDENT = 4, "    "
_WEIGHTS = ("*.safetensors*", "*.bin*")


@with_options(EngineArgs, also=["data_parallel_size"], model="positional")
def explain(*, given: Given) -> None:
    """Show what octavo would do with a model on this machine, and why: facts, memory, operators. Needs no weights."""
    args = given.arguments(EngineArgs)
    mention_demonstration_model(args)

    from octavo.config.checkpoint import Checkpoint
    from octavo.config.resolve import configure

    config = configure(_without_weights(args))
    num_replicas = config.replicas.data_parallel_size
    plans, operators, disk = prepared(replica_config(config, 0))
    checkpoint = Checkpoint.of(config.model)
    say(render_facts("model", model_facts(config, checkpoint)), end="\n\n")
    say(render_facts("machine", platform_facts(Platform.detect())), end="\n\n")
    if num_replicas > 1:
        say(f"each of {num_replicas} replicas has the following", end="\n\n")
    for plan in plans:
        say(plan.render(), end="\n\n")
    if disk is not None:
        say(render_facts("kept KV", [("kv_disk", disk)]), end="\n\n")
    if config.speculative is not None:
        from octavo.speculation.explained import speculation_facts

        say(render_facts("speculation", speculation_facts(config.speculative)), end="\n\n")
    say(render_operators(operators))
    check_files(config.model, plans, config.scheduler.max_num_batched_tokens)


def render_operators(choices: Sequence[tuple[str, str, str]]) -> str:
    """Return a table of rows (name, choice, reason); where many share choice and reason, their names are listed below
    it."""
    shared: dict[tuple[str, str], list[str]] = {}
    for name, choice, because in choices:
        shared.setdefault((choice, because), []).append(name)
    rows = [(name, choice, because) for name, choice, because in choices if len(shared[choice, because]) < _MANY]
    lines = ["operators", *([render_table(rows)] if rows else [])]
    for (choice, because), names in shared.items():
        if len(names) >= _MANY:
            lines.append(f"  {choice} for {len(names)}{f': {because}' if because else ''}")
            lines.append(fill(", ".join(names), 78, initial_indent=_INDENT, subsequent_indent=_INDENT))
    return "\n".join(lines)


def check_files(model: ModelConfig, plans: list[MemoryPlan], max_num_batched_tokens: int) -> None:
    """Check the tokenizer, the chat template, the context length and the inputs of encoders as a start would. Raises
    CheckpointError or ConfigError."""
    from octavo.engine.core_start import encoder_examples, fitting_max_model_len
    from octavo.engine.input.input_turns import open_compiled

    open_compiled(model)
    limits = CacheLimits.of_ranks([plan.cache for plan in plans])
    max_model_len = fitting_max_model_len(model, limits)
    ready = CoreReady(cache=limits, max_model_len=max_model_len, vocab_size=model.vocab_size, plan="")
    encoder_examples(model, ready, max_num_batched_tokens)


def prepared(config: EngineConfig) -> tuple[list[MemoryPlan], list[tuple[str, str, str]], str | None]:
    """Return the memory plan of each rank, the choices of operators, and what is fetched from kv_disk.

    Ranks are asked one after the other, in this process and without the others. Raises ConfigError, and CheckpointError
    for weight files, where there are some, that do not belong to the config.
    """
    from octavo.engine.core_start import agreed
    from octavo.worker.worker import Worker

    num_ranks = config.device.num_ranks
    workers = [Worker(config, rank=rank) for rank in range(num_ranks)]
    plans = agreed([worker.prepare(is_dry=True) for worker in workers])
    return plans, workers[0].op_choices(), workers[0].explain_disk()


def _without_weights(args: EngineArgs) -> EngineArgs:
    """Return arguments without weights where there are none on this machine: a plan needs config and tokenizer alone.

    The weights of a model on a hub are not fetched.
    """
    place = expanduser(args.model)
    has_weights = isdir(place) and any(any(Path(place).glob(files)) for files in _WEIGHTS)
    are_here = args.model == BUILTIN_MODEL or isfile(place) or has_weights
    return args if are_here else dataclasses.replace(args, load_format="dummy")
