"""Every field of the OpenAI API and of other servers is honoured, or refused by name; none is unknown or ignored."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats

from octavo.server.decode import refused_fields
from octavo.server.schema.chat import ChatCompletionRequest
from octavo.server.schema.completions import CompletionRequest
from tests.server.conftest import Served
from tests.server.raw import ask

PATHS = {ChatCompletionRequest: "/v1/chat/completions", CompletionRequest: "/v1/completions"}
NEEDED = {
    ChatCompletionRequest: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    CompletionRequest: {"prompt": "a", "max_tokens": 1},
}

BOTH = {
    "vLLM": """
add_special_tokens allowed_token_ids bad_words best_of cache_salt ec_transfer_params ignore_eos
include_stop_str_in_output kv_transfer_params length_penalty logits_processors logprob_token_ids min_p min_tokens
priority prompt_logprobs repetition_detection repetition_penalty request_id return_mm_kwargs return_prompt_text
return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start session_id
skip_special_tokens spaces_between_special_tokens stop_token_ids stream_interval structured_outputs
thinking_token_budget top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs watermarking
""",
    "SGLang": """
bootstrap_host bootstrap_port bootstrap_room cache_salt custom_labels custom_logit_processor custom_params
data_parallel_rank ebnf extra_key ignore_eos json_schema lora_path min_p min_tokens no_stop_trim priority regex
repetition_penalty return_hidden_states return_routed_experts rid routed_dp_rank session_params skip_special_tokens
stop_regex stop_token_ids top_k
""",
    "llama.cpp": """
cache_prompt dry_allowed_length dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent
dynatemp_range grammar grammar_lazy grammar_triggers id_slot ignore_eos json_schema lora min_keep min_p mirostat
mirostat_eta mirostat_tau n_cmpl n_discard n_indent n_keep n_predict n_probs post_sampling_probs preserved_tokens
repeat_last_n repeat_penalty response_fields return_progress return_tokens samplers t_max_predict_ms timings_per_token
top_k top_n_sigma typical_p xtc_probability xtc_threshold
""",
    "TGI": "best_of seed stop stream temperature top_p",
}
CHAT = {
    "vLLM": """
add_generation_prompt chat_template chat_template_kwargs continue_final_message documents echo include_reasoning
media_io_kwargs mm_processor_kwargs reasoning_effort
""",
    "SGLang": "chat_template_kwargs continue_final_message separate_reasoning stream_reasoning",
    "llama.cpp": "parse_tool_calls reasoning_format thinking_forced_open",
    "TGI": "guideline tool_prompt",
}


def cases() -> Iterator[tuple[type, str, set[str]]]:
    yield ChatCompletionRequest, "OpenAI", set(chats.CompletionCreateParamsBase.__annotations__) | {"stream"}
    yield CompletionRequest, "OpenAI", set(completions.CompletionCreateParamsBase.__annotations__) | {"stream"}
    for server, names in BOTH.items():
        yield CompletionRequest, server, set(names.split())
        yield ChatCompletionRequest, server, set(f"{names} {CHAT[server]}".split())


@pytest.mark.parametrize(("kind", "server", "names"), list(cases()))
def test_each_field_is_known(kind: type, server: str, names: set[str]) -> None:
    assert names - set(kind.__struct_fields__) == set()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest])
def test_refused_fields_name_themselves_and_a_remedy_or_a_reason(
    server: Served, kind: type[ChatCompletionRequest] | type[CompletionRequest]
) -> None:
    for name, mark in refused_fields(kind).items():
        answer = ask(server.url, PATHS[kind], {**NEEDED[kind], name: "something else"})
        assert (answer.status, answer.error["param"], answer.error["code"]) == (400, name, "unsupported_parameter")
        assert answer.error["message"] == f"{name} is not supported: {mark.because}"
    harmless = {name: mark.harmless[0] for name, mark in refused_fields(kind).items() if mark.harmless}
    assert ask(server.url, PATHS[kind], {**NEEDED[kind], **harmless}).status == 200
