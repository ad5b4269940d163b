"""octavo as `benchmarks/driver.py` wants an engine. The argument: keywords of LLM as JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from octavo import LLM, SamplingParams
from octavo.core.sampling_params import OutputKind
from octavo.logging import set_up


class Engine:
    """The engine in this process, driven step by step."""

    def __init__(self) -> None:
        set_up("warning")
        self._engine = LLM(**json.loads(sys.argv[1])).engine
        self._num_requests = 0
        ready = self._engine.ready
        self.facts = {
            "vocab_size": ready.vocab_size,
            "max_model_len": ready.max_model_len,
            "kv_cache_tokens": ready.cache.num_tokens,
        }

    def run(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[Any], float]:
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, output_kind=OutputKind.DELTA
        )
        events = []
        began = time.perf_counter()
        first = self._num_requests
        self._num_requests += len(prompts)
        for i, prompt in enumerate(prompts):
            self._engine.add_request(str(first + i), prompt, params)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                if output.error is not None:
                    raise RuntimeError(output.error.message)
                num_tokens = len(output.outputs[0].token_ids)
                if num_tokens:
                    events.append((now, int(output.request_id) - first, num_tokens))
        return began, events, time.perf_counter()
