"""The gates: what to do with the batch and the learning rate, in order, each hold with its reason."""

import math
from dataclasses import dataclass

from noisescale.advice import Action, Reason, RecommendRequest
from noisescale.layout import KnownLayout, Realised, realise
from noisescale.rules import OPTIMIZER_RULES, RULES, BatchChange, primary

CLEAN_STEPS = 200
"""Measured steps since the last change of LR or batch below which nothing is advised."""

BAND = 2.0
"""A batch within this factor of the noise scale is left alone."""

WORTHWHILE = 1.25
"""A change of the batch by less is not worth one."""

LARGEST_STEP = 2.0
"""The batch and the LR move by at most this at a time; then comes a new measurement."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do.

    Attributes:
        global_batch_size, learning_rate: Advised; those of now on a hold.
        at: The end of the noise-scale interval that the LR was computed at.
        layout: How the advised batch is realised; None on a hold or where no layout is known.
        rule_band: Of the LR audit.
        steps_needed: Of an interval that is too wide.
        rate_held: Whether the rule would have raised the LR and the running decay forbade it.
    """

    action: Action
    reason: Reason
    global_batch_size: float
    learning_rate: float | None
    at: float | None = None
    layout: Realised | None = None
    rule_band: tuple[float, float] | None = None
    steps_needed: int | None = None
    rate_held: bool = False


def decide(request: RecommendRequest, *, layout: KnownLayout | None) -> Decision:
    """Go through the gates.

    Args:
        layout: Of now, as far as it is known.
    """
    batch = request.global_batch_size
    lower, upper = request.noise_scale.lower, request.noise_scale.upper
    if request.phase == "warmup":
        return _hold(request, "lr_warmup")
    if request.measured_steps < CLEAN_STEPS:
        return _hold(request, "too_few_steps")
    if not lower > 0:
        return _hold(request, "signal_not_detected")
    audit = _audit(request)
    if audit is not None:
        return audit
    if lower >= BAND * batch:
        return _change(request, target=min(LARGEST_STEP * batch, lower), at=lower, layout=layout)
    if upper is not None and request.noise_scale.upper_confirmed and upper <= batch / BAND:
        return _change(request, target=max(batch / LARGEST_STEP, upper), at=upper, layout=layout)
    if upper is not None and lower >= batch / BAND and upper <= batch * BAND:
        return _hold(request, "in_band")
    return _hold(request, "not_enough_evidence", steps_needed=_steps_needed(request))


def learning_rate_for(request: RecommendRequest, change: BatchChange) -> float | None:
    """The LR by the optimizer's primary rule; None where no LR or no rule is known."""
    exponent = OPTIMIZER_RULES[request.optimizer].exponent
    if exponent is None or request.learning_rate is None:
        return None
    return request.learning_rate * primary(change, exponent=exponent)


def fit_layout(request: RecommendRequest, *, target: float, layout: KnownLayout | None) -> Realised | None:
    """The layout of at most `target` on the ranks there will be; None where none fits or is known."""
    ranks = request.target_dp_world_size or (layout.dp_world_size if layout else None)
    if ranks is None:
        return None
    micro = layout.micro_batch_size if layout else None
    largest = request.max_micro_batch_size or (math.ceil(micro) if micro is not None else None)
    if largest is None:
        return None
    fixed = round(micro) if request.batch_norm and micro is not None else None
    return realise(
        target=target, dp_world_size=ranks, max_micro_batch_size=largest, fixed_micro_batch_size=fixed
    )


def _hold(request: RecommendRequest, reason: Reason, *, steps_needed: int | None = None) -> Decision:
    return Decision(
        action="hold",
        reason=reason,
        global_batch_size=request.global_batch_size,
        learning_rate=request.learning_rate,
        steps_needed=steps_needed,
    )


def _audit(request: RecommendRequest) -> Decision | None:
    """Gate 4: an LR more than 2x outside what the rules make of the tuned one is set right first.

    A wrong LR biases the noise scale itself. During a decay the LR is low on purpose: no audit.
    """
    rule = OPTIMIZER_RULES[request.optimizer]
    tuned, rate = request.tuned, request.learning_rate
    if tuned is None or rate is None or rule.rule is None or rule.plain_rule is None:
        return None
    if request.phase == "lr_decay":
        return None
    lower = request.noise_scale.lower
    change = BatchChange(before=tuned.global_batch_size, after=request.global_batch_size, noise_scale=lower)
    low, high = sorted(tuned.learning_rate * RULES[name](change) for name in (rule.rule, rule.plain_rule))
    if rate < low / LARGEST_STEP:
        advised = min(rate * LARGEST_STEP, low)
    elif rate > high * LARGEST_STEP:
        advised = max(rate / LARGEST_STEP, high)
    else:
        return None
    return Decision(
        action="lr_only",
        reason="lr_off_rule",
        global_batch_size=request.global_batch_size,
        learning_rate=advised,
        at=lower,
        rule_band=(low, high),
    )


def _change(request: RecommendRequest, *, target: float, at: float, layout: KnownLayout | None) -> Decision:
    batch = request.global_batch_size
    realised = fit_layout(request, target=target, layout=layout)
    if realised is None:
        if layout is not None or request.target_dp_world_size is not None:
            return _hold(request, "no_layout_fits")
        advised = float(math.floor(target)) if target >= 1 else target
    else:
        advised = float(realised.global_batch_size)
    raising = target > batch
    ratio = advised / batch if raising else batch / advised
    if ratio < WORTHWHILE:
        return _hold(request, "change_too_small")
    rate = learning_rate_for(request, BatchChange(before=batch, after=advised, noise_scale=at))
    now = request.learning_rate
    rate_held = request.phase == "lr_decay" and rate is not None and now is not None and rate > now
    return Decision(
        action="raise" if raising else "lower",
        reason="below_noise_scale" if raising else "above_noise_scale",
        global_batch_size=advised,
        learning_rate=now if rate_held else rate,
        at=at,
        layout=realised,
        rate_held=rate_held,
    )


def _steps_needed(request: RecommendRequest) -> int | None:
    """Measured steps after which the interval would be a factor 4 wide, so that it settles the matter.

    An interval narrows with the square root of the steps: n (ln(hi/lo) / ln 4)^2. None where it
    has no upper end, or is as narrow as that and lies across an edge of the band.
    """
    scale = request.noise_scale
    if scale.upper is None:
        return None
    needed = math.ceil(
        request.measured_steps * ((math.log(scale.upper) - math.log(scale.lower)) / math.log(4)) ** 2
    )
    return needed if needed > request.measured_steps else None
