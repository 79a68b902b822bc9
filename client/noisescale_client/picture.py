"""A run's noise scale over its steps, as a picture. The only module that imports matplotlib."""

import math
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from noisescale.advice import Recommendation
from noisescale.wire import Series, SeriesPoint

INK = "#1b1f24"
QUIET = "#6b7280"
GRID = "#e5e7eb"
NOISE = "#2563eb"
BATCH = "#d97706"
ADVICE = "#059669"

SIZE_INCHES = (10.0, 5.6)
DOTS_PER_INCH = 150


def save_picture(series: Series, answer: Recommendation, path: Path) -> None:
    """Draw noise scale, its interval, the batch and the advised batch, and save them as a PNG.

    Where the interval has no upper end it is drawn to the top of the picture, in a lighter shade.
    """
    with mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 11, "text.color": INK}):
        figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, facecolor="white")
        axes = figure.add_axes((0.075, 0.11, 0.745, 0.70))
        points = [point for point in series.points if point.lower > 0 or point.noise_scale is not None]
        bottom, top = _limits(points, answer)
        _frame(axes, series, bottom=bottom, top=top)
        _interval(axes, points, bottom=bottom, top=top)
        _batches(axes, series, answer)
        _labels(axes, points, answer)
        figure.text(0.075, 0.93, f"Gradient noise scale of {series.run}", fontsize=16, fontweight="bold")
        figure.text(0.075, 0.87, _summary(answer, unit=series.batch_unit), fontsize=11.5, color=QUIET)
        figure.savefig(path, metadata={"Title": f"Gradient noise scale of {series.run}"})


def _limits(points: list[SeriesPoint], answer: Recommendation) -> tuple[float, float]:
    ends: list[float] = [answer.global_batch_size_now, answer.global_batch_size]
    for point in points:
        ends += [end for end in (point.lower, point.noise_scale, point.upper) if end is not None and end > 0]
    # One early, hardly bounded interval must not press everything else flat.
    settled = [p.noise_scale for p in points if p.noise_scale is not None and p.upper is not None]
    if not settled:
        settled = [2 * p.lower for p in points if p.lower > 0]
    highest = min(max([*ends, *settled]), 2 * max([*ends[:2], *settled]))
    lowest = max(min(ends), min([*ends[:2], *settled]) / 4)
    return lowest / 1.6, highest * 1.6


def _frame(axes: Axes, series: Series, *, bottom: float, top: float) -> None:
    axes.set_yscale("log")
    axes.set_ylim(bottom, top)
    # Steps count from 0, so that after the last one there have been one more.
    axes.set_xlim(0, max([point.step + 1 for point in series.points], default=1))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(QUIET)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="both", which="both", length=0, colors=QUIET)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    )
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("optimizer step", color=QUIET)
    axes.set_title(
        f"{series.batch_unit} per step, log scale; the band is the 95% interval",
        loc="left",
        fontsize=10,
        color=QUIET,
        pad=8,
    )


def _interval(axes: Axes, points: list[SeriesPoint], *, bottom: float, top: float) -> None:
    steps = [point.step for point in points]
    lower = [max(bottom, point.lower) for point in points]
    bounded = [point.upper is not None for point in points]
    upper = [point.upper if point.upper is not None else top for point in points]
    axes.fill_between(steps, lower, upper, where=bounded, color=NOISE, alpha=0.18, linewidth=0)
    unbounded = [not one for one in bounded]
    axes.fill_between(steps, lower, upper, where=unbounded, color=NOISE, alpha=0.07, linewidth=0)
    # Without an upper end a value says nothing; it may be anything above the lower end.
    values = [
        point.noise_scale if point.noise_scale is not None and point.upper is not None else math.nan
        for point in points
    ]
    axes.plot(steps, values, color=NOISE, linewidth=2.2, solid_capstyle="round")


def _batches(axes: Axes, series: Series, answer: Recommendation) -> None:
    sized = [point for point in series.points if point.global_batch_size is not None]
    axes.plot(
        [point.step for point in sized],
        [point.global_batch_size or 0.0 for point in sized],
        color=BATCH,
        linewidth=2.2,
        drawstyle="steps-post",
    )
    if answer.global_batch_size != answer.global_batch_size_now:
        axes.axhline(answer.global_batch_size, color=ADVICE, linewidth=1.8, linestyle=(0, (4, 3)))


def _labels(axes: Axes, points: list[SeriesPoint], answer: Recommendation) -> None:
    """Names beside the lines' right ends, spread where they would overlap."""
    now, advised = answer.global_batch_size_now, answer.global_batch_size
    labels = [(float(now), f"batch now\n{_size(now)}", BATCH)]
    if advised != now:
        rate = f", LR {_short(answer.learning_rate)}" if answer.learning_rate is not None else ""
        labels.append((float(advised), f"advised batch\n{_size(advised)}{rate}", ADVICE))
    last = points[-1] if points else None
    if last is not None:
        value = last.noise_scale or last.lower
        labels.append((value, f"noise scale\n{_ends(last)}", NOISE))
    bottom, top = axes.get_ylim()
    lowest = 0.0
    for value, text, color in sorted(labels):
        height = min(1.0, max(lowest, _share(value, bottom=bottom, top=top)))
        axes.annotate(
            text,
            xy=(1.0, height),
            xytext=(8, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            va="center",
            color=color,
            fontsize=10.5,
            fontweight="bold",
            linespacing=1.35,
            annotation_clip=False,
        )
        lowest = height + (0.165 if text.count("\n") > 1 else 0.12)


def _share(value: float, *, bottom: float, top: float) -> float:
    """Where on the logarithmic axis, from 0 to 1."""
    return math.log(value / bottom) / math.log(top / bottom)


def _ends(point: SeriesPoint) -> str:
    if point.upper is None:
        return f"at least {_short(point.lower)}"
    return f"{_short(point.noise_scale or point.lower)}\n[{_short(point.lower)} to {_short(point.upper)}]"


def _summary(answer: Recommendation, *, unit: str) -> str:
    now, then = _size(answer.global_batch_size_now), _size(answer.global_batch_size)
    rates = ""
    if answer.learning_rate is not None and answer.learning_rate_now is not None:
        before, after = _short(answer.learning_rate_now), _short(answer.learning_rate)
        rates = f", and the learning rate from {before} to {after}"
    if answer.action in ("raise", "lower"):
        return f"Advice: {answer.action} the batch from {now} to {then} {unit}{rates}"
    if answer.action == "lr_only":
        return f"Advice: keep the batch of {now} {unit}{rates}"
    return f"Advice: hold the batch of {now} {unit} ({answer.reason.replace('_', ' ')})"


def _size(value: float) -> str:
    """A batch size: set by hand, so shown to the last figure."""
    return f"{value:,.0f}" if value == int(value) else _short(value)


def _short(value: float) -> str:
    """Three figures: enough to read off a picture."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"
