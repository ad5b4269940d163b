"""Fields that other servers have and this one does not: each is refused by name, with what to send instead.

A field that is accepted stands in its request. A value that means the same as leaving the field out is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from msgspec import defstruct

from octavo.server.decode import Refused
from octavo.server.forms import FormFields

_UNKNOWN: Final = "it has no counterpart here; leave it out"
_ROUTED: Final = "the server itself chooses where a request runs; leave it out"

_FIELDS: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {
    # vLLM
    "code from requests is never run": {"logits_processors": (), "custom_logit_processor": (), "custom_params": ()},
    "ask for return_token_ids": {"return_tokens_as_token_ids": (False,), "return_tokens": (False,)},
    "the server reads and writes text only": {"mm_processor_kwargs": (), "media_io_kwargs": (), "image_data": ([],)},
    "the server chooses where KV goes; leave it out": {"kv_transfer_params": (), "ec_transfer_params": ()},
    "octavo has no such extensions": {"vllm_xargs": ({},)},
    "it is not there yet": {
        "repetition_detection": (),
        "logprob_token_ids": (),
        "lora_path": (),
        "lora": ([],),
        "typical_p": (1, 1.0),
        "top_n_sigma": (-1, -1.0),
        "dynatemp_range": (0, 0.0),
        "dynatemp_exponent": (1, 1.0),
        "xtc_probability": (0, 0.0),
        "xtc_threshold": (0.1,),
        "mirostat": (0,),
        "mirostat_tau": (5, 5.0),
        "mirostat_eta": (0.1,),
        "dry_multiplier": (0, 0.0),
        "dry_base": (1.75,),
        "dry_allowed_length": (2,),
        "dry_penalty_last_n": (-1,),
        "dry_sequence_breakers": (),
        "samplers": ([],),
        "min_keep": (0,),
    },
    # SGLang, whose router and vLLM's write the first two into every request
    "ask for include_stop_str_in_output": {"no_stop_trim": (False,)},
    "no endpoint returns hidden states": {"return_hidden_states": (False,), "return_routed_experts": (False,)},
    "give structured_outputs": {"regex": (), "ebnf": (), "grammar": ("",), "json_schema": (), "grammar_lazy": (False,)},
    "give stop": {"stop_regex": ([],)},
    "give request_id": {"rid": ()},
    "give cache_salt": {"extra_key": ()},
    "give min_tokens": {"min_new_tokens": (0,)},
    "give max_tokens": {"max_new_tokens": (), "n_predict": (-1,)},
    "the requests of a conversation share cached prefixes by themselves; leave it out": {
        "session_params": (),
        "id_slot": (-1,),
        "n_cache_reuse": (0,),
    },
    _ROUTED: {
        "bootstrap_host": (),
        "bootstrap_port": (),
        "bootstrap_room": (),
        "data_parallel_rank": (),
        "routed_dp_rank": (),
        "disagg_prefill_dp_rank": (),
    },
    _UNKNOWN: {
        "custom_labels": (),
        "n_indent": (0,),
        "response_fields": ([],),
        "tool_prompt": (),
        "guideline": (),
        "parse_tool_calls": (True,),
        "preserved_tokens": ([],),
        "grammar_triggers": ([],),
        "thinking_forced_open": (False,),
    },
    # llama.cpp
    "nothing is dropped from a context; leave it out": {"n_keep": (0,), "n_discard": (0,)},
    "give repetition_penalty": {"repeat_penalty": (1, 1.0)},
    "penalties hold over prompt and output as a whole": {"repeat_last_n": (-1,)},
    "give logprobs": {"n_probs": (0,)},
    "give n": {"n_cmpl": (1,)},
    "log-probabilities are of the model's own distribution": {"post_sampling_probs": (False,)},
    "prompts are always cached; give cache_salt to keep one apart": {"cache_prompt": (True,)},
    "GET /scheduler/timelines has the times": {"timings_per_token": (False,), "return_progress": (False,)},
    "close the connection, and the request ends": {"t_max_predict_ms": (-1, 0)},
    "give include_reasoning": {"reasoning_format": ("auto",)},
}
"""By the reason: the fields, and the values of each that mean the same as none."""

OfOthers: Final = defstruct(
    "OfOthers",
    [
        (name, Annotated[Any, Refused(because, harmless)], None)
        for because, names in _FIELDS.items()
        for name, harmless in names.items()
    ],
    bases=(FormFields,),
    kw_only=True,
)
"""The base of requests for generated text."""
