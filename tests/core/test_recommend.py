"""Advice: the worked rows, every gate, and what it never does."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from noisescale.advice import Recommendation, RecommendRequest, WhatIf
from noisescale.errors import ContradictionError, InvalidInputError, NotMeasuredError
from noisescale.moments import StepMoments
from noisescale.recommend import recommend, recommend_run
from noisescale.wire import RunInfo, TunedBase
from tests.synthetic import blocks_of, gaussian_moments

ROWS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "vectors" / "recommend.json").read_text(encoding="utf-8")
)


def request(**changes: Any) -> RecommendRequest:
    """R1 of the worked rows: SGD, far below the noise scale, and some changes to it."""
    return RecommendRequest.model_validate(ROWS[0]["request"] | changes)


def as_json(answer: Recommendation) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer.model_dump_json())
    return found


def assert_printed(expected: object, found: object, where: str) -> None:
    """Equal, numbers to the figures that were printed."""
    if isinstance(expected, dict):
        assert isinstance(found, dict), where
        for key, value in expected.items():
            assert key in found, f"{where}.{key} is missing"
            assert_printed(value, found[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert isinstance(found, list), where
        assert len(found) == len(expected), where
        for index, (one, other) in enumerate(zip(expected, found, strict=True)):
            assert_printed(one, other, f"{where}[{index}]")
    elif isinstance(expected, float):
        assert isinstance(found, int | float), where
        digits = len(repr(expected).split(".")[1]) if "e" not in repr(expected) else 8
        half_a_digit = 0.5 * 10**-digits
        assert abs(found - expected) <= half_a_digit * 1.0001, f"{where}: {found} for {expected}"
    else:
        assert found == expected, where


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_worked_row(row: dict[str, Any]) -> None:
    """Each worked row, field by field, to the digits it prints."""
    if "status" in row["response"]:
        with pytest.raises(ContradictionError) as caught:
            recommend(RecommendRequest.model_validate(row["request"]))
        assert "global_batch_size" in caught.value.fields
        assert "100" in str(caught.value)
    else:
        answer = recommend(RecommendRequest.model_validate(row["request"]))
        assert_printed(row["response"], as_json(answer), row["name"])


STATES = st.builds(
    lambda **k: RecommendRequest.model_validate(
        {
            **{key: value for key, value in k.items() if key not in ("low", "width", "bounded")},
            "noise_scale": {
                "value": k["low"] * math.sqrt(k["width"]) if k["low"] else None,
                "lower": k["low"],
                "upper": k["low"] * k["width"] if k["bounded"] and k["low"] else None,
                "upper_confirmed": k["bounded"],
            },
        }
    ),
    global_batch_size=st.integers(1, 100_000),
    learning_rate=st.floats(1e-6, 10),
    optimizer=st.sampled_from(["sgd", "adam", "adamw", "lamb", "lars", "sign", "lion", "muon", "other"]),
    dp_world_size=st.one_of(st.none(), st.integers(1, 64)),
    target_dp_world_size=st.one_of(st.none(), st.integers(1, 64)),
    measured_steps=st.integers(0, 5000),
    phase=st.sampled_from(["steady", "warmup", "lr_decay"]),
    tuned=st.one_of(
        st.none(),
        st.builds(TunedBase, global_batch_size=st.integers(1, 4096), learning_rate=st.floats(1e-4, 1)),
    ),
    low=st.one_of(st.just(0.0), st.floats(0.1, 1e6)),
    width=st.floats(1, 50),
    bounded=st.booleans(),
)


@given(state=STATES)
def test_what_advice_never_does(state: RecommendRequest) -> None:
    """No leap above 2x, no raised LR in decay, no LR without a rule, always reasons, interval, sources."""
    answer = recommend(state)
    before, after = state.global_batch_size, answer.global_batch_size
    assert answer.noise_scale == state.noise_scale
    assert after <= 2 * before * (1 + 1e-9)
    rate = answer.learning_rate
    assert state.learning_rate is not None
    if rate is not None:
        assert (
            state.learning_rate / 2.0001 <= rate <= state.learning_rate * 2.0001 or answer.action == "lower"
        )
        if state.phase == "lr_decay":
            assert rate <= state.learning_rate * (1 + 1e-9)
    if answer.action == "raise":
        assert state.noise_scale.lower >= 2 * before
        assert after >= 1.25 * before
        if state.optimizer == "other":
            assert rate is None
    if answer.action == "lower":
        assert state.noise_scale.upper is not None
        assert state.noise_scale.upper <= before / 2
        assert rate is None or rate <= state.learning_rate
    if answer.action == "hold":
        assert (after, rate) == (before, state.learning_rate)
    if state.phase == "warmup" or state.measured_steps < 200 or state.noise_scale.lower == 0:
        assert answer.action == "hold"
        assert answer.confidence == "none"
    assert "order-of-magnitude proxy" in answer.explanation
    assert answer.sources
    assert answer.confidence_reasons
    assert Recommendation.model_validate_json(answer.model_dump_json()) == answer


@given(state=STATES, unit=st.sampled_from([2, 10, 1000]))
def test_advice_has_no_unit(state: RecommendRequest, unit: int) -> None:
    """Sizes in a unit a thousand times smaller: the same action for the same reason."""
    scaled = state.model_copy(
        update={
            "global_batch_size": state.global_batch_size * unit,
            "dp_world_size": None,
            "target_dp_world_size": None,
            "tuned": state.tuned
            and state.tuned.model_copy(update={"global_batch_size": state.tuned.global_batch_size * unit}),
            "noise_scale": state.noise_scale.model_copy(
                update={
                    end: value * unit
                    for end in ("value", "lower", "upper")
                    if (value := getattr(state.noise_scale, end)) is not None
                }
            ),
        }
    )
    plain = recommend(state.model_copy(update={"dp_world_size": None, "target_dp_world_size": None}))
    other = recommend(scaled)
    if plain.reason != "change_too_small" and other.reason != "change_too_small":  # whole batches round
        assert (other.action, other.reason) == (plain.action, plain.reason)


def test_lowering_takes_the_upper_end_and_the_plain_rule() -> None:
    """hi <= B/2, confirmed: target max(B/2, hi), LR down by the ratio."""
    answer = recommend(request(noise_scale={"value": 60, "lower": 40, "upper": 90}))
    assert (answer.action, answer.reason) == ("lower", "above_noise_scale")
    assert answer.global_batch_size == 128
    assert answer.learning_rate == pytest.approx(0.05)
    assert answer.chosen_rule == "linear"
    assert answer.steps_multiplier is not None
    assert answer.steps_multiplier > 1


def test_an_upper_end_that_is_not_confirmed_is_not_acted_on() -> None:
    """Two disjoint stretches have to agree before the batch is lowered."""
    answer = recommend(request(noise_scale={"value": 60, "lower": 40, "upper": 90, "upper_confirmed": False}))
    assert (answer.action, answer.reason) == ("hold", "not_enough_evidence")
    assert "two halves" in answer.explanation


def test_steps_needed_is_for_an_interval_too_wide() -> None:
    """ceil(n (ln(hi/lo)/ln 4)^2), and not offered where more steps are not the matter."""
    answer = recommend(request(noise_scale={"value": 400, "lower": 100, "upper": 1600}))
    assert answer.reason == "not_enough_evidence"
    assert answer.steps_needed == 2000
    narrow = recommend(request(noise_scale={"value": 500, "lower": 480, "upper": 520}))
    assert narrow.reason == "not_enough_evidence"
    assert narrow.steps_needed is None
    assert "edge" in narrow.explanation


def test_audit_of_a_rate_far_above_the_rule() -> None:
    """Multiplying by the world size at a small noise scale is found, and brought down by at most 2x."""
    answer = recommend(
        request(
            global_batch_size=2048,
            dp_world_size=64,
            learning_rate=3.2,
            tuned={"global_batch_size": 256, "learning_rate": 0.1},
            noise_scale={"value": 300, "lower": 200, "upper": 450},
        )
    )
    assert answer.reason == "lr_off_rule"
    assert answer.learning_rate == pytest.approx(1.6)


def test_during_decay_the_batch_may_rise_and_the_rate_not() -> None:
    """LR never rises during LR decay."""
    answer = recommend(request(phase="lr_decay"))
    assert answer.action == "raise"
    assert answer.global_batch_size == 512
    assert answer.learning_rate == 0.1
    assert answer.chosen_rule is None
    assert "being decayed" in answer.explanation


def test_planned_decay_as_a_batch() -> None:
    """Smith: B f at an unchanged LR, under the lower end; g is what both ways divide."""
    answer = recommend(
        request(
            global_batch_size=128,
            dp_world_size=4,
            momentum=0.9,
            planned_decay={"factor": 5, "dataset_size": 50_000},
        )
    )
    instead = answer.batch_instead_of_decay
    assert instead is not None
    assert (instead.global_batch_size, instead.learning_rate, instead.limited_by_noise_scale) == (
        640,
        0.1,
        False,
    )
    assert instead.sgd_noise_scale == pytest.approx(389.6, abs=0.05)


def test_a_planned_batch_gets_every_rule() -> None:
    """256 -> 2048 at 2000: the launch plan, and its ramp."""
    answer = recommend(
        request(noise_scale={"value": 2000, "lower": 2000, "upper": 2000}, target_global_batch_size=2048)
    )
    plan = answer.plan
    assert plan is not None
    assert plan.rules is not None
    assert plan.rules["linear"] == pytest.approx(0.8)
    assert plan.learning_rate == pytest.approx(0.4458, abs=5e-5)
    assert plan.steps_multiplier == pytest.approx(0.2243, abs=5e-5)
    assert not plan.within_noise_scale
    assert plan.ramp(rule="linear", steps=7)[-1] == pytest.approx(0.8)
    with pytest.raises(InvalidInputError, match="not one of linear"):
        plan.ramp(rule="cubic")


def test_the_lesson_ramp_through_a_plan() -> None:
    """From one rank of 32 to four: linear scaling warms up by .16 .22 .28 .34 .40."""
    answer = recommend(
        request(
            global_batch_size=32,
            dp_world_size=1,
            micro_batch_size=32,
            target_dp_world_size=4,
            target_global_batch_size=128,
        )
    )
    assert answer.plan is not None
    assert answer.plan.layout is not None
    assert answer.plan.layout.dp_world_size == 4
    assert answer.plan.ramp(rule="linear", steps=5) == pytest.approx([0.16, 0.22, 0.28, 0.34, 0.40])


def test_no_layout_fits_batchnorm_going_down() -> None:
    """A per-rank batch that BatchNorm keeps cannot be halved."""
    answer = recommend(request(batch_norm=True, noise_scale={"value": 60, "lower": 40, "upper": 90}))
    assert answer.reason == "no_layout_fits"
    assert "SyncBatchNorm" in answer.explanation


def test_language_models_under_adam_are_low_confidence() -> None:
    """Merrill 2025 is in the reasons."""
    answer = recommend(
        request(
            optimizer="adamw",
            batch_unit="tokens",
            noise_scale={"value": 15000, "lower": 10000, "upper": 22000, "geometry": "adam"},
        )
    )
    assert answer.confidence == "low"
    assert any("2505.23971" in reason for reason in answer.confidence_reasons)


@pytest.mark.parametrize(
    "noise_scale",
    [
        {"value": 5, "lower": 10, "upper": 20},
        {"value": None, "lower": 30, "upper": 20},
        {"lower": -1},
        {"lower": math.nan},
        {"lower": 1, "upper": math.inf},
    ],
)
def test_an_interval_that_cannot_be_is_refused(noise_scale: dict[str, float]) -> None:
    """Ends out of order, negative, or not finite."""
    with pytest.raises(ValidationError):
        request(noise_scale=noise_scale)


# ---- advice on a run, from its blocks


INFO = RunInfo(
    optimizer="sgd", dp_world_size=4, micro_batch_size=16, accumulation_steps=1, max_micro_batch_size=64
)


def run_blocks(steps: int = 3000, *, seed: int = 0) -> list[Any]:
    return blocks_of(gaussian_moments(steps=steps, counts=[16] * 4, seed=seed))


def test_a_run_is_advised_on_what_it_measured() -> None:
    """Noise scale 400 at a batch of 64: raise to 128, with the run's own layout."""
    answer = recommend_run(run_blocks(), INFO, window_steps=3000)
    assert answer.action == "raise"
    assert answer.global_batch_size == 128
    assert answer.layout is not None
    assert answer.layout.model_dump() == {"micro_batch_size": 32, "dp_world_size": 4, "accumulation_steps": 1}
    assert answer.noise_scale.lower < 400
    assert answer.facts["local_batch_size"] == 16


