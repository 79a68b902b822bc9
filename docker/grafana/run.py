"""The Run dashboard: one run, its noise scale with the interval and the batch, and what to do."""

from grafana_foundation_sdk.builders import dashboard, stat, table, timeseries
from grafana_foundation_sdk.models import dashboard as models
from panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    WHOLE_MODEL,
    Annotation,
    action_code,
    action_names,
    base,
    fixed,
    joined_table,
    label_variable,
    lines,
    number,
    once,
    once_rate,
    per_run,
    query,
    states,
)

UID = "noisescale-run"
RUN = 'run_id="$run"'
WHOLE = f"{RUN}, {WHOLE_MODEL}"


def build() -> dashboard.Dashboard:
    """The dashboard, to be written as JSON."""
    board = base(
        "noisescale / Run",
        uid=UID,
        description="One training run: is its batch right, is its learning rate, and how sure is that.",
        variables=[
            label_variable(
                "run",
                label="Run",
                values_of="label_values(noisescale_last_report_timestamp_seconds, run_id)",
                multi=False,
                description="A run that reported within the chosen time range.",
            )
        ],
    )
    board = board.annotations([annotation.builder() for annotation in changes()])
    for panel in (
        *numbers(),
        noise_scale_panel(),
        advice_table(),
        states("Advice over time", action_code(RUN), "advice", description="What /recommend said.", height=4),
        learning_rate_panel(),
        lines(
            "Sample efficiency",
            [query(once("noisescale_sample_efficiency_ratio", RUN), "now")],
            description=(
                "Bn / (Bn + B): progress per example, relative to a very small batch. Doubling the batch "
                "at 0.5 saves a quarter of the steps."
            ),
            unit="percentunit",
        )
        .min(0)
        .max(1),
        lines(
            "tr(Σ) and |G|²",
            [
                query(once("noisescale_trace_covariance", WHOLE, dropping="geometry, group"), "tr(Σ)"),
                query(
                    once("noisescale_true_grad_sq_norm", WHOLE, dropping="geometry, group"), "|G|²", ref="B"
                ),
            ],
            description=(
                "The two averages whose ratio is the noise scale. |G|² may be negative while it is not "
                "significant: a log axis then leaves it out."
            ),
            unit="sci",
            log=True,
        ),
        lines(
            "Noise scale by layer group",
            [
                query(
                    once("noisescale_noise_scale", f'{RUN}, geometry="euclidean"', dropping="geometry"),
                    "{{group}}",
                )
            ],
            description=(
                "Groups that differ by much more than the interval may want learning rates of their own."
            ),
            log=True,
        ),
        lines(
            "Noise scale by geometry",
            [
                query(
                    once("noisescale_noise_scale", f'{RUN}, group="total"', dropping="group"), "{{geometry}}"
                )
            ],
            description=(
                "The optimizer's own geometry is the one to compare its batch with: euclidean for SGD, "
                "adam for Adam, sign for Lion, spectral for Muon."
            ),
            log=True,
        ),
        lines(
            "Throughput",
            [query(once_rate("noisescale_examples_total", RUN), "examples or tokens per second")],
            description="Over all ranks.",
            unit="short",
        ).min(0),
        lines(
            "Steps",
            [
                query(once_rate("noisescale_steps_total", RUN), "taken per second"),
                query(once_rate("noisescale_skipped_steps_total", RUN), "skipped per second", ref="B"),
            ],
            description="Skipped steps had a gradient that was not finite.",
            unit="short",
        )
        .override_by_name("skipped per second", [fixed(RED)])
        .min(0),
    ):
        board = board.with_panel(panel)
    return board


def numbers() -> list[stat.Panel]:
    """The first row: the number, its interval, the batch, the advice."""
    return [
        number(
            "Noise scale",
            once("noisescale_noise_scale", WHOLE),
            description=(
                "tr(Σ)/|G|² of the whole model, in examples or tokens. An order-of-magnitude proxy for "
                "the critical batch size."
            ),
        ),
        number(
            "Interval, lower end",
            once("noisescale_noise_scale_lower", WHOLE),
            description="The noise scale is above this, at 95%.",
        ),
        number(
            "Interval, upper end",
            once("noisescale_noise_scale_upper", WHOLE),
            description=(
                "The noise scale is below this, at 95%. Unbounded while |G|² is not significantly positive."
            ),
            no_value="unbounded",
        ),
        number(
            "Global batch",
            once("noisescale_global_batch_size", RUN),
            description="Over all ranks and accumulation, per optimizer step.",
            colour=ORANGE,
            unit="none",
        ),
        number(
            "Advice",
            action_code(RUN),
            description="What /recommend says; ask it for the reasons.",
            mappings=[action_names()],
            colour=GREY,
        ),
        number(
            "Last report",
            f"time() - {per_run('noisescale_last_report_timestamp_seconds', RUN)}",
            description="How long ago. A run that ended or fell silent leaves after a few minutes.",
            unit="s",
            decimals=0,
            colour=GREY,
        ),
    ]


