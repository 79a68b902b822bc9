"""A recommendation in a few plain sentences a person can check, with its formula and sources."""

from noisescale.advice import Recommendation, RecommendRequest
from noisescale.decide import CLEAN_STEPS, Decision
from noisescale.rules import OPTIMIZER_RULES
from noisescale.wire import OptimizerFamily

NOISE_SCALE_SOURCE = "McCandlish et al. 2018 (arXiv 1812.06162): the gradient noise scale B_simple, eq 2.9"
INTERVAL_SOURCE = "Fieller 1954: the interval of a ratio of two means"
CRITIC_SOURCE = (
    "Shallue et al. 2018 (arXiv 1811.03600): no learning-rate heuristic is reliable; "
    "Merrill et al. 2025 (arXiv 2505.23971)"
)
DECAY_SOURCE = "Smith et al. 2018 (arXiv 1711.00489): do not decay the learning rate, increase the batch size"
TIMESCALE_SOURCE = (
    "Bergsma et al. 2025 (arXiv 2505.13738): weight decay and AdamW's timescale B/(eta lambda D)"
)
BETAS_SOURCE = "Malladi et al. 2022 (arXiv 2205.10287): Adam's square-root rule and its betas"
PROXY = (
    "The noise scale is an order-of-magnitude proxy for the critical batch size (measured ratios "
    "run from 0.05 to 8), and none of this says anything about generalisation."
)


def number(value: float) -> str:
    """A number as people write it: four figures, thousands marked."""
    if value >= 1000:
        return f"{float(f'{value:.4g}'):,.0f}"
    return f"{value:.4g}"


def exact(value: float) -> str:
    """A batch size or a count: a whole one is written to the last figure."""
    return f"{value:,.0f}" if value == int(value) else number(value)


def formula_of(optimizer: OptimizerFamily) -> str:
    """The learning-rate rule that is advised for an optimizer."""
    exponent = OPTIMIZER_RULES[optimizer].exponent
    if exponent is None:
        return "none: no learning-rate rule is known for this optimizer"
    power = "" if exponent == 1 else f"^{exponent:g}"
    return (
        f"learning_rate x (k min(1, E)){power}, k = B1/B0, E = (B0 + Bn)/(B1 + Bn), Bn = the noise scale's "
        f"lower end on a raise, upper end on a lowering"
    )


def sources_of(request: RecommendRequest, decision: Decision) -> list[str]:
    """Where what is said comes from."""
    sources = [NOISE_SCALE_SOURCE, INTERVAL_SOURCE]
    if decision.action != "hold" or request.target_global_batch_size is not None:
        sources.append(OPTIMIZER_RULES[request.optimizer].source)
        if request.optimizer == "adamw" and request.weight_decay:
            sources.append(TIMESCALE_SOURCE)
        if request.optimizer in ("adam", "adamw") and request.beta1 is not None:
            sources.append(BETAS_SOURCE)
    if request.planned_decay is not None:
        sources.append(DECAY_SOURCE)
    sources.append(CRITIC_SOURCE)
    return sources


def explain(request: RecommendRequest, decision: Decision, answer: Recommendation) -> str:
    """Everything that matters of the answer, in the order a reader wants it."""
    return " ".join(
        sentence
        for sentence in (
            _verdict(request, decision, answer),
            _measured(request),
            _reason(request, decision, answer),
            _cost(answer),
            _realisation(request, decision, answer),
            _rate(request, decision, answer),
            _same_batch(answer),
            _plan(answer),
            _decay(answer),
            PROXY,
        )
        if sentence
    )


def _verdict(request: RecommendRequest, decision: Decision, answer: Recommendation) -> str:
    unit = request.batch_unit
    before, after = exact(request.global_batch_size), exact(decision.global_batch_size)
    old, new = request.learning_rate, decision.learning_rate
    if decision.action == "hold":
        return f"Keep the global batch of {before} {unit}" + (
            f" and the learning rate of {number(old)}." if old is not None else "."
        )
    if decision.action == "lr_only":
        return (
            f"Keep the global batch of {before} {unit}, and move the learning rate from "
            f"{number(old or 0)} to {number(new or 0)} first."
        )
    batch = f"{decision.action.capitalize()} the global batch from {before} to {after} {unit}"
    if old is None:
        return f"{batch}. No learning rate was reported, so none is advised."
    if new is None:
        return (
            f"{batch}. No learning-rate rule is known for this optimizer, so tune the learning rate "
            f"(now {number(old)}) at the new batch."
        )
    if decision.rate_held:
        return (
            f"{batch}, and leave the learning rate at its schedule ({number(old)} now): it is being "
            f"decayed, and is not raised during that."
        )
    return f"{batch}, and move the learning rate from {number(old)} to {number(new)}."


def _measured(request: RecommendRequest) -> str:
    scale, unit = request.noise_scale, request.batch_unit
    which = "gradient noise scale" if scale.geometry == "euclidean" else f"{scale.geometry} noise scale"
    steps = f"{number(request.measured_steps)} measured steps"
    if scale.lower <= 0 and scale.upper is None:
        return f"The {which} is not told from the noise of measuring it yet ({steps})."
    if scale.upper is None:
        return (
            f"The {which} is at least {number(scale.lower)} {unit} (95%, {steps}); no upper end can be given."
        )
    middle = f"{number(scale.value)} {unit}, " if scale.value is not None else ""
    return f"The {which} is {middle}95% interval {number(scale.lower)} to {number(scale.upper)} ({steps})."


