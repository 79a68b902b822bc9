"""From a noise scale with its interval to advice with reasons.

`recommend` advises on a state of a run, measured or supposed; `recommend_run` reads that state
off the run's blocks. Both are pure, and serve the server, the command line and a job alike.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from noisescale.advice import (
    BatchInsteadOfDecay,
    Confidence,
    Layout,
    NoiseScaleInterval,
    PlannedChange,
    PlannedDecay,
    Recommendation,
    RecommendRequest,
    SameBatchOption,
    Size,
    WhatIf,
)
from noisescale.blocks import TOTAL, Block, Geometry, main_geometry
from noisescale.decide import CLEAN_STEPS, Decision, decide, fit_layout, learning_rate_for
from noisescale.errors import ContradictionError, InvalidInputError, NotMeasuredError
from noisescale.estimate import WINDOW_STEPS, Estimate, estimate
from noisescale.explain import explain, formula_of, sources_of
from noisescale.history import Regime, current_regime
from noisescale.layout import KnownLayout, Realised, complete_layout
from noisescale.rules import (
    DEFAULT_BETA2,
    OPTIMIZER_RULES,
    BatchChange,
    adam_square_root_betas,
    batch_size_instead_of_decay,
    learning_rates,
    ramp_steps,
    sample_efficiency,
    sgd_noise_scale,
    weight_decay_same_timescale,
)
from noisescale.wire import SMALLEST, OptimizerFamily, RunInfo, TunedBase

MATCHING_GEOMETRY: dict[OptimizerFamily, Geometry] = {
    "adam": "adam",
    "adamw": "adam",
    "sign": "sign",
    "lion": "sign",
    "muon": "spectral",
}
"""The noise scale that fits an optimizer's steps; euclidean for those not listed."""

TOKENS_TOLERANCE = 0.2
"""How far a layout's product may be from a global batch counted in tokens, which varies by nature."""


def recommend(request: RecommendRequest, *, assumed: Sequence[str] = ()) -> Recommendation:
    """Advise on a state of a run.

    Args:
        request: Measured or supposed.
        assumed: What the caller took as a default already; passed through to the answer.

    Raises:
        ContradictionError: The layout's product is not the global batch.
    """
    layout = complete_layout(
        global_batch_size=request.global_batch_size,
        micro_batch_size=request.micro_batch_size,
        dp_world_size=request.dp_world_size,
        accumulation_steps=request.accumulation_steps,
        tolerance=TOKENS_TOLERANCE if request.batch_unit == "tokens" else 0.0,
    )
    decision = decide(request, layout=layout)
    confidence, confidence_reasons = _confidence(request, decision)
    changed = decision.action in ("raise", "lower")
    rules: dict[str, float] | None = None
    fields: dict[str, object] = {}
    steps: int | None = None
    if decision.action != "hold" and decision.learning_rate is not None:
        steps = ramp_steps(optimizer=request.optimizer, beta2=request.beta2)
        fields["ramp_steps"] = steps
        fields["ramp_examples"] = size(steps * decision.global_batch_size)
    if changed and decision.at is not None:
        change = BatchChange(
            before=request.global_batch_size, after=decision.global_batch_size, noise_scale=decision.at
        )
        fields |= _change_fields(request, change)
        if request.learning_rate is not None:
            rules = learning_rates(learning_rate=request.learning_rate, change=change)
            fields["rules"] = rules
        if decision.learning_rate is not None and not decision.rate_held:
            fields["chosen_rule"] = _chosen_rule(request, raising=change.ratio >= 1)
        fields |= _optimizer_fields(request, change, learning_rate=decision.learning_rate)
    if decision.layout is not None:
        fields["layout"] = _layout(decision.layout)
    fields |= _efficiency(request, then=decision.global_batch_size if changed else None)
    answer = Recommendation.model_validate(
        {
            "action": decision.action,
            "reason": decision.reason,
            "global_batch_size": size(decision.global_batch_size),
            "learning_rate": decision.learning_rate,
            "global_batch_size_now": size(request.global_batch_size),
            "learning_rate_now": request.learning_rate,
            "noise_scale": request.noise_scale,
            "measured_steps": request.measured_steps,
            "batch_unit": request.batch_unit,
            "confidence": confidence,
            "confidence_reasons": confidence_reasons,
            "rule_band": decision.rule_band,
            "steps_needed": decision.steps_needed,
            "same_batch_option": _same_batch(request, layout),
            "plan": _plan(request, layout),
            "batch_instead_of_decay": _instead_of_decay(request),
            "facts": _facts(request, layout),
            "explanation": "",
            "formula": formula_of(request.optimizer),
            "sources": sources_of(request, decision),
            "assumed": [*assumed, *(layout.assumed if layout else ()), *_assumed(request, layout)],
            **fields,
        }
    )
    return answer.model_copy(update={"explanation": explain(request, decision, answer)})


