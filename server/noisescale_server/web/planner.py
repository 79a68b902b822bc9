"""The what-if planner: an address, a question to /recommend, and its answer as the page shows it.

The address carries the whole state. Numbers that a run reported are left out of it, so that the
plan follows the run; those that are in it override what the run reported. All arithmetic is
noisescale.recommend's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, FiniteFloat, ValidationError

from noisescale.advice import NoiseScaleInterval, Recommendation, RecommendRequest
from noisescale.blocks import TOTAL, BatchUnit
from noisescale.errors import NoiseScaleError
from noisescale.recommend import MATCHING_GEOMETRY, interval_of, recommend
from noisescale.wire import OptimizerFamily, PositiveFloat, PositiveInt, RunInfo
from noisescale_server.standing import Standing
from noisescale_server.web.charts import Curve, curve_of
from noisescale_server.web.rule_rows import RuleRow, rule_rows

UNREPORTED_STEPS = 1000
"""Measured steps that are supposed where no run says; advice needs 200."""

OPTIMIZERS: dict[OptimizerFamily, str] = {
    "sgd": "SGD, momentum",
    "adam": "Adam",
    "adamw": "AdamW",
    "lamb": "LAMB",
    "lars": "LARS",
    "sign": "Sign, Signum",
    "lion": "Lion",
    "muon": "Muon",
    "other": "another one",
}


def _blank(value: object) -> object:
    """An empty field of a form is one that is not given; spaces and thousands' commas are allowed."""
    if isinstance(value, str):
        return value.strip().replace(",", "") or None
    return value


Size = Annotated[PositiveFloat | None, BeforeValidator(_blank)]
Number = Annotated[PositiveInt | None, BeforeValidator(_blank)]
Lower = Annotated[Annotated[FiniteFloat, Field(ge=0)] | None, BeforeValidator(_blank)]


class PlanQuery(BaseModel):
    """What the address says.

    Attributes:
        run: Whose numbers are taken where none are given.
        target_dp_world_size, target_micro_batch_size, target_accumulation_steps: The layout planned.
        remaining_steps: Steps that the run has still to do at the batch of now.
    """

    run: str | None = None
    target_dp_world_size: Number = None
    target_micro_batch_size: Number = None
    target_accumulation_steps: Number = None
    max_micro_batch_size: Number = None
    optimizer: Annotated[OptimizerFamily | None, BeforeValidator(_blank)] = None
    global_batch_size: Size = None
    learning_rate: Size = None
    noise_scale: Size = None
    noise_scale_lower: Lower = None
    noise_scale_upper: Size = None
    remaining_steps: Number = None


@dataclass(frozen=True, slots=True)
class Base:
    """Where a run is now, as far as it is known: what the form shows before anything is typed."""

    question: dict[str, Any]
    info: RunInfo
    standing: Standing | None

    @property
    def layout(self) -> tuple[int | None, int | None, int | None]:
        """Ranks, micro-batch and accumulation."""
        micro = self.question.get("micro_batch_size")
        whole = int(micro) if micro is not None and micro == int(micro) else None
        return self.question.get("dp_world_size"), whole, self.question.get("accumulation_steps")


@dataclass(frozen=True, slots=True)
class Preset:
    """A plan to try, as changes of the address."""

    label: str
    query: dict[str, int]


@dataclass(frozen=True, slots=True)
class Planned:
    """The answer.

    Attributes:
        request: What POST /recommend would be asked.
        answer: What it answers.
        layout: Ranks, micro-batch, accumulation of the plan.
        warnings: What stands against it.
        remaining_steps: Of the run as planned; None where none were given.
    """

    request: RecommendRequest
    answer: Recommendation
    layout: tuple[int, int, int]
    warnings: list[str]
    curve: Curve | None
    remaining_steps: float | None
    remaining_examples: float | None

    @property
    def effective(self) -> dict[str, str]:
        """What was taken for fields that follow others."""
        scale = self.request.noise_scale
        ends = {
            "noise_scale": scale.value,
            "noise_scale_lower": scale.lower,
            "noise_scale_upper": scale.upper,
        }
        return {name: _typed(value) for name, value in ends.items()}

    @property
    def body(self) -> str:
        """The request as JSON, without what is its default."""
        return self.request.model_dump_json(exclude_defaults=True)


