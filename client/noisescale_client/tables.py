"""Runs and recommendations as tables a person reads in a terminal."""

import time
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from noisescale.advice import Layout, Recommendation
from noisescale.estimate import Estimate
from noisescale.explain import number
from noisescale.wire import RunDetail, RunSummary

PLAIN_WIDTH = 120
"""Columns used where the output is no terminal, so that a pipe gets whole lines."""

_STATE_STYLES = {"running": "green", "stale": "yellow", "ended": "dim"}
_ACTION_STYLES = {"raise": "bold green", "lower": "bold yellow", "lr_only": "bold yellow", "hold": "bold"}


def console_for(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or wide enough for the tables where there is none."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=stderr, highlight=False, width=PLAIN_WIDTH)
    return console


def interval_in_words(*, noise_scale: float | None, lower: float | None, upper: float | None) -> str:
    """A noise scale with its interval: "250 [210 to 303]", "at least 900", or "not known yet"."""
    if upper is None:
        return f"at least {number(lower)}" if lower else "not known yet"
    ends = f"[{number(lower or 0)} to {number(upper)}]"
    return f"{number(noise_scale)} {ends}" if noise_scale is not None else ends


def age_in_words(seconds: float) -> str:
    """How long ago, in the unit that fits: "12 s ago", "3 min ago", "5 h ago", "2 d ago"."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def runs_table(runs: Sequence[RunSummary]) -> RenderableType:
    """Every run, one a line."""
    table = _table(
        "run", "state", "step", "batch", "learning rate", "noise scale (95%)", "advice", "last report"
    )
    for run in runs:
        table.add_row(
            Text(run.run, style="bold"),
            Text(run.state, style=_STATE_STYLES[run.state]),
            _or_dash(run.last_step),
            _or_dash(run.global_batch_size),
            _or_dash(run.learning_rate),
            interval_in_words(noise_scale=run.noise_scale, lower=run.lower, upper=run.upper),
            _advice(run.action, run.reason),
            age_in_words(time.time() - run.last_report_at),
        )
    return table


def run_view(run: RunDetail) -> RenderableType:
    """One run: what it is, how far it is, and its noise scales."""
    info = run.info
    facts = _pairs(
        ("state", f"{run.state}, last report {age_in_words(time.time() - run.last_report_at)}"),
        ("attempts", str(len(run.attempts))),
        ("steps", f"{run.steps:,} ({run.measured_steps:,} measured)"),
        (run.batch_unit, f"{run.examples:,}"),
        ("skipped steps", f"{run.skipped_steps:,}"),
        ("dropped blocks", f"{run.dropped_blocks:,}"),
        ("global batch", f"{_or_dash(run.global_batch_size)} {run.batch_unit}"),
        ("layout", _layout_of_run(run)),
        ("learning rate", f"{_or_dash(run.learning_rate)} ({run.phase})"),
        ("optimizer", info.optimizer_name or info.optimizer or "-"),
        ("advice", f"{run.action or '-'} ({run.reason or '-'})"),
        ("labels", ", ".join(f"{key}={value}" for key, value in info.labels.items()) or "-"),
    )
    return Group(Text(run.run, style="bold"), Padding(facts, (0, 0, 1, 2)), _estimates(run.estimates))


def recommendation_view(answer: Recommendation, *, run: str | None = None) -> RenderableType:
    """Advice, its reasons, and the numbers behind it."""
    parts: list[RenderableType] = [
        Text.assemble(
            (f"{run}: " if run else "", "bold"),
            (answer.action, _ACTION_STYLES[answer.action]),
            f"  {answer.reason.replace('_', ' ')}, confidence {answer.confidence}",
        ),
        Padding(Text(answer.explanation), (1, 0, 1, 0)),
        Padding(_now_and_then(answer), (0, 0, 1, 0)),
    ]
    if answer.rules:
        rates = _table("rule", "learning rate", "")
        for rule, rate in answer.rules.items():
            chosen = rule == answer.chosen_rule
            rates.add_row(rule, number(rate), "advised" if chosen else "", style="bold" if chosen else None)
        parts.append(Padding(rates, (0, 0, 1, 0)))
    notes = _pairs(
        ("confidence", "; ".join([answer.confidence, *answer.confidence_reasons])),
        ("formula", answer.formula),
        ("assumed", "; ".join(answer.assumed) or "nothing"),
        ("sources", "\n".join(answer.sources)),
    )
    return Group(*parts, notes)


def _now_and_then(answer: Recommendation) -> Table:
    known = [answer.facts.get(key) for key in ("micro_batch_size", "dp_world_size", "accumulation_steps")]
    layout_now = " x ".join(_or_dash(fact) for fact in known) if any(known) else "-"
    efficiency = answer.sample_efficiency_now
    efficiency_now = f"{efficiency:.1%}" if efficiency is not None else "-"
    if efficiency is None and answer.sample_efficiency_now_at_least is not None:
        efficiency_now = f"at least {answer.sample_efficiency_now_at_least:.1%}"
    table = _table("", "now", "advised", *(["as planned"] if answer.plan else []))
    plan = answer.plan

    def row(label: str, now: str, then: str, planned: str) -> None:
        table.add_row(label, now, then, *([planned] if plan else []))

    row(
        f"global batch ({answer.batch_unit})",
        number(answer.global_batch_size_now),
        number(answer.global_batch_size),
        _or_dash(plan.global_batch_size if plan else None),
    )
    row(
        "learning rate",
        _or_dash(answer.learning_rate_now),
        _or_dash(answer.learning_rate),
        _or_dash(plan.learning_rate if plan else None),
    )
    row(
        "micro-batch x ranks x accumulation",
        layout_now,
        _layout(answer.layout),
        _layout(plan.layout if plan else None),
    )
    then = answer.sample_efficiency_then
    row("useful share of each example", efficiency_now, f"{then:.1%}" if then is not None else "-", "-")
    row(
        "steps to the same progress",
        "x 1",
        _times(answer.steps_multiplier),
        _times(plan.steps_multiplier if plan else None),
    )
    row(
        "examples to the same progress",
        "x 1",
        _times(answer.examples_multiplier),
        _times(plan.examples_multiplier if plan else None),
    )
    return table


def _estimates(estimates: Sequence[Estimate]) -> Table:
    table = _table("group", "geometry", "noise scale (95%)", "tr(Sigma)", "|G|^2", "steps")
    for found in estimates:
        table.add_row(
            found.group,
            found.geometry,
            interval_in_words(noise_scale=found.noise_scale, lower=found.lower, upper=found.upper),
            _scientific(found.trace_covariance),
            _scientific(found.true_grad_sq_norm),
            f"{found.measured_steps:,}",
        )
    return table


def _layout_of_run(run: RunDetail) -> str:
    info = run.info
    return (
        f"{_or_dash(info.micro_batch_size)} per micro-batch x {_or_dash(info.dp_world_size)} ranks x "
        f"{_or_dash(info.accumulation_steps)} accumulation"
    )


def _layout(layout: Layout | None) -> str:
    if layout is None:
        return "-"
    return f"{layout.micro_batch_size} x {layout.dp_world_size} x {layout.accumulation_steps}"


def _advice(action: str | None, reason: str | None) -> Text:
    if action is None:
        return Text("-")
    words = f"{action} ({reason.replace('_', ' ')})" if reason else action
    return Text(words, style=_ACTION_STYLES.get(action, ""))


def _times(multiplier: float | None) -> str:
    return "-" if multiplier is None else f"x {number(multiplier)}"


def _scientific(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _or_dash(value: float | str | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else number(value)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _pairs(*pairs: tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in pairs:
        table.add_row(label, Text(value))
    return table