def recommend_run(
    blocks: Sequence[Block],
    info: RunInfo,
    *,
    what_if: WhatIf | None = None,
    window_steps: int = WINDOW_STEPS,
) -> Recommendation:
    """Advise on a run by what it measured.

    The noise scale is that of the current regime (noisescale.history), in the geometry that
    fits the optimizer where the run measured it, else the Euclidean one.

    Args:
        blocks: In step order, as far back as they are at hand; the last of them matter.
        info: What the run reported of itself.
        what_if: Overrides what was reported or measured, field by field.
        window_steps: Measured steps the estimate looks back over.

    Raises:
        NotMeasuredError: There is no block, and what_if names no global_batch_size.
        ContradictionError: what_if gives a layout whose product is not the global batch, or one
            half of a tuned base.
    """
    regime = current_regime(blocks)
    optimizer = (what_if.optimizer if what_if else None) or info.optimizer or "other"
    wanted = {MATCHING_GEOMETRY.get(optimizer, "euclidean"), main_geometry(regime.blocks)}
    found = [estimate(regime.blocks, geometry=geometry, window_steps=window_steps) for geometry in wanted]
    return recommend_regime(regime, found, info, what_if=what_if)


def recommend_regime(
    regime: Regime, estimates: Iterable[Estimate], info: RunInfo, *, what_if: WhatIf | None = None
) -> Recommendation:
    """The same, where the current regime is estimated already.

    Args:
        regime: The run's current one.
        estimates: Of its blocks and the whole model; at least in the geometry that stands for all
            (`main_geometry`). Estimates of layer groups are left out.
        info: What the run reported of itself.
        what_if: Overrides what was reported or measured, field by field.

    Raises:
        NotMeasuredError, ContradictionError: As above.
    """
    what_if = what_if or WhatIf()
    optimizer = what_if.optimizer or info.optimizer or "other"
    geometry, found = _fitting_estimate(regime, estimates, optimizer=optimizer)
    batch = found.global_batch_size
    setting = _settle_layout(what_if, info, measured=batch, unit_varies=found.batch_unit == "tokens")
    assumed = list(setting.assumed)
    wanted = MATCHING_GEOMETRY.get(optimizer, "euclidean")
    if wanted != geometry:
        assumed.append(
            f"the {geometry} noise scale stands in for the {wanted} one that fits {optimizer}, which was "
            "not measured"
        )
    if batch is not None and setting.global_batch_size != batch:
        assumed.append(
            f"the noise scale, measured at a batch of {batch:g}, holds at {setting.global_batch_size:g}"
        )

    def told(name: str) -> object:
        override = getattr(what_if, name, None)
        return override if override is not None else getattr(info, name, None)

    return recommend(
        RecommendRequest.model_validate(
            {
                "noise_scale": interval_of(found),
                "measured_steps": found.measured_steps,
                "batch_unit": found.batch_unit,
                "global_batch_size": setting.global_batch_size,
                "dp_world_size": setting.dp_world_size,
                "micro_batch_size": setting.micro_batch_size,
                "accumulation_steps": setting.accumulation_steps,
                "learning_rate": what_if.learning_rate or _rate(regime.learning_rate),
                "optimizer": optimizer,
                "phase": what_if.phase or regime.phase,
                "target_dp_world_size": what_if.target_dp_world_size,
                "target_global_batch_size": what_if.target_global_batch_size,
                "batch_norm": told("batch_norm") or False,
                "loss_reduction": info.loss_reduction,
                "tuned": _tuned(what_if, info),
                "planned_decay": _planned_decay(what_if),
                **{
                    name: told(name)
                    for name in (
                        "max_micro_batch_size",
                        "momentum",
                        "beta1",
                        "beta2",
                        "epsilon",
                        "weight_decay",
                    )
                },
            }
        ),
        assumed=assumed,
    )