def _reason(request: RecommendRequest, decision: Decision, answer: Recommendation) -> str:
    batch, scale = request.global_batch_size, request.noise_scale
    match decision.reason:
        case "lr_warmup":
            return "The learning rate is warming up, and the noise scale moves with it: ask again after that."
        case "too_few_steps":
            return (
                f"Advice needs {CLEAN_STEPS} measured steps since the last change of learning rate or batch; "
                f"there are {request.measured_steps}."
            )
        case "signal_not_detected":
            return (
                "The interval has no positive lower end, so nothing can be said of the batch; measure more "
                "steps, and check that every rank gets different data."
            )
        case "lr_off_rule":
            low, high = decision.rule_band or (0.0, 0.0)
            tuned = request.tuned
            base = f" ({number(tuned.learning_rate)} at {exact(tuned.global_batch_size)})" if tuned else ""
            return (
                f"The rules carry the tuned base{base} to {number(low)} to {number(high)} at this batch, and "
                f"the present rate is more than 2x outside. A wrong learning rate biases the noise scale "
                f"itself, so this comes first, by at most 2x; then measure again."
            )
        case "below_noise_scale":
            return (
                f"Even its lower end is {number(scale.lower / batch)} times the batch: steps are mostly "
                f"noise, and a bigger batch still pays."
            )
        case "above_noise_scale":
            return (
                f"Even its upper end is {number((scale.upper or 0) / batch)} of the batch: much of each step "
                f"repeats what a smaller batch would say."
            )
        case "in_band":
            return "The whole interval is within a factor 2 of the batch: there is little to gain either way."
        case "change_too_small":
            return "The batch that fits would be a change of less than 1.25x, which is not worth one."
        case "no_layout_fits":
            ranks = request.target_dp_world_size or request.dp_world_size
            return f"No layout on {ranks} ranks gives the batch that would be advised" + (
                ", as BatchNorm keeps the per-rank batch (SyncBatchNorm would free it)."
                if request.batch_norm
                else "."
            )
        case "not_enough_evidence":
            if answer.steps_needed is not None:
                return (
                    f"The interval is too wide to tell; about {number(answer.steps_needed)} measured steps "
                    f"in all would settle it."
                )
            if scale.upper is None:
                return (
                    "The lower end is not twice the batch, and there is no upper end yet: measure more steps."
                )
            if scale.upper <= batch / 2:
                return "It points to a smaller batch, but two halves of the window do not agree on it yet."
            return "The interval lies across the edge of the band in which nothing is to be gained."


def _cost(answer: Recommendation) -> str:
    if answer.steps_multiplier is None or answer.examples_multiplier is None:
        return ""
    return (
        f"The same progress then takes {number(answer.steps_multiplier)} times the steps and "
        f"{number(answer.examples_multiplier)} times the examples."
    )


def _realisation(request: RecommendRequest, decision: Decision, answer: Recommendation) -> str:
    if answer.layout is None:
        return ""
    layout = answer.layout
    kept = " (BatchNorm keeps the per-rank batch)" if request.batch_norm else ""
    return (
        f"Realise it as {layout.micro_batch_size} per micro-batch x {layout.dp_world_size} ranks x "
        f"{layout.accumulation_steps} accumulation step{'s' if layout.accumulation_steps > 1 else ''}{kept}."
    )


def _rate(request: RecommendRequest, decision: Decision, answer: Recommendation) -> str:
    if decision.action == "hold" or decision.learning_rate is None or decision.rate_held:
        return ""
    steps = number(answer.ramp_steps or 1)
    ramped = f"Ramp the learning rate linearly over {steps} steps, discard what was measured before"
    after = (
        ", and change again only if the loss at equal examples is within 0.01 of the extrapolated curve."
        if decision.action == "raise"
        else ", and measure again."
    )
    decay = ""
    if answer.weight_decay_same_timescale is not None:
        decay = (
            f" Keep the weight decay, or set it to {number(answer.weight_decay_same_timescale)} to hold "
            f"AdamW's averaging timescale."
        )
    return ramped + after + decay


def _same_batch(answer: Recommendation) -> str:
    option = answer.same_batch_option
    if option is None:
        return ""
    return (
        f"Or keep the batch on the new ranks, {option.micro_batch_size} x {option.dp_world_size} x "
        f"{option.accumulation_steps}: the gradient is the same, so the learning rate is too."
    )


def _plan(answer: Recommendation) -> str:
    plan = answer.plan
    if plan is None:
        return ""
    rate = f" the rule gives a learning rate of {number(plan.learning_rate)}," if plan.learning_rate else ""
    cost = ""
    if plan.steps_multiplier is not None and plan.examples_multiplier is not None:
        cost = (
            f" {number(plan.steps_multiplier)} times the steps and "
            f"{number(plan.examples_multiplier)} times the examples"
        )
    beyond = (
        "" if plan.within_noise_scale else "; it is beyond the noise scale's lower end, so it may not pay"
    )
    return f"At the planned batch of {exact(plan.global_batch_size)},{rate}{cost}{beyond}."


def _decay(answer: Recommendation) -> str:
    instead = answer.batch_instead_of_decay
    if instead is None:
        return ""
    limit = ", which is as far as the noise scale supports" if instead.limited_by_noise_scale else ""
    return (
        f"Instead of the planned decay, the batch could go to {exact(instead.global_batch_size)} at an "
        f"unchanged learning rate{limit}."
    )
