"""Flags of llama-server: octavo's flag for each, or the reason why there is none."""

from __future__ import annotations

from functools import cache
from typing import Final

_TABLE: Final = """
-m, --model | --model | a directory in Hugging Face layout or a name on the hub; GGUF files are not there yet
-hf, --hf-repo | --model | the name alone, of a repository with safetensors; `--revision` for a commit
-a, --alias | --served-model-name
-c, --ctx-size | --max-model-len | of one request; requests share one pool of blocks and are not cut into slots
-np, --parallel | --max-num-seqs | 256 by default: memory is taken by the tokens that are there, not by slot
-cb, --cont-batching | - | always
-b, --batch-size | --max-num-batched-tokens
-ub, --ubatch-size | --target-step-ms | how long a step may take that computes prompts beside other requests
-t, --threads | --threads
-tb, --threads-batch | - | one pool of threads for both
-ctk, -ctv, --cache-type-k, --cache-type-v | --kv-cache-dtype | float32, bfloat16, int8 or fp8, for both
-fa, --flash-attn | - | always: attention is computed block by block
--cache-prompt, --cache-reuse | --enable-prefix-caching | on by default, between all requests of a key
--slot-save-path | --kv-disk | a directory of KV blocks, found by the tokens of any prompt; it survives restarts
--cache-ram | --kv-cache-memory | memory of the whole KV cache
--no-mmap, --mlock, --load-mode | --packed-cache | where packed weights are kept, so that later starts map them
-ngl, --n-gpu-layers | - | not there yet: octavo runs on the CPU
-ts, --tensor-split; -sm, --split-mode | --tensor-parallel-size | ranks that share each layer, a process each
--numa, --cpu-mask, --prio | - | not there; `numactl` and `taskset` work
--lora | - | not there yet
-md, --model-draft; --draft-max | - | not there yet
--mmproj | - | not there yet: text only
--grammar, --json-schema | - | fields of the request: `structured_outputs`, `response_format`
--jinja | - | always: a chat template is rendered as transformers does it
--chat-template, --chat-template-file | --chat-template | a file, or the template itself
--chat-template-kwargs | - | a field of the request: `chat_template_kwargs`
--reasoning-format | --reasoning-parser | found in the checkpoint by default; `none` leaves reasoning in the text
--rope-scaling, --rope-freq-base, --yarn-* | - | from the checkpoint's `config.json`
--context-shift | - | not there: a request that does not fit its context is refused, or ends with `length`
--host | --host
--port | --port | 8000 by default, not 8080
--api-key | --api-key | may be given several times
--api-key-file | --api-key-file | YAML, with a name and rights for each key
--ssl-key-file | --ssl-keyfile
--ssl-cert-file | --ssl-certfile
--api-prefix | --root-path
--metrics | - | always: `GET /metrics`
--slots | - | always: `GET /scheduler/decisions` and `/scheduler/timelines`
--embedding, --reranking | - | not there yet
--webui | - | always: a page for browsers at `/`; `octavo chat` is a conversation in the terminal
--warmup | - | always, as part of measuring memory at the start
-v, --log-verbosity | --log-level
--offline | - | the variable `HF_HUB_OFFLINE=1`
-s, --seed | --seed | by default each start draws one, as llama-server does, and each request gets its own from it
--temp, --top-k, --top-p, --min-p, … | - | fields of the request; their defaults come from `generation_config.json`
"""
"""One line for each: its spellings, the flag of octavo or `-`, and a note."""


@cache
def llama_cpp_flags() -> tuple[tuple[str, str, str], ...]:
    """Return spellings, the flag of octavo (empty where there is none) and a note, for each flag."""
    rows = [[*map(str.strip, line.split(" | ", 2)), ""] for line in _TABLE.strip().splitlines()]
    return tuple((spellings, "" if ours == "-" else ours, note) for spellings, ours, note, *_ in rows)
