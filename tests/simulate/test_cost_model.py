"""What steps cost, where the figures come from, and how they are fitted."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.step import BlockCopy, BlockOps, ScheduledSequence, SchedulerOutput
from octavo.errors import ConfigError
from octavo.simulate.cost_model import (
    COPIED_BLOCK,
    FEATURES,
    Fitted,
    MeasuredStep,
    Roofline,
    StepWork,
    fit,
    non_negative_least_squares,
    num_pairs_of,
    work_of,
)
from octavo.simulate.presets import load_cost_model, preset
from tests.simulate.parts import make_costs


def roofline() -> Roofline:
    return Roofline(
        name="test",
        weight_bytes=1000,
        kv_bytes_per_token=10,
        flops_per_token=200,
        flops_per_pair=4,
        device_bytes=2000,
        bytes_per_s=100,
        flops_per_s=1000,
        swap_bytes_per_s=50,
        step_s=1,
        sequence_s=0.5,
    )


def test_work_counts_rows_tokens_context_and_pairs() -> None:
    def row(start: int, num_tokens: int) -> ScheduledSequence:
        return ScheduledSequence(seq_id=1, epoch=0, start=start, num_tokens=num_tokens, num_samples=1)

    step = SchedulerOutput(
        step_id=1,
        new_sequences=[],
        rows=[row(9, 1), row(4, 3)],
        finished_ids=[],
        block_ops=BlockOps(copies=[BlockCopy(1, 2)], swap_ins=[BlockCopy(1, 3)]),
    )
    # three queries after four tokens see 5 + 6 + 7 keys
    assert work_of(step) == StepWork(2, 4, 3, 10, 18, 1, 1)

    # under a window of three: 3, and 3 + 3 + 3
    assert work_of(step, 3) == StepWork(2, 4, 3, 3, 9, 1, 1)


@given(start=st.integers(0, 30), num_tokens=st.integers(1, 30), window=st.none() | st.integers(1, 40))
def test_pairs_are_those_that_are_seen(start: int, num_tokens: int, window: int | None) -> None:
    seen = [min(position + 1, window or 1000) for position in range(start, start + num_tokens)]
    assert num_pairs_of(start, num_tokens, window) == sum(seen)


def test_a_roofline_takes_the_longer_of_bytes_and_arithmetic() -> None:
    few = StepWork(num_sequences=1, num_tokens=1, num_context_tokens=100)
    many = StepWork(num_sequences=1, num_tokens=200, num_prefill_tokens=200)
    assert roofline().step_seconds(few, 4) == 1.5 + (1000 + 1000) / 100
    assert roofline().step_seconds(many, 4) == 1.5 + 200 * 200 / 1000
    swapped, copied = few._replace(num_swapped_blocks=5), few._replace(num_copied_blocks=5)
    assert roofline().step_seconds(swapped, 4) - roofline().step_seconds(few, 4) == pytest.approx(5 * 4 * 10 / 50)
    # within the device a block is read and written
    assert roofline().step_seconds(copied, 4) - roofline().step_seconds(few, 4) == pytest.approx(5 * 4 * 10 * 2 / 100)


def test_the_cache_gets_what_the_weights_leave() -> None:
    assert roofline().kv_tokens(0.9) == 80
    assert roofline().kv_tokens(0.4) == 0


def test_presets_are_a_device_and_a_model() -> None:
    model = preset("a100-40g/opt-13b")
    # the paper's set-up: about 12 GB for 15,700 tokens, at 800 kB each
    assert model.kv_bytes_per_token == 819_200
    assert 12_000 < model.kv_tokens(0.95) < 16_000
    with pytest.raises(ConfigError, match="neither a file nor DEVICE/MODEL with a device of a100, a100-40g"):
        preset("a100-40g/gpt-9")


@pytest.mark.parametrize("model", [roofline(), make_costs()])
def test_a_cost_model_is_read_from_its_file(tmp_path: Path, model: Roofline | Fitted) -> None:
    (tmp_path / "model.json").write_bytes(msgspec.json.encode(model))
    assert load_cost_model(str(tmp_path / "model.json")) == model


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"type": "guess"}', "is not a cost model: Invalid value 'guess'"),
        ('{"type": "fitted", "step": 1}', "is not a cost model: Object contains unknown field `step`"),
        (msgspec.json.encode(make_costs(step_s=-1.0)).decode(), r"Expected `float` >= 0.0 - at `\$.step_s`"),
        (
            msgspec.json.encode(make_costs(kv_bytes_per_token=0.0)).decode(),
            r"Expected `float` > 0.0 - at `\$.kv_bytes_per_token`",
        ),
    ],
)
def test_what_is_no_cost_model_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_cost_model(str(tmp_path / "model.json"))


def test_a_missing_file_and_an_unknown_preset_have_different_errors() -> None:
    with pytest.raises(ConfigError, match="there is no such file; octavo bench calibrate"):
        load_cost_model("nowhere.json")


def test_coefficients_that_made_the_times_are_found_again() -> None:
    source = random.Random(0)
    truth = make_costs(step_s=2e-3, sequence_s=1e-4, prefill_token_s=5e-5)
    truth = msgspec.structs.replace(
        truth,
        context_token_s=2e-7,
        pair_s=3e-8,
        prefill_step_s=5e-4,
        further_sequence_s=3e-5,
        copy_bytes_per_s=1e6,
        kv_bytes_per_token=100.0,
    )
    steps = []
    for _ in range(60):
        prefill = source.choice([0, source.randrange(2, 500)])
        rows, context, pairs = source.randrange(1, 60), source.randrange(9000), prefill * source.randrange(1, 900)
        work = StepWork(rows, 1, prefill, context, pairs, num_copied_blocks=source.choice([0, source.randrange(20)]))
        steps.append(MeasuredStep(work, truth.step_seconds(work, 16)))
    coefficients, error = fit(steps)
    assert error < 1e-5
    expected = {name: getattr(truth, name) for name in FEATURES} | {COPIED_BLOCK: 16 * 100 / 1e6}
    assert coefficients == pytest.approx(expected, rel=1e-3)


def test_noise_makes_no_prediction_too_low() -> None:
    source = random.Random(1)
    works = [StepWork(1, 1, source.randrange(2, 100)) for _ in range(4000)]
    steps = [MeasuredStep(work, 1e-3 * work.num_prefill_tokens * source.gammavariate(4, 1 / 4)) for work in works]
    coefficients, _ = fit(steps)
    predicted = sum(coefficients["prefill_token_s"] * work.num_prefill_tokens for work in works)
    constant = coefficients["step_s"] + coefficients["prefill_step_s"] + coefficients["sequence_s"]
    assert (predicted + constant * len(works)) / sum(step.seconds for step in steps) == pytest.approx(1.0, abs=0.03)


def test_steps_that_were_held_up_change_nothing() -> None:
    steps = [MeasuredStep(StepWork(rows, rows), 1e-3 + 1e-4 * rows) for rows in range(1, 60)]
    stalled = [MeasuredStep(StepWork(rows, rows), 0.5) for rows in range(5, 60, 10)]
    assert fit([*steps, *stalled])[0] == pytest.approx(fit(steps)[0], rel=1e-6)


def test_coefficients_are_never_negative() -> None:
    # without bounds the best line through these falls
    assert non_negative_least_squares([[1, 0], [1, 1], [1, 2]], [3, 2, 1]) == pytest.approx([2, 0])


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 measured steps are too few to fit 7 coefficients"):
        fit([MeasuredStep(StepWork(1, 1), 1.0)])


def test_a_fit_says_whether_the_machine_was_busy_and_whether_loads_were_held_out() -> None:
    model = make_costs()
    assert "no load was held out" in model.describe()
    assert "busy" not in model.describe()
    assert "interrupted 30% of the steps" in msgspec.structs.replace(model, interrupted_share=0.3).describe()
    assert "differ by 80%" in msgspec.structs.replace(model, repetition_spread=0.8).describe()
