"""Limits of a request besides its sampling parameters: what can never run, even alone, and what policies are told.

The front refuses at the door; the core, which trusts nobody, asks again what can never run.
"""

from __future__ import annotations

import math
from typing import Any, Final

from octavo.core.arithmetic import max_blocks_of_group
from octavo.core.prompt import checked_text
from octavo.core.request_limits import check_field
from octavo.errors import InvalidRequest, RequestTooLarge

MAX_PRIORITY: Final = 2**63 - 1
"""Priorities go from minus this minus 1 to this."""


def check_standing(priority: Any, first_token_deadline_s: Any, tenant: Any) -> None:
    """Raise InvalidRequest when one of what a request says to scheduling policies is no such thing."""
    if not isinstance(priority, int) or isinstance(priority, bool) or not -MAX_PRIORITY - 1 <= priority <= MAX_PRIORITY:
        raise InvalidRequest(
            f"priority is {priority!r}, must be a whole number of 64 bits; smaller ones go first", field="priority"
        )
    is_number = isinstance(first_token_deadline_s, int | float) and not isinstance(first_token_deadline_s, bool)
    if first_token_deadline_s is not None and not (is_number and 0 < first_token_deadline_s < math.inf):
        raise InvalidRequest(
            f"first_token_deadline_s is {first_token_deadline_s!r}, must be a number of seconds above 0",
            field="first_token_deadline_s",
        )
    if tenant is not None and not isinstance(tenant, str):
        raise InvalidRequest(f"tenant is {tenant!r}, must be text", field="tenant")
    check_field("tenant", tenant)
    if tenant is not None:
        checked_text(tenant, "tenant")


def check_runs_alone(
    num_prompt_tokens: int,
    max_tokens: int,
    n: int,
    *,
    max_num_seqs: int,
    num_blocks: int,
    block_size: int,
    max_live_tokens: int | None = None,
    width_field: str = "n",
) -> None:
    """Raise RequestTooLarge when a group (a shared prompt and n tails) exceeds the engine by itself.

    `max_live_tokens`: most tokens of one sequence that are in blocks at once, where a sliding window lets go of others.
    `width_field` is the parameter that asked for n sequences: "n" or "best_of".
    """
    if n > max_num_seqs:
        raise RequestTooLarge(
            f"{width_field} is {n}, but the engine runs at most {max_num_seqs} sequences at once; ask for fewer, "
            "or raise max_num_seqs",
            field=width_field,
        )
    needed = max_blocks_of_group(num_prompt_tokens, max_tokens, n, block_size, max_live_tokens)
    if needed > num_blocks:
        fewer = f", ask for fewer sequences ({width_field})" if n > 1 else ""
        live = f", at most {max_live_tokens} tokens of each at once" if max_live_tokens is not None else ""
        raise RequestTooLarge(
            f"the request needs {needed} KV blocks of {block_size} tokens ({num_prompt_tokens} of prompt, "
            f"{n} × {max_tokens} of output{live}), but the cache has {num_blocks}; lower max_tokens, shorten the "
            f"prompt{fewer}, or give the cache more memory (kv_cache_memory, num_gpu_blocks_override)",
            field="max_tokens",
        )
