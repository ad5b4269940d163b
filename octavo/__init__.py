"""octavo, a serving engine for large language models.

    from octavo import LLM, SamplingParams

    for output in LLM().generate(["Once upon a time"], SamplingParams(max_tokens=64)):
        print(output.outputs[0].text)

Names are looked up when they are first used, so that `import octavo` itself costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # type checkers know the name; typing is imported where Ctrl-C is caught, in __main__

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM as AsyncLLM
    from octavo.async_llm_engine import AsyncLLMEngine as AsyncLLMEngine
    from octavo.config.args import AsyncEngineArgs as AsyncEngineArgs
    from octavo.config.args import EngineArgs as EngineArgs
    from octavo.config.argument_parser import FlexibleArgumentParser as FlexibleArgumentParser
    from octavo.config.pooling.pooler_config import PoolerConfig as PoolerConfig
    from octavo.config.server_args import ServerArgs as ServerArgs
    from octavo.core.adapter import LoRARequest as LoRARequest
    from octavo.core.outputs import CompletionOutput as CompletionOutput
    from octavo.core.outputs import PinnedPrefix as PinnedPrefix
    from octavo.core.outputs import RequestOutput as RequestOutput
    from octavo.core.pooling import ClassificationOutput as ClassificationOutput
    from octavo.core.pooling import ClassificationRequestOutput as ClassificationRequestOutput
    from octavo.core.pooling import EmbeddingOutput as EmbeddingOutput
    from octavo.core.pooling import EmbeddingRequestOutput as EmbeddingRequestOutput
    from octavo.core.pooling import PoolingOutput as PoolingOutput
    from octavo.core.pooling import PoolingParams as PoolingParams
    from octavo.core.pooling import PoolingRequestOutput as PoolingRequestOutput
    from octavo.core.pooling import ScoringOutput as ScoringOutput
    from octavo.core.pooling import ScoringRequestOutput as ScoringRequestOutput
    from octavo.core.prompt import EmbedsPrompt as EmbedsPrompt
    from octavo.core.prompt import Prompt as Prompt
    from octavo.core.prompt import PromptType as PromptType
    from octavo.core.prompt import TextPrompt as TextPrompt
    from octavo.core.prompt import TokensPrompt as TokensPrompt
    from octavo.core.sampling_params import OutputKind as OutputKind
    from octavo.core.sampling_params import RequestOutputKind as RequestOutputKind
    from octavo.core.sampling_params import SamplingParams as SamplingParams
    from octavo.core.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from octavo.engine.llm_engine import LLMEngine as LLMEngine
    from octavo.engine.output.metric_reader import Counter as Counter
    from octavo.engine.output.metric_reader import Gauge as Gauge
    from octavo.engine.output.metric_reader import Histogram as Histogram
    from octavo.engine.output.metric_reader import Vector as Vector
    from octavo.errors import OctavoError as OctavoError
    from octavo.llm import LLM as LLM

__version__ = "0.1.0"

_NAMES = {
    "octavo.async_llm": "AsyncLLM",
    "octavo.async_llm_engine": "AsyncLLMEngine",
    "octavo.config.args": "AsyncEngineArgs EngineArgs",
    "octavo.config.argument_parser": "FlexibleArgumentParser",
    "octavo.config.pooling.pooler_config": "PoolerConfig",
    "octavo.config.server_args": "ServerArgs",
    "octavo.core.adapter": "LoRARequest",
    "octavo.core.outputs": "CompletionOutput PinnedPrefix RequestOutput",
    "octavo.core.pooling": "ClassificationOutput ClassificationRequestOutput EmbeddingOutput EmbeddingRequestOutput "
    "PoolingOutput PoolingParams PoolingRequestOutput ScoringOutput ScoringRequestOutput",
    "octavo.core.prompt": "EmbedsPrompt Prompt PromptType TextPrompt TokensPrompt",
    "octavo.core.sampling_params": "OutputKind RequestOutputKind SamplingParams",
    "octavo.core.structured_outputs": "StructuredOutputsParams",
    "octavo.engine.llm_engine": "LLMEngine",
    "octavo.engine.output.metric_reader": "Counter Gauge Histogram Vector",
    "octavo.errors": "OctavoError",
    "octavo.llm": "LLM",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        if not name.startswith("_"):
            said = import_module("octavo.core.absent").absent_names().get(name)
            if said is not None:  # the statement `from octavo import NAME` would hide the message of another error
                raise ImportError(f"octavo has no {name}: {said}", name=name)
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