@dataclass(frozen=True, slots=True)
class PlanView:
    """The form and its answer.

    Attributes:
        values: What each field shows.
        defaults: What it shows when the address does not say.
        errors: What is wrong with a field, by its name; "" is the whole.
    """

    run: str | None
    values: dict[str, str]
    defaults: dict[str, str]
    errors: dict[str, str]
    planned: Planned | None
    presets: list[Preset]
    batch_unit: BatchUnit

    @property
    def rules(self) -> list[RuleRow]:
        """Every rule's learning rate for the plan."""
        return rule_rows(self.planned.answer.plan if self.planned else None)


def base_of_run(standing: Standing, info: RunInfo) -> Base:
    """A run's own numbers."""
    advice = standing.recommendation
    question: dict[str, Any] = {"measured_steps": 0, "batch_unit": "examples", "phase": standing.phase}
    if advice is not None:
        facts = advice.facts
        question |= {
            "noise_scale": advice.noise_scale,
            "measured_steps": advice.measured_steps,
            "batch_unit": advice.batch_unit,
            "global_batch_size": float(advice.global_batch_size_now),
            "learning_rate": advice.learning_rate_now,
            "dp_world_size": facts.get("dp_world_size"),
            "micro_batch_size": facts.get("micro_batch_size"),
            "accumulation_steps": facts.get("accumulation_steps"),
        }
    reported = ("max_micro_batch_size", "momentum", "beta1", "beta2", "epsilon", "weight_decay", "tuned")
    question |= {name: getattr(info, name) for name in (*reported, "loss_reduction")}
    question |= {"batch_norm": info.batch_norm or False, "optimizer": info.optimizer or "other"}
    return Base(question, info, standing)


def base_without_run() -> Base:
    """An example to change: no run is needed."""
    question: dict[str, Any] = {
        "noise_scale": NoiseScaleInterval(value=2000, lower=1600, upper=2500),
        "measured_steps": UNREPORTED_STEPS,
        "batch_unit": "examples",
        "global_batch_size": 256.0,
        "learning_rate": 0.1,
        "optimizer": "sgd",
        "dp_world_size": 8,
        "micro_batch_size": 32,
        "accumulation_steps": 1,
    }
    return Base(question, RunInfo(), None)


def plan(raw: Mapping[str, str], base: Base) -> PlanView:
    """Answer an address.

    Args:
        raw: Its parameters, as typed.
        base: What they override.
    """
    defaults = _defaults(base)
    values = {name: raw.get(name, default) for name, default in defaults.items()}
    errors: dict[str, str] = {}
    planned: Planned | None = None
    try:
        planned = _answer(PlanQuery.model_validate(dict(raw)), base)
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_context=False, include_input=False):
            name = str(problem["loc"][0]) if problem["loc"] else ""
            name = name if name in defaults else "noise_scale" if name == "noise_scale" else ""
            errors.setdefault(name, problem["msg"].removeprefix("Value error, "))
    except NoiseScaleError as error:
        errors[""] = str(error)
    if planned is not None:
        values |= {name: value for name, value in planned.effective.items() if name not in raw}
    return PlanView(
        run=raw.get("run"),
        values=values,
        defaults=defaults,
        errors=errors,
        planned=planned,
        presets=_presets(base, planned),
        batch_unit=base.question["batch_unit"],
    )


def _defaults(base: Base) -> dict[str, str]:
    """What each field shows while the address says nothing of it."""
    scale: NoiseScaleInterval | None = base.question.get("noise_scale")
    ranks, micro, accumulation = base.layout
    known: dict[str, object] = {
        "target_dp_world_size": ranks,
        "target_micro_batch_size": micro,
        "target_accumulation_steps": accumulation,
        "max_micro_batch_size": base.question.get("max_micro_batch_size"),
        "optimizer": base.question["optimizer"],
        "global_batch_size": base.question.get("global_batch_size"),
        "learning_rate": base.question.get("learning_rate"),
        "noise_scale": scale.value if scale else None,
        "noise_scale_lower": scale.lower if scale else None,
        "noise_scale_upper": scale.upper if scale else None,
        "remaining_steps": None,
    }
    return {name: _typed(value) for name, value in known.items()}


