"""A request from which nothing can be drawn ends with its reason; its neighbours keep the text that they have alone."""

from __future__ import annotations

from pathlib import Path

import msgspec

from octavo import LLM, SamplingParams
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint


def test_tokens_that_run_out_end_one_request_of_a_batch(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, vocab_size=300)
    write_byte_tokenizer(tmp_path)
    plain = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
    # "a" can be drawn once
    stuck = SamplingParams(max_tokens=6, seed=1, allowed_token_ids=[97], bad_words=["aa"], ignore_eos=True)
    named = SamplingParams(**{**msgspec.structs.asdict(stuck), "logprobs": 0, "logprob_token_ids": (97,)})
    with LLM(model=str(tmp_path), block_size=16, num_gpu_blocks_override=40, threads=1, dtype="float32") as llm:
        alone = llm.generate("one", plain)[0]
        first, failed, described, last = llm.generate(["one", "two", "two", "one"], [plain, stuck, named, plain])
    assert first.outputs == last.outputs == alone.outputs
    assert failed.error is not None
    assert described.error == failed.error
    assert failed.error.message == (
        "no token may be drawn for position 4: allowed_token_ids and bad_words bar every token; loosen one of them"
    )
    assert (failed.error.field, failed.error.code) == ("allowed_token_ids", "invalid_value")
    assert failed.error.is_client_error
    assert failed.outputs[0].text == "a"
