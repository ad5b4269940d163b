"""What can never run, even alone. Checked in the front, and again in the scheduler, which trusts no front."""

from __future__ import annotations

from octavo.core.cache_limits import CacheLimits
from octavo.errors import RequestTooLarge


def check_runs_alone(
    num_prompt_tokens: int,
    max_tokens: int,
    n: int,
    *,
    max_num_seqs: int,
    cache: CacheLimits,
    width_field: str = "n",
) -> None:
    """Raise RequestTooLarge when a group (a shared prompt and n tails) exceeds the engine by itself.

    `width_field` is the parameter that sets n: "n" or "best_of".
    """
    if n > max_num_seqs:
        raise RequestTooLarge(
            f"{width_field} is {n}, but the engine runs at most {max_num_seqs} sequences at once; ask for fewer, "
            "or raise max_num_seqs",
            field=width_field,
        )
    max_tokens += cache.num_lookahead
    for group in cache.groups:
        needed = group.max_blocks(num_prompt_tokens, max_tokens, n, cache.block_size)
        if needed <= group.num_blocks:
            continue
        fewer = f", ask for fewer sequences ({width_field})" if n > 1 else ""
        live = f", at most {group.max_live_tokens} tokens of each at once" if group.max_live_tokens is not None else ""
        raise RequestTooLarge(
            f"the request needs {needed} KV blocks of {cache.block_size} tokens ({num_prompt_tokens} of prompt, "
            f"{n} × {max_tokens} of output{live}), but the cache has {group.num_blocks}; lower max_tokens, shorten the "
            f"prompt{fewer}, or give the cache more memory (kv_cache_memory, num_gpu_blocks_override)",
            field="max_tokens",
        )