def _rate(reported: float | None) -> float | None:
    """A learning rate to advise on; none where it is 0, or too small to have a ratio to any other."""
    return reported if reported is not None and reported >= SMALLEST else None


def interval_of(found: Estimate) -> NoiseScaleInterval:
    """An estimate's interval, as a recommendation takes it.

    A point estimate outside its own interval (which a ratio of noisy means may be) is left out.
    """
    upper = found.upper if found.upper is not None and found.upper > 0 else None
    lower = found.lower if upper is None or found.lower <= upper else 0.0
    value = found.noise_scale if found.noise_scale is not None and found.noise_scale > 0 else None
    if value is not None and (value < lower or (upper is not None and value > upper)):
        value = None
    return NoiseScaleInterval(
        value=value,
        lower=lower,
        upper=upper,
        upper_confirmed=found.upper_confirmed,
        geometry=found.geometry,
    )


def size(value: float) -> Size:
    """A batch size, as an integer where it is one."""
    return int(value) if value == int(value) else value


def _fitting_estimate(
    regime: Regime, estimates: Iterable[Estimate], *, optimizer: OptimizerFamily
) -> tuple[Geometry, Estimate]:
    of_all = {found.geometry: found for found in estimates if found.group == TOTAL}
    fitting = MATCHING_GEOMETRY.get(optimizer, "euclidean")
    if fitting in of_all and of_all[fitting].measured_steps > 0:
        return fitting, of_all[fitting]
    standing_in = main_geometry(regime.blocks)
    return standing_in, of_all[standing_in]


@dataclass(slots=True)
class _Setting:
    """The batch and layout to advise on, after what_if has overridden what the run reported."""

    global_batch_size: float
    micro_batch_size: float | None
    dp_world_size: int | None
    accumulation_steps: int | None
    assumed: list[str] = field(default_factory=list)


def _settle_layout(what_if: WhatIf, info: RunInfo, *, measured: float | None, unit_varies: bool) -> _Setting:
    """Merge the supposed with the reported; what was supposed is never bent.

    A supposed batch keeps the reported ranks and accumulation; a supposed layout number without
    a supposed batch keeps the others and changes the batch.
    """
    ranks = what_if.dp_world_size or info.dp_world_size
    accumulation = what_if.accumulation_steps or info.accumulation_steps
    micro = what_if.micro_batch_size or info.micro_batch_size
    if micro is None and measured is not None and ranks is not None and info.dp_world_size is not None:
        micro = measured / (info.dp_world_size * (info.accumulation_steps or 1))
    supposed = (what_if.micro_batch_size, what_if.dp_world_size, what_if.accumulation_steps)
    if what_if.global_batch_size is not None:
        if None not in supposed:
            return _Setting(what_if.global_batch_size, micro, ranks, accumulation)
        if what_if.micro_batch_size is None:
            return _Setting(what_if.global_batch_size, None, ranks, accumulation)
        if what_if.accumulation_steps is None:
            return _Setting(what_if.global_batch_size, micro, ranks, None)
        return _Setting(what_if.global_batch_size, micro, None, accumulation)
    if any(value is not None for value in supposed) or measured is None:
        if micro is None or ranks is None:
            raise NotMeasuredError(
                "the run has not measured a step yet, so its global batch is not known; wait for its first "
                "block, or give global_batch_size"
            )
        return _Setting(micro * ranks * (accumulation or 1), micro, ranks, accumulation or 1)
    setting = _Setting(measured, micro, ranks, accumulation)
    try:
        complete_layout(
            global_batch_size=measured,
            micro_batch_size=micro,
            dp_world_size=ranks,
            accumulation_steps=accumulation,
            tolerance=TOKENS_TOLERANCE if unit_varies else 0.0,
        )
    except ContradictionError as error:
        # Reported by the run, not supposed by the asker: advise on what was measured, and say so.
        setting.micro_batch_size = None
        setting.assumed.append(
            f"the measured batch is right and the reported micro_batch_size is not: {error}"
        )
    return setting


def _tuned(what_if: WhatIf, info: RunInfo) -> TunedBase | None:
    batch, rate = what_if.tuned_global_batch_size, what_if.tuned_learning_rate
    if batch is None and rate is None:
        return info.tuned
    if batch is None or rate is None:
        raise ContradictionError(
            "a tuned base is a learning rate and the global batch it was tuned at; give both "
            "tuned_learning_rate and tuned_global_batch_size",
            fields=("tuned_learning_rate", "tuned_global_batch_size"),
        )
    return TunedBase(global_batch_size=batch, learning_rate=rate)


