"""What can never run, even alone. Checked in the front, and again in the scheduler, which trusts no front."""

from __future__ import annotations

from octavo.core.arithmetic import max_blocks_of_group
from octavo.errors import RequestTooLarge


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