def test_supposing_more_ranks_grows_the_batch_and_says_so() -> None:
    """dp_world_size overrides the report; the per-rank batch stays, so the batch grows."""
    answer = recommend_run(run_blocks(), INFO, what_if=WhatIf(dp_world_size=8), window_steps=3000)
    assert answer.global_batch_size_now == 128
    assert any("measured at a batch of 64" in text for text in answer.assumed)


def test_a_supposed_layout_that_contradicts_is_refused() -> None:
    """All three and a batch that is not their product."""
    what_if = WhatIf(global_batch_size=64, micro_batch_size=16, dp_world_size=8, accumulation_steps=1)
    with pytest.raises(ContradictionError, match="128"):
        recommend_run(run_blocks(300), INFO, what_if=what_if)


def test_a_supposed_batch_keeps_ranks_and_accumulation() -> None:
    """The micro-batch follows."""
    answer = recommend_run(run_blocks(300), INFO, what_if=WhatIf(global_batch_size=256))
    assert answer.facts["micro_batch_size"] == 64


def test_a_reported_layout_that_contradicts_the_measurement_is_set_aside() -> None:
    """A job's own slip never costs it the advice."""
    wrong = INFO.model_copy(update={"micro_batch_size": 20.0})
    answer = recommend_run(run_blocks(300), wrong)
    assert answer.global_batch_size_now == 64
    assert any("reported micro_batch_size is not" in text for text in answer.assumed)