def _typed(value: object) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _answer(query: PlanQuery, base: Base) -> Planned | None:
    """None while there is no batch or no layout to plan with."""
    question = dict(base.question)
    if query.optimizer is not None:
        question["optimizer"] = query.optimizer
        question["noise_scale"] = _fitting(base, query.optimizer) or question.get("noise_scale")
    question["noise_scale"] = _noise_scale(query, question.get("noise_scale"))
    if question["noise_scale"] is not None and "noise_scale_lower" in query.model_fields_set:
        question["measured_steps"] = max(UNREPORTED_STEPS, question["measured_steps"])
    for name in ("learning_rate", "max_micro_batch_size"):
        question[name] = getattr(query, name) or question.get(name)
    if query.global_batch_size is not None and query.global_batch_size != question.get("global_batch_size"):
        # The reported layout was that of another batch.
        question |= {"global_batch_size": query.global_batch_size, "micro_batch_size": None}
        question["accumulation_steps"] = None
    ranks, micro, accumulation = (
        getattr(query, f"target_{name}") or reported
        for name, reported in zip(
            ("dp_world_size", "micro_batch_size", "accumulation_steps"), base.layout, strict=True
        )
    )
    if ranks is None or micro is None or accumulation is None:
        return None
    if question["noise_scale"] is None or question.get("global_batch_size") is None:
        return None
    target = ranks * micro * accumulation
    question |= {"target_dp_world_size": ranks, "target_global_batch_size": target}
    request = RecommendRequest.model_validate(question)
    answer = recommend(request)
    change = answer.plan
    steps = query.remaining_steps
    return Planned(
        request=request,
        answer=answer,
        layout=(ranks, micro, accumulation),
        warnings=_warnings(request, answer, micro=micro),
        curve=curve_of(request.noise_scale, now=request.global_batch_size, then=target),
        remaining_steps=steps * change.steps_multiplier
        if steps and change and change.steps_multiplier is not None
        else None,
        remaining_examples=steps * request.global_batch_size * change.examples_multiplier
        if steps and change and change.examples_multiplier is not None
        else None,
    )


def _noise_scale(query: PlanQuery, known: NoiseScaleInterval | None) -> NoiseScaleInterval | None:
    given = {"noise_scale": "value", "noise_scale_lower": "lower", "noise_scale_upper": "upper"}
    typed = {end: getattr(query, name) for name, end in given.items() if name in query.model_fields_set}
    if not typed:
        return known
    merged = (known.model_dump() if known else {"lower": 0.0}) | typed
    if known and known.value and "value" in typed and len(typed) == 1:
        # The point alone was changed: the interval keeps its width in proportion.
        factor = (typed["value"] or known.value) / known.value
        merged |= {"lower": known.lower * factor, "upper": known.upper and known.upper * factor}
    merged["lower"] = merged["lower"] or 0.0
    return NoiseScaleInterval.model_validate(merged)


def _fitting(base: Base, optimizer: OptimizerFamily) -> NoiseScaleInterval | None:
    """The run's noise scale in another optimizer's geometry, where the run measured it."""
    if base.standing is None:
        return None
    wanted = MATCHING_GEOMETRY.get(optimizer, "euclidean")
    whole = {e.geometry: e for e in base.standing.estimates if e.group == TOTAL}
    found = whole.get(wanted) or whole.get("euclidean")
    return interval_of(found) if found is not None else None


def _warnings(request: RecommendRequest, answer: Recommendation, *, micro: int) -> list[str]:
    found: list[str] = []
    limit = request.max_micro_batch_size
    if limit is not None and micro > limit:
        found.append(f"{micro} per micro-batch does not fit: the memory limit is {limit}")
    if request.batch_norm and request.micro_batch_size and micro != request.micro_batch_size:
        found.append("BatchNorm's statistics depend on the micro-batch: keep it, or use SyncBatchNorm")
    if answer.plan and not answer.plan.within_noise_scale:
        found.append("beyond the noise scale's lower end: a batch this big may not pay")
    return found


def _presets(base: Base, planned: Planned | None) -> list[Preset]:
    """Plans that people ask for: the advice, and more ranks."""
    ranks, micro, accumulation = base.layout
    if not (ranks and micro and accumulation):
        return []
    names = ("target_dp_world_size", "target_micro_batch_size", "target_accumulation_steps")

    def preset(label: str, *layout: int) -> Preset:
        return Preset(label, dict(zip(names, layout, strict=True)))

    found = [preset("As it is", ranks, micro, accumulation)]
    if planned and planned.answer.layout and planned.answer.action in ("raise", "lower"):
        advised = planned.answer.layout
        found.append(
            preset("The advice", advised.dp_world_size, advised.micro_batch_size, advised.accumulation_steps)
        )
    found.append(preset("2× the ranks", 2 * ranks, micro, accumulation))
    found.append(preset("8× the ranks", 8 * ranks, micro, accumulation))
    if micro % 2 == 0:
        found.append(preset("2× the ranks, same batch", 2 * ranks, micro // 2, accumulation))
    return found
