"""Sampling parameters: what is taken, what is refused and how it is said."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from octavo.core.sampling_params import OutputKind, SamplingParams, documented_fields
from octavo.errors import InvalidRequest


def test_defaults_are_those_that_people_know() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.max_tokens) == (1, 1.0, 1.0, 16)
    assert params.output_kind is OutputKind.CUMULATIVE


def test_values_take_the_form_of_their_field() -> None:
    params = SamplingParams(
        stop="a", bad_words=["b"], stop_token_ids=[1], logit_bias={"3": 1}, temperature=1, top_k=3.0
    )  # type: ignore[arg-type,dict-item]
    assert (params.stop, params.bad_words, params.stop_token_ids) == (("a",), ("b",), (1,))
    assert params.logit_bias == {3: 1.0}
    assert type(params.temperature) is float
    assert type(params.top_k) is int


def test_scalars_of_numpy_are_numbers() -> None:
    params = SamplingParams(
        n=np.int64(2),
        seed=np.uint32(7),
        temperature=np.float32(0.5),
        stop_token_ids=np.array([4, 5]),
        logit_bias={np.int32(3): np.float32(1)},
    )  # type: ignore[arg-type,dict-item]
    assert params == SamplingParams(n=2, seed=7, temperature=0.5, stop_token_ids=[4, 5], logit_bias={3: 1.0})  # type: ignore[arg-type]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    for name, value in (("n", np.float32(1.5)), ("n", np.bool_(True)), ("temperature", np.float64("nan"))):
        with pytest.raises(InvalidRequest):
            SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 10**6),
        ("n", True),
        ("n", 1.5),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-38),
        ("seed", 2**63),
        ("seed", 0.5),
        ("stop", ["", "a"]),
        ("stop", [3]),
        ("stop", 3),
        ("stop", ["x"] * 65),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "12"),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {"a": 0.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {1: 10**400}),
        ("logit_bias", {math.inf: 0.0}),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", ["a"]),
        ("ignore_eos", 1),
        ("detokenize", None),
        ("output_kind", "all"),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert raised.value.field == field
    assert str(raised.value).startswith(field)


def test_a_limit_is_named_in_the_message() -> None:
    with pytest.raises(InvalidRequest, match="top_p is 2.0, must be at most 1"):
        SamplingParams(top_p=2.0)


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        SamplingParams(stop="a", detokenize=False)


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(InvalidRequest, match="did you mean temperature"):
        SamplingParams(temprature=1.0)


def test_equal_sequences_are_not_computed_to_choose_among_them() -> None:
    with pytest.raises(InvalidRequest, match="best_of is 3, but temperature is 0.*raise temperature") as caught:
        SamplingParams(best_of=3, temperature=0)
    assert caught.value.field == "best_of"
    assert SamplingParams(n=3, temperature=0).width == 3
    assert SamplingParams(best_of=1, temperature=0).width == 1
    assert SamplingParams(best_of=3, temperature=0, use_beam_search=True).width == 3


def test_a_number_beyond_all_sense_is_refused_like_others() -> None:
    for field in ("n", "best_of", "max_tokens", "temperature", "seed"):
        with pytest.raises(InvalidRequest, match=f"{field} has 16610 bits") as caught:
            SamplingParams(**{field: 10**5000})  # type: ignore[arg-type]
        assert caught.value.field == field


def test_a_search_leaves_out_defaults_of_drawing() -> None:
    habits = {"temperature": 0.6, "top_k": 5, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1, "max_tokens": 9}
    searched = SamplingParams.over_defaults(habits, {"use_beam_search": True, "n": 2})
    assert searched == SamplingParams(use_beam_search=True, n=2, repetition_penalty=1.1, max_tokens=9)
    drawn = SamplingParams.over_defaults(habits, {"top_k": 0})
    assert drawn == SamplingParams(**{**habits, "top_k": 0})
    with pytest.raises(InvalidRequest, match="top_p is 0.5, but beam search"):
        SamplingParams.over_defaults(habits, {"use_beam_search": True, "top_p": 0.5})


def test_a_temperature_near_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy


def test_parameters_survive_the_wire() -> None:
    params = SamplingParams(n=2, stop=["a"], logit_bias={3: -1.0}, seed=-5, allowed_token_ids=[1], max_tokens=None)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_every_field_is_documented() -> None:
    documented = documented_fields()
    assert list(documented) == list(SamplingParams.__struct_fields__)
    assert all(param.doc.endswith(".") for param in documented.values())


def test_the_seed_minus_one_is_none_as_in_vllm() -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=-2).seed == -2


def test_whole_limits_are_shown_in_full() -> None:
    with pytest.raises(InvalidRequest, match="must be at most 9223372036854775807"):
        SamplingParams(seed=2**63)
    with pytest.raises(InvalidRequest, match="must be at most 100$"):
        SamplingParams(repetition_penalty=1000)


def test_a_limit_that_nobody_set_makes_room_for_min_tokens() -> None:
    assert SamplingParams.over_defaults({"max_tokens": 8}, {"min_tokens": 50}).max_tokens == 50
    assert SamplingParams.over_defaults({}, {"min_tokens": 50}).max_tokens == 50
    assert SamplingParams.over_defaults({"max_tokens": None}, {"min_tokens": 50}).max_tokens is None
    with pytest.raises(InvalidRequest, match="min_tokens is 50, must be at most max_tokens, which is 20; raise max"):
        SamplingParams.over_defaults({}, {"min_tokens": 50, "max_tokens": 20})
    with pytest.raises(InvalidRequest, match="which is 16 unless it is set; raise max_tokens"):
        SamplingParams(min_tokens=50)


def test_a_field_can_be_set_and_is_checked() -> None:
    params = SamplingParams()
    params.max_tokens, params.stop, params.seed = 40, "end", -1  # type: ignore[assignment]
    assert params == SamplingParams(max_tokens=40, stop="end")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"top_p is 2\.0, must be at most 1"):
        params.top_p = 2.0
    with pytest.raises(InvalidRequest, match="top_q is not a sampling parameter; did you mean top_p"):
        params.top_q = 0.5  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequest, match=r"temperature cannot be deleted; set it to its default, 1\.0"):
        del params.temperature
    params.min_tokens = 50
    params.max_tokens = 60
    assert msgspec.structs.replace(params) == SamplingParams(max_tokens=60, min_tokens=50, stop=("end",))