def test_only_the_current_regime_counts() -> None:
    """After a jump of the LR the clean steps start again."""
    moments = gaussian_moments(steps=1000, counts=[16] * 4, seed=0)
    blocks = blocks_of(moments, learning_rates=[0.1] * 900 + [0.3] * 100)
    answer = recommend_run(blocks, INFO)
    assert answer.reason == "too_few_steps"
    assert answer.measured_steps == 100
    assert answer.learning_rate == 0.3


def test_half_a_tuned_base_is_a_contradiction() -> None:
    """A tuned LR says nothing without the batch it was tuned at."""
    with pytest.raises(ContradictionError, match="give both"):
        recommend_run(run_blocks(300), INFO, what_if=WhatIf(tuned_learning_rate=0.1))


def test_a_run_that_measured_nothing() -> None:
    """Its batch is not known: an error that says to wait; with one supposed, a hold."""
    with pytest.raises(NotMeasuredError, match="wait for its first block"):
        recommend_run([], RunInfo())
    answer = recommend_run([], RunInfo(), what_if=WhatIf(global_batch_size=64))
    assert answer.reason == "too_few_steps"


def test_adam_without_its_own_geometry_says_what_stood_in() -> None:
    """The euclidean noise scale is used at low confidence, and the answer says so."""
    answer = recommend_run(run_blocks(), INFO.model_copy(update={"optimizer": "adamw"}), window_steps=3000)
    assert answer.noise_scale.geometry == "euclidean"
    assert answer.confidence == "low"
    assert any("stands in" in text for text in answer.assumed)


def test_an_untrustworthy_run_is_held() -> None:
    """Identical data on all ranks: tr(Sigma) is nothing, and nothing is advised."""
    blocks = blocks_of([StepMoments(0.0, 1.0)] * 400)
    assert recommend_run(blocks, INFO).reason == "signal_not_detected"
