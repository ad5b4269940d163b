"""What a core returned of a prompt, as arrays: the values of a vector, or a row for each token that counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.config.pooling.pooling_config import PoolingConfig
from octavo.core.outputs import RequestOutput
from octavo.core.pooling import TOKEN_CLASSIFY, TOKEN_TASKS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def array_of(config: PoolingConfig, output: RequestOutput, task: str) -> NDArray[np.float32]:
    """Return the float32 values of a prompt, [size], or [rows, size] of a task with a row for each token.

    The rows are those of all tokens, or of those that end a step where the model judges steps. BGE-M3 leaves out the
    ends of prompts: the first token's vector, and both tokens' weights, which are returned as [tokens].
    """
    import numpy as np

    found: NDArray[np.float32] = np.frombuffer(output.pooled or b"", dtype=np.float32)
    if task not in TOKEN_TASKS or not len(found):
        return found
    rows = found.reshape(len(output.prompt_token_ids), -1)
    if task == TOKEN_CLASSIFY and config.step_token_id is not None:
        rows = rows[np.array(output.prompt_token_ids) == config.step_token_id]
    if config.row_token_ids:
        given = np.array(output.prompt_token_ids)
        rows = np.concatenate([rows[given == each] for each in config.row_token_ids])
    if config.token_heads is not None:
        ids, heads = output.prompt_token_ids, config.token_heads
        rows = rows[ids[0] == heads.first :]
        if task == TOKEN_CLASSIFY:
            return rows[: len(rows) - (ids[-1] == heads.last), 0]
    return rows
