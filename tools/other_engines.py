"""The pages for users of other engines: octavo's name for each name that they know, or the reason why there is none.

python -m tools.other_engines docs/recipes
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from octavo.cli.main import llama_cpp_flags
from octavo.config.fields import Arg
from octavo.config.sources import known_arguments
from octavo.core.absent import absent_names, absent_options, absent_paths, renamed_options
from octavo.core.sampling_params import documented_fields
from octavo.server.decode import refused_fields
from octavo.server.endpoints import ENDPOINTS
from octavo.server.schema.chat import ChatCompletionRequest
from octavo.server.schema.completions import CompletionRequest
from tools.other_names import (
    LLAMA_CPP_ENDPOINTS,
    LLAMA_CPP_FIELDS,
    VLLM_ENGINE,
    VLLM_INTERFACES,
    VLLM_NOTES,
    VLLM_PATH_NOTES,
    VLLM_PATHS,
    VLLM_REQUEST,
    VLLM_REQUEST_NOTES,
    VLLM_SAMPLING,
    VLLM_SERVER,
    Row,
)
from tools.reference import name_table

_MADE = "<!-- Made by `python -m tools.other_engines docs/recipes`; edit tools/other_names.py instead. -->\n"

_VLLM = """\
# Coming from vLLM

octavo has most of vLLM's names. It never ignores a name that it does not have: the error gives the reason or the
nearest name. In the tables below, *same* is a name with the same meaning in octavo, *refused* a name that octavo does
not need or want, and *not there yet* a feature that octavo lacks.

Every Python name is imported from `octavo` itself: `from vllm.lora.request import LoRARequest` becomes
`from octavo import LoRARequest`. This command changes the imports of a program, and is often all that it needs beside
another model's name:

```bash
sed -i -E 's/^( *)from vllm[a-zA-Z0-9_.]* import/\\1from octavo import/; s/^import vllm$/import octavo/' program.py
```
"""

_VLLM_TRIED = """\
## What vLLM's examples need

The examples of vLLM 0.33 were run after that sed command, with other models and smaller sizes. These need no further
change: generate, chat, classify, embed, score, `LLMEngine`, several adapters, streams of `AsyncLLM`, prompt embeddings,
structured outputs, reproducibility, context extension; and the clients of chats, completions, reasoning, responses,
tools, structured outputs, embeddings, rerank, score, classify, pooling and transcription. Prompts with images, videos
and sounds work as the examples write them.