def _planned_decay(what_if: WhatIf) -> PlannedDecay | None:
    if what_if.planned_decay_factor is None:
        if what_if.dataset_size is not None:
            raise InvalidInputError(
                "dataset_size is used with a planned decay only; give planned_decay_factor too",
                field="dataset_size",
            )
        return None
    return PlannedDecay(factor=what_if.planned_decay_factor, dataset_size=what_if.dataset_size)


def _point(request: RecommendRequest) -> float:
    """Where efficiencies are stated: the point estimate, or the lower end where that is all there is."""
    scale = request.noise_scale
    return scale.value if scale.value is not None and scale.upper is not None else scale.lower


def _change_fields(request: RecommendRequest, change: BatchChange) -> dict[str, object]:
    stated = BatchChange(before=change.before, after=change.after, noise_scale=_point(request))
    return {
        "steps_multiplier": stated.steps_multiplier,
        "examples_multiplier": stated.examples_multiplier,
    }


def _efficiency(request: RecommendRequest, *, then: float | None) -> dict[str, object]:
    point = _point(request)
    if not point > 0:
        return {}
    one_sided = request.noise_scale.upper is None
    now = sample_efficiency(global_batch_size=request.global_batch_size, noise_scale=point)
    fields: dict[str, object] = {
        "sample_efficiency_now_at_least" if one_sided else "sample_efficiency_now": now
    }
    if then is not None:
        fields["sample_efficiency_then"] = sample_efficiency(global_batch_size=then, noise_scale=point)
    return fields


def _chosen_rule(request: RecommendRequest, *, raising: bool) -> str | None:
    rule = OPTIMIZER_RULES[request.optimizer]
    return rule.rule if raising else rule.plain_rule


def _optimizer_fields(
    request: RecommendRequest, change: BatchChange, *, learning_rate: float | None
) -> dict[str, object]:
    fields: dict[str, object] = {}
    if request.optimizer == "adamw" and request.weight_decay and request.learning_rate and learning_rate:
        fields["weight_decay_same_timescale"] = weight_decay_same_timescale(
            weight_decay=request.weight_decay,
            change=change,
            learning_rate_factor=learning_rate / request.learning_rate,
        )
    if request.optimizer in ("adam", "adamw") and request.beta1 is not None and request.beta2 is not None:
        betas = adam_square_root_betas(
            ratio=change.ratio, beta1=request.beta1, beta2=request.beta2, epsilon=request.epsilon or 0.0
        )
        if betas is not None:
            fields["adam_square_root_betas"] = {"beta1": betas[0], "beta2": betas[1]}
            if request.epsilon is not None:
                fields["adam_square_root_betas"] |= {"epsilon": betas[2]}  # type: ignore[operator]  # a dict, set above
    return fields


def _layout(realised: Realised) -> Layout:
    return Layout(
        micro_batch_size=realised.micro_batch_size,
        dp_world_size=realised.dp_world_size,
        accumulation_steps=realised.accumulation_steps,
    )


def _same_batch(request: RecommendRequest, layout: KnownLayout | None) -> SameBatchOption | None:
    """The batch of now on other ranks, at the LR of now; None where it does not divide."""
    ranks = request.target_dp_world_size
    if ranks is None or (layout is not None and ranks == layout.dp_world_size):
        return None
    realised = fit_layout(request, target=request.global_batch_size, layout=layout)
    if realised is None or realised.global_batch_size != request.global_batch_size:
        return None
    return SameBatchOption(**_layout(realised).model_dump(), learning_rate=request.learning_rate)


def _plan(request: RecommendRequest, layout: KnownLayout | None) -> PlannedChange | None:
    target = request.target_global_batch_size
    if target is None:
        return None
    scale = request.noise_scale
    raising = target >= request.global_batch_size
    known = scale.lower if raising or scale.upper is None else scale.upper
    change = BatchChange(before=request.global_batch_size, after=target, noise_scale=known)
    realised = fit_layout(request, target=target, layout=layout)
    exact = realised is not None and realised.global_batch_size == target
    rate = learning_rate_for(request, change)
    rules = request.learning_rate and learning_rates(learning_rate=request.learning_rate, change=change)
    return PlannedChange.model_validate(
        {
            "global_batch_size": size(target),
            "learning_rate": rate,
            "learning_rate_now": request.learning_rate,
            "layout": _layout(realised) if realised is not None and exact else None,
            "rules": rules or None,
            "chosen_rule": _chosen_rule(request, raising=raising) if rate is not None else None,
            "ramp_steps": ramp_steps(optimizer=request.optimizer, beta2=request.beta2),
            "within_noise_scale": target <= scale.lower,
            **_change_fields(request, change),
        }
    )


