"""What can never run, even alone. The front refuses it at the door; the core, which trusts nobody, asks again."""

from __future__ import annotations

from octavo.core.arithmetic import max_blocks_of_group
from octavo.errors import RequestTooLarge


def check_runs_alone(
    num_prompt_tokens: int, max_tokens: int, n: int, *, max_num_seqs: int, num_blocks: int, block_size: int
) -> None:
    """Raise RequestTooLarge when a group (a shared prompt and n tails) exceeds the engine by itself."""
    if n > max_num_seqs:
        raise RequestTooLarge(
            f"n is {n}, but the engine runs at most {max_num_seqs} sequences at once; ask for fewer, or raise "
            "max_num_seqs",
            field="n",
        )
    needed = max_blocks_of_group(num_prompt_tokens, max_tokens, n, block_size)
    if needed > num_blocks:
        fewer = ", ask for fewer sequences (n)" if n > 1 else ""
        raise RequestTooLarge(
            f"the request needs {needed} KV blocks of {block_size} tokens ({num_prompt_tokens} of prompt, "
            f"{n} × {max_tokens} of output), but the cache has {num_blocks}; lower max_tokens, shorten the "
            f"prompt{fewer}, or give the cache more memory (kv_cache_memory, num_gpu_blocks_override)",
            field="max_tokens",
        )