| in an example | octavo | note |
|---|---|---|
| `tokenizer_mode`, `config_format` | – | leave it out |
| `outputs.data.argmax(dim=-1)` | `argmax(axis=-1)` | vectors are numpy arrays |
| `llm.collective_rpc("reload_weights")` | `LLM.update_weights_from_disk` | or `LLM.update_weights_from_tensor` |
| `llm.start_profile()`, `POST /start_profile` | the same | with `profiler_config` ([recipe](operations.md#profiles)) |
| `llm.pause_generation`, `POST /pause` | the same | new requests wait in every mode ([recipe](weights.md#pauses)) |
| `reset_prefix_cache(reset_running_requests=True)` | the same | also as a query of `POST /reset_prefix_cache` |
| `llm.sleep(level=1, mode="abort")` | the same | `mode` is `keep` by default: open requests continue after `wake_up` |
| `KVTransferConfig` | `--prefill`, `--decode`, `--role` | on one machine or on several ([recipe](split.md)) |
| `KVEventsConfig` | `kv_events_config` | the same messages over ZeroMQ; or `GET /kv/events` |

Not there: transfer of weights over NCCL, late chunking, sharded checkpoints, replay of traces, and custom logits
processors.
"""

_LLAMA_CPP = """\
# Coming from llama.cpp

octavo reads [GGUF files](gguf.md), and checkpoints in Hugging Face layout (safetensors), which `--quantization int8` or
`int4` quantises while loading. `llama-server` becomes `octavo serve`, `llama-cli` becomes `octavo run` or
`octavo chat`, `llama-bench` becomes `octavo bench`.
"""

_COMMA = re.compile(r"[,;] (?![^(]*\))")


def pages() -> dict[str, str]:
    """Return file name → Markdown of both pages. Raises KeyError for a name without an entry."""
    return {"from-vllm.md": _vllm_page(), "from-llama-cpp.md": _llama_cpp_page()}


def _vllm_page() -> str:
    arguments = {name: argument.arg for name, argument in known_arguments().items()}
    requests = (ChatCompletionRequest, CompletionRequest)
    fields = {name: Arg("") for kind in requests for name in kind.__struct_fields__}
    reasons = {kind: {name: mark.because for name, mark in refused_fields(kind).items()} for kind in requests}
    accepted = {name for kind in requests for name in kind.__struct_fields__ if name not in reasons[kind]}
    refused = {name: why for kind in requests for name, why in reasons[kind].items() if name not in accepted}
    sampling = dict.fromkeys(documented_fields(), Arg(""))
    paths = {path: Arg("") for endpoint in ENDPOINTS for path in endpoint.paths}
    sections = (
        ("Commands and classes", _as_code(VLLM_INTERFACES)),
        ("Engine arguments", _fates(VLLM_ENGINE, arguments, absent_options(), VLLM_NOTES)),
        ("Arguments of the server", _fates(VLLM_SERVER, arguments, absent_options(), VLLM_NOTES)),
        ("Fields of SamplingParams", _fates(VLLM_SAMPLING, sampling, absent_options(), VLLM_NOTES)),
        ("Extra fields of requests", _fates(VLLM_REQUEST, fields, refused, VLLM_REQUEST_NOTES)),
        ("Endpoints", _fates(VLLM_PATHS, paths, absent_paths(), VLLM_PATH_NOTES)),
        ("Names in programs that are refused", _fates(" ".join(absent_names()), {}, absent_names(), {})),
    )
    tables = [f"## {title}\n\n{_table(('vLLM', 'octavo', 'note'), rows)}" for title, rows in sections]
    return "\n".join([_MADE + _VLLM, *tables, _VLLM_TRIED])


def _fates(names: str, known: Mapping[str, Arg], absent: Mapping[str, str], notes: Mapping[str, str]) -> list[Row]:
    """Return rows of names with the same fate. absent: the reason why octavo does not have a name, or that it is not
    there yet."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name in names.split():
        note = notes.get(name, "")
        if name in renamed_options():
            fate = f"`{renamed_options()[name]}`"
        elif name in absent:
            feature, _, yet = absent[name].partition(" not there yet")
            is_missing = feature != absent[name]
            fate = "not there yet" if is_missing else "refused"
            note = (
                feature.removesuffix(" is").removesuffix(" are").removesuffix(",") + yet if is_missing else absent[name]
            )
        else:
            assert name in known, name
            fate = "same"
        rows.setdefault((fate, note), []).append(f"`{name}`")
    return [Row(", ".join(listed), fate, note) for (fate, note), listed in rows.items()]


def _llama_cpp_page() -> str:
    sections = (
        ("Flags of llama-server", "octavo serve", [Row(*each) for each in llama_cpp_flags()]),
        ("Endpoints", "octavo", LLAMA_CPP_ENDPOINTS),
        ("Fields of a completion", "/v1/completions", LLAMA_CPP_FIELDS),
    )
    tables = [f"## {title}\n\n{_table(('llama.cpp', ours, 'note'), _as_code(rows))}" for title, ours, rows in sections]
    return "\n".join([_MADE + _LLAMA_CPP, *tables])


def _as_code(rows: Iterable[Row]) -> list[Row]:
    return [Row(_code(row.theirs), _code(row.ours) if row.ours else "–", row.note) for row in rows]


def _code(names: str) -> str:
    """Return names between commas, each as code unless it is already, or "same"; commas in brackets belong to it."""
    return ", ".join(name if "`" in name or name == "same" else f"`{name}`" for name in _COMMA.split(names))


def _table(header: Sequence[str], rows: Iterable[Row]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---|---|---|"]
    return name_table(lines + [f"| {row.theirs} | {row.ours} | {row.note} |" for row in rows])


def main(directory: str) -> None:
    """Write the pages into `directory`."""
    for name, text in pages().items():
        (Path(directory) / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "docs/recipes")
