"""`octavo quantize MODEL OUT`: writes a checkpoint with quantised weights, and says what that costs in quality."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from octavo.cli.options import Given, with_options
from octavo.cli.start import log_quietly
from octavo.cli.terminal import say
from octavo.config.args import EngineArgs
from octavo.config.explain import render_bytes
from octavo.errors import ConfigError

_FORMATS = ("int4", "int8")
_GROUPS = (32, 64, 128)
_FOREIGN = 1000.0
"""Above this perplexity a text counts as unlike anything that the model was trained on."""


@with_options(EngineArgs, without={"quantization", "model"})
def quantize(
    source: Annotated[str, Parameter(name="MODEL", help="Hub name, short name (qwen3:0.6b) or directory.")],
    output: Annotated[Path, Parameter(help="A directory that is empty or does not exist.")],
    /,
    *,
    kind: Annotated[
        str,
        Parameter(
            name="--format",
            help="int4 has 4-bit weights with a scale for each group of inputs (W4A16), int8 8-bit weights with a "
            "scale for each output channel (W8A8).",
        ),
    ] = "int4",
    group_size: Annotated[int, Parameter(help="Inputs that share a scale of int4: 32, 64 or 128.")] = 128,
    text: Annotated[Path | None, Parameter(help="Text whose perplexity is printed; by default a short one.")] = None,
    given: Given,
) -> None:
    """Write a quantised checkpoint that octavo, vLLM and transformers read, and print the perplexity of a text before
    and after. Weights are rounded to the nearest code, without a calibration."""
    if kind not in _FORMATS:
        raise ConfigError(f"format is {kind!r}, expected one of {', '.join(_FORMATS)}")
    if group_size not in _GROUPS:
        raise ConfigError(f"group_size is {group_size}, expected one of {', '.join(map(str, _GROUPS))}")
    args = dataclasses.replace(given.arguments(EngineArgs), model=source)
    log_quietly(args)
    from octavo.config.checkpoint import Checkpoint
    from octavo.config.hub import locate_model
    from octavo.models.save import save_quantized

    folder = locate_model(args)
    sample = _text(text)
    saved = save_quantized(Checkpoint.open(folder), output, kind, group_size)
    say(
        f"{output}: {saved.quantized} weights in {kind}, {len(saved.kept)} matrices as they were; "
        f"{render_bytes(saved.bytes_before)} became {render_bytes(saved.bytes_after)}"
    )
    before, after = (perplexity(dataclasses.replace(args, model=str(path)), sample) for path in (folder, output))
    say(f"perplexity per token: {before:.4f} before, {after:.4f} after ({after / before - 1:+.2%})")
    if before > _FOREIGN:
        say("the model does not know this text, so the change says little; --text takes one that it knows")


def perplexity(args: EngineArgs, documents: Sequence[str]) -> float:
    """Return the perplexity per token of texts, each read alone; the first token of each is not predicted."""
    from octavo.core.sampling_params import SamplingParams
    from octavo.llm import LLM

    total, count = 0.0, 0
    with LLM(**vars(args)) as llm:
        for output in llm.generate(list(documents), SamplingParams(max_tokens=1, prompt_logprobs=0)):
            if output.prompt_logprobs is None:
                raise ConfigError(f"text cannot be measured: {output.error}")
            for token_id, choices in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
                if choices is not None:
                    total -= choices[token_id].logprob
                    count += 1
    return math.exp(total / max(1, count))


def _text(path: Path | None) -> list[str]:
    """Return the paragraphs of a file, or of a text that ships with octavo. Raises ConfigError."""
    try:
        found = (files("octavo") / "builtin" / "sample.txt" if path is None else path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"text {path} cannot be read: {error}") from error
    paragraphs = [each.strip() for each in found.split("\n\n") if len(each.split()) > 1]
    if not paragraphs:
        raise ConfigError(f"text {path} has no paragraph of two words")
    return paragraphs
