"""Words and numbers as people read them, in one place for all pages."""

from datetime import UTC, datetime
from typing import Any

from noisescale.advice import Action, NoiseScaleInterval, Reason
from noisescale.explain import exact, number

ACTIONS: dict[Action, str] = {"raise": "Raise", "lower": "Lower", "hold": "Hold", "lr_only": "Fix rate"}

REASONS: dict[Reason, str] = {
    "lr_warmup": "the learning rate is warming up",
    "too_few_steps": "too few steps measured yet",
    "signal_not_detected": "no signal told from noise yet",
    "lr_off_rule": "the learning rate is off the rule",
    "below_noise_scale": "batch well below the noise scale",
    "above_noise_scale": "batch well above the noise scale",
    "in_band": "batch is about right",
    "not_enough_evidence": "interval too wide to tell",
    "change_too_small": "change would be too small",
    "no_layout_fits": "no layout fits",
}

RULES: dict[str, tuple[str, str]] = {
    "linear": ("Linear", "k"),
    "noise_aware_sgd": ("Noise-aware, SGD", "k E"),
    "square_root": ("Square root", "√k"),
    "noise_aware_adam": ("Noise-aware, Adam", "√(k E)"),
    "surge": ("Surge (experimental)", "√k E"),
}
"""Each rule of noisescale.rules.RULES: its name, and its factor on the learning rate."""

GEOMETRIES: dict[str, str] = {
    "euclidean": "Euclidean (SGD)",
    "adam": "Adam",
    "sign": "Sign",
    "spectral": "Spectral (Muon)",
    "norm_layers": "Norm layers only",
}

PHASES: dict[str, str] = {"warmup": "warming up", "steady": "steady", "lr_decay": "decaying"}


def shown(value: float | None) -> str:
    """A number with four figures; a dash where there is none."""
    return "–" if value is None else number(value).replace("e-0", "e-")


def shown_exactly(value: float | None) -> str:
    """A batch size or a count; a dash where there is none."""
    return "–" if value is None else exact(value)


def interval(lower: float | None, upper: float | None) -> str:
    """Both ends, or the one that is known."""
    if not lower and upper is None:
        return "not known yet"
    if upper is None:
        return f"{number(lower or 0)} or more"
    return f"{number(lower or 0)} – {number(upper)}"


def interval_in(scale: NoiseScaleInterval | None) -> str:
    """Both ends of a noise scale, and which one it is where that is not the plain one."""
    if scale is None:
        return "not known yet"
    ends = interval(scale.lower, scale.upper)
    return ends if scale.geometry == "euclidean" else f"{ends} ({GEOMETRIES[scale.geometry].lower()})"


def times(value: float | None) -> str:
    """A factor."""
    return "–" if value is None else f"{number(value)}×"


def percent(value: float | None) -> str:
    """A share."""
    return "–" if value is None else f"{100 * value:.0f}%"


def ratio_of(noise_scale: float | None, batch: float | None) -> str:
    """How far a batch is from the noise scale."""
    if not noise_scale or noise_scale < 0 or not batch:
        return ""
    factor = noise_scale / batch
    if 0.8 < factor < 1.25:
        return "about the noise scale"
    return f"{factor:.2g}× below" if factor > 1 else f"{1 / factor:.2g}× above"


def iso(then: float) -> str:
    """A Unix time for a `datetime` attribute."""
    return datetime.fromtimestamp(then, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def clock(then: float) -> str:
    """A Unix time to read; the page's script says how long ago that is."""
    return datetime.fromtimestamp(then, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


FILTERS: dict[str, Any] = {
    "number": shown,
    "exact": shown_exactly,
    "interval": interval,
    "interval_in": interval_in,
    "times": times,
    "percent": percent,
    "clock": clock,
    "iso": iso,
}