def noise_scale_panel() -> timeseries.Panel:
    """The picture: the noise scale, its band, the batch, and the batch that is advised."""
    hidden_legend = models.DynamicConfigValue(
        id_val="custom.hideFrom", value={"legend": True, "tooltip": False, "viz": False}
    )
    edge = models.DynamicConfigValue(id_val="custom.lineWidth", value=1)
    stepped = models.DynamicConfigValue(id_val="custom.lineInterpolation", value="stepAfter")
    dashed = models.DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [8, 6]})
    return (
        lines(
            "Noise scale and batch",
            [
                query(once("noisescale_noise_scale_upper", WHOLE), "upper"),
                query(once("noisescale_noise_scale_lower", WHOLE), "lower", ref="B"),
                query(once("noisescale_noise_scale", WHOLE), "noise scale", ref="C"),
                query(once("noisescale_global_batch_size", RUN), "global batch", ref="D"),
                query(once("noisescale_recommended_batch_size", RUN), "recommended batch", ref="E"),
            ],
            description=(
                "The band is the 95% interval; where it is missing, the noise scale has no upper end yet "
                "and only the lower line holds. The batch is right while it lies within a factor of two "
                "of the band."
            ),
            width=24,
            height=12,
            log=True,
            axis_label="examples or tokens",
        )
        .override_by_name(
            "upper",
            [
                fixed(BLUE),
                edge,
                hidden_legend,
                models.DynamicConfigValue(id_val="custom.fillBelowTo", value="lower"),
                models.DynamicConfigValue(id_val="custom.fillOpacity", value=15),
            ],
        )
        .override_by_name("lower", [fixed(BLUE), edge, hidden_legend])
        .override_by_name("noise scale", [fixed(BLUE)])
        .override_by_name("global batch", [fixed(ORANGE), stepped])
        .override_by_name("recommended batch", [fixed(GREEN), stepped, dashed])
    )


def learning_rate_panel() -> timeseries.Panel:
    """The learning rate as it is and as it is advised."""
    dashed = models.DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [8, 6]})
    return (
        lines(
            "Learning rate",
            [
                query(once("noisescale_learning_rate", RUN), "now"),
                query(once("noisescale_recommended_learning_rate", RUN), "recommended", ref="B"),
            ],
            description="Of the optimizer's first parameter group.",
            unit="none",
            log=True,
        )
        .override_by_name("now", [fixed(ORANGE)])
        .override_by_name("recommended", [fixed(GREEN), dashed])
    )


def advice_table() -> table.Panel:
    """Two rows, what is and what is advised."""

    def both(now: str, recommended: str) -> str:
        return " or ".join(
            f'max by (state) (label_replace({metric}{{{RUN}}}, "state", "{state}", "", ""))'
            for state, metric in (("now", now), ("recommended", recommended))
        )

    return joined_table(
        "Now and recommended",
        {
            "Global batch": (
                both("noisescale_global_batch_size", "noisescale_recommended_batch_size"),
                "none",
            ),
            "Learning rate": (
                both("noisescale_learning_rate", "noisescale_recommended_learning_rate"),
                "none",
            ),
        },
        description=(
            "Change the batch and the learning rate together, then let at least 200 steps pass before "
            "reading the number again."
        ),
        key="state",
        key_name="",
        height=5,
    )


def changes() -> list[Annotation]:
    """What is marked on every chart."""

    def before(metric: str) -> str:
        return f"max without (instance, pod) ({metric}{{{RUN}}} offset $__interval)"

    batch, rate = "noisescale_global_batch_size", "noisescale_learning_rate"
    advice = f"noisescale_recommendation{{{RUN}}}"
    return [
        Annotation("Batch", f"{once(batch, RUN)} != {before(batch)}", "batch changed", ORANGE),
        # A schedule moves the rate a little all the time; a jump by 20% (ln 1.2 = 0.182) starts anew.
        Annotation(
            "Learning rate",
            f"abs(ln({once(rate, RUN)} / {before(rate)})) > 0.182",
            "learning rate jumped",
            BLUE,
        ),
        Annotation(
            "Advice",
            f"max by (run_id, action) ({advice}) == 1 "
            f"unless max by (run_id, action) ({advice} offset $__interval) == 1",
            "advice is now: {{action}}",
            GREEN,
        ),
    ]
