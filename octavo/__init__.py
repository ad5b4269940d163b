"""octavo, a serving engine for large language models.

    from octavo import LLM, SamplingParams

    for output in LLM().generate(["Once upon a time"], SamplingParams(max_tokens=64)):
        print(output.outputs[0].text)

Names are looked up when they are first used, so that `import octavo` itself costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.async_llm_engine import AsyncLLMEngine
    from octavo.config.args import AsyncEngineArgs, EngineArgs
    from octavo.config.server_args import ServerArgs
    from octavo.core.outputs import CompletionOutput, PinnedPrefix, RequestOutput
    from octavo.core.prompt import Prompt
    from octavo.core.sampling_params import OutputKind, SamplingParams
    from octavo.engine.llm_engine import LLMEngine
    from octavo.errors import OctavoError
    from octavo.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "OctavoError",
    "OutputKind",
    "PinnedPrefix",
    "Prompt",
    "RequestOutput",
    "SamplingParams",
    "ServerArgs",
    "__version__",
]

_HOME = {
    "LLM": "octavo.llm",
    "AsyncEngineArgs": "octavo.config.args",
    "AsyncLLM": "octavo.async_llm",
    "AsyncLLMEngine": "octavo.async_llm_engine",
    "CompletionOutput": "octavo.core.outputs",
    "EngineArgs": "octavo.config.args",
    "LLMEngine": "octavo.engine.llm_engine",
    "OctavoError": "octavo.errors",
    "PinnedPrefix": "octavo.core.outputs",
    "Prompt": "octavo.core.prompt",
    "RequestOutput": "octavo.core.outputs",
    "OutputKind": "octavo.core.sampling_params",
    "SamplingParams": "octavo.core.sampling_params",
    "ServerArgs": "octavo.config.server_args",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
