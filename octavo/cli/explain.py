"""`octavo explain [MODEL]`: what octavo would do with a model on this machine, and why. Needs no weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from octavo.cli.options import Given, with_options
from octavo.cli.start import mention_demonstration_model
from octavo.cli.terminal import say
from octavo.config.args import BUILTIN_MODEL, EngineArgs
from octavo.config.explain import model_facts, platform_facts, render_facts, render_operators
from octavo.platform import Platform

_WEIGHTS = ("*.safetensors*", "*.bin*")


@with_options(EngineArgs, model="positional", without=("served_model_name", "disable_log_stats"))
def explain(*, given: Given) -> int:
    """Show what octavo would do with a model on this machine, and why: facts, memory, operators. Needs no weights."""
    args = given.arguments(EngineArgs)
    mention_demonstration_model(args)

    from octavo.config.checkpoint import Checkpoint
    from octavo.config.resolve import configure
    from octavo.ops.registry import bind, open_runtime
    from octavo.worker.attention_backend import attention_backend
    from octavo.worker.memory import plan_memory

    platform = Platform.detect()
    config = configure(_without_weights(args))
    checkpoint = Checkpoint.open(Path(config.model.path))
    runtime = open_runtime(platform, instruction_set=config.device.instruction_set)
    ops = bind(platform, config.device.op_overrides, runtime=runtime)
    attention = attention_backend(checkpoint, runtime, model=config.model, cache=config.cache)
    plan = plan_memory(
        checkpoint,
        platform,
        ops,
        attention.backend,
        model=config.model,
        cache=config.cache,
        scheduler=config.scheduler,
    )
    choices = [(choice.operator, choice.implementation, choice.because) for choice in ops.choices]
    choices.append(("attention", attention.backend.name, attention.because))
    say(render_facts("model", model_facts(config, checkpoint)), end="\n\n")
    say(render_facts("machine", platform_facts(platform)), end="\n\n")
    say(plan.render(), end="\n\n")
    say(render_operators(choices))
    return 0


def _without_weights(args: EngineArgs) -> EngineArgs:
    """Arguments that ask for no weights where none are here: a plan needs config and tokenizer alone.

    Those of a name on a hub stay there.
    """
    path = Path(args.model).expanduser()
    are_here = args.model == BUILTIN_MODEL or path.is_file() or any(any(path.glob(files)) for files in _WEIGHTS)
    return args if are_here else dataclasses.replace(args, load_format="dummy")