def _instead_of_decay(request: RecommendRequest) -> BatchInsteadOfDecay | None:
    decay = request.planned_decay
    if decay is None or request.phase == "warmup" or request.measured_steps < CLEAN_STEPS:
        return None
    batch = batch_size_instead_of_decay(
        global_batch_size=request.global_batch_size,
        decay_factor=decay.factor,
        noise_scale_lower=request.noise_scale.lower,
    )
    if batch <= request.global_batch_size:
        return None
    noise = None
    if decay.dataset_size is not None and request.learning_rate is not None:
        noise = sgd_noise_scale(
            learning_rate=request.learning_rate,
            dataset_size=decay.dataset_size,
            global_batch_size=request.global_batch_size,
            momentum=request.momentum or 0.0,
        )
    return BatchInsteadOfDecay(
        global_batch_size=size(batch),
        learning_rate=request.learning_rate,
        factor=batch / request.global_batch_size,
        limited_by_noise_scale=batch < request.global_batch_size * decay.factor,
        sgd_noise_scale=noise,
    )


def _confidence(request: RecommendRequest, decision: Decision) -> tuple[Confidence, list[str]]:
    if decision.reason in ("lr_warmup", "too_few_steps", "signal_not_detected"):
        return "none", ["there is not the evidence yet that advice needs"]
    scale = request.noise_scale
    rule = OPTIMIZER_RULES[request.optimizer]
    doubts: list[str] = []
    if decision.reason == "not_enough_evidence":
        doubts.append("the interval is too wide to tell, or lies across an edge of the band")
    if decision.action != "hold" and rule.confidence == "low":
        doubts.append(f"for this optimizer ({request.optimizer}): {rule.source}")
    if scale.upper is None:
        doubts.append("the noise scale is bounded from below only")
    elif scale.lower > 0 and scale.upper > 4 * scale.lower:
        doubts.append("the interval is more than a factor 4 wide")
    if MATCHING_GEOMETRY.get(request.optimizer, "euclidean") != scale.geometry:
        doubts.append(
            f"the {scale.geometry} noise scale is not the one that fits {request.optimizer}'s steps"
        )
    if request.batch_unit == "tokens" and request.optimizer in ("adam", "adamw"):
        doubts.append(
            "a language model under Adam: there the noise scale was found to underestimate the critical "
            "batch size by orders of magnitude (Merrill et al. 2025, arXiv 2505.23971)"
        )
    if doubts:
        return "low", doubts
    return "medium", ["the noise scale is an order-of-magnitude proxy for the critical batch size"]


def _facts(request: RecommendRequest, layout: KnownLayout | None) -> dict[str, int | float | str]:
    facts: dict[str, int | float | str] = {"global_batch_size": size(request.global_batch_size)}
    if layout is not None:
        facts |= {
            "local_batch_size": size(layout.micro_batch_size * layout.accumulation_steps),
            "micro_batch_size": size(layout.micro_batch_size),
            "dp_world_size": layout.dp_world_size,
            "accumulation_steps": layout.accumulation_steps,
        }
    if request.loss_reduction is not None:
        facts["loss_reduction"] = request.loss_reduction
    return facts


def _assumed(request: RecommendRequest, layout: KnownLayout | None) -> list[str]:
    assumed: list[str] = []
    if request.loss_reduction is None:
        assumed.append("the loss is a mean over each rank's batch, which DDP averages (not reported)")
    if request.max_micro_batch_size is None and layout is not None:
        assumed.append(
            f"no more than {layout.micro_batch_size:g} per micro-batch fits in memory (not reported)"
        )
    if request.beta2 is None and request.optimizer in ("adam", "adamw", "lamb"):
        assumed.append(f"beta2 = {DEFAULT_BETA2:g} (not reported)")
    if request.optimizer == "other":
        assumed.append("no learning-rate rule (the optimizer is not reported, or none is known for it)")
    return assumed
