"""Which rows of a prompt's tokens are returned."""

from __future__ import annotations

from array import array

from octavo.config.schema import PoolingConfig
from octavo.core.outputs import RequestOutput
from octavo.engine.output.vector_output import array_of


def output_of(token_ids: list[int], values: list[float]) -> RequestOutput:
    pooled = array("f", values).tobytes()
    return RequestOutput(
        request_id="0", prompt=None, prompt_token_ids=token_ids, outputs=[], finished=True, pooled=pooled
    )


def test_a_model_that_judges_steps_returns_the_rows_of_their_ends() -> None:
    output = output_of([5, 9, 5, 9], [1, 2, 3, 4, 5, 6, 7, 8])
    config = PoolingConfig(task="token_classify")
    assert array_of(config, output, "token_classify").tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    config = PoolingConfig(task="token_classify", step_token_id=9)
    assert array_of(config, output, "token_classify").tolist() == [[3, 4], [7, 8]]
