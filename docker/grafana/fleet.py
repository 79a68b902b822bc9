"""The Fleet dashboard: every run that reports, side by side."""

from grafana_foundation_sdk.builders import common, dashboard, table, timeseries
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from panels import (
    GREEN,
    ORANGE,
    RED,
    WHOLE_MODEL,
    action_code,
    base,
    coloured_words,
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

UID = "noisescale-fleet"
RUNS = 'run_id=~"$run"'
WHOLE = f"{RUNS}, {WHOLE_MODEL}"


def advised(action: str) -> str:
    """PromQL for how many runs are advised so; 0 where none is."""
    runs = per_run("noisescale_recommendation", f'{RUNS}, action="{action}"')
    return f"count({runs} == 1) or vector(0)"


def build() -> dashboard.Dashboard:
    """The dashboard, to be written as JSON."""
    noise_scale = once("noisescale_noise_scale", WHOLE, dropping="geometry, group")
    batch = once("noisescale_global_batch_size", RUNS)
    board = base(
        "noisescale / Fleet",
        uid=UID,
        description=(
            "Every training run that reports: its noise scale against its batch, and what is advised."
        ),
        variables=[
            label_variable(
                "run",
                label="Runs",
                values_of="label_values(noisescale_last_report_timestamp_seconds, run_id)",
                multi=True,
                # A pattern rather than the list: there may be thousands.
                all_value=".*",
                description="Which runs to show. A run leaves this list a few minutes after it ends.",
            )
        ],
    )
    return (
        board.with_panel(
            number(
                "Runs reporting",
                f"count({per_run('noisescale_last_report_timestamp_seconds', RUNS)}) or vector(0)",
                description="Runs the server exposes now. A run leaves a few minutes after its last report.",
            )
        )
        .with_panel(
            number(
                "Raise the batch",
                advised("raise"),
                description=(
                    "Runs whose noise scale is at least twice the batch even at the lower end of its "
                    "interval."
                ),
                colour=GREEN,
            )
        )
        .with_panel(
            number(
                "Lower the batch",
                advised("lower"),
                description=(
                    "Runs whose noise scale is at most half the batch even at the upper end of its interval."
                ),
                colour=ORANGE,
            )
        )
        .with_panel(
            number(
                "Fix the learning rate",
                advised("lr_only"),
                description="Runs whose learning rate is more than 2x outside what the rules support.",
                colour=RED,
            )
        )
        .with_panel(
            number(
                "Examples per second",
                f"sum({once_rate('noisescale_examples_total', RUNS)})",
                description=(
                    "Of all shown runs together; tokens count as examples for runs that report tokens."
                ),
                decimals=0,
            )
        )
        .with_panel(
            number(
                "Oldest report",
                f"max(time() - {per_run('noisescale_last_report_timestamp_seconds', RUNS)})",
                description="Age of the last report of the run that has been silent longest.",
                unit="s",
                decimals=0,
            )
        )
        .with_panel(runs_table())
        .with_panel(
            advice_lines(
                lines(
                    "Noise scale, in batches",
                    [query(f"{noise_scale} / {batch}", "{{run_id}}")],
                    description=(
                        "Noise scale divided by the global batch. Far above 1 a bigger batch pays; far "
                        "below 1 examples are wasted. At 1: twice the least steps and twice the least "
                        "examples."
                    ),
                    log=True,
                )
            )
        )
        .with_panel(
            lines(
                "Noise scale",
                [query(noise_scale, "{{run_id}}")],
                description=(
                    "In examples, or tokens, over all ranks and accumulation. The interval is on each "
                    "run's page."
                ),
                log=True,
            )
        )
        .with_panel(
            states(
                "Advice",
                action_code(RUNS),
                "{{run_id}}",
                description="What /recommend says about each run, over time.",
            )
        )
        .with_panel(
            lines(
                "Sample efficiency",
                [query(once("noisescale_sample_efficiency_ratio", RUNS), "{{run_id}}")],
                description="Bn / (Bn + B): progress per example, relative to a very small batch.",
                unit="percentunit",
            )
            .min(0)
            .max(1)
        )
        .with_panel(
            lines(
                "Learning rate",
                [query(once("noisescale_learning_rate", RUNS), "{{run_id}}")],
                description="Of the optimizer's first parameter group.",
                unit="sci",
                log=True,
            )
        )
        .with_panel(
            lines(
                "Steps per second",
                [query(once_rate("noisescale_steps_total", RUNS), "{{run_id}}")],
                description="Optimizer steps, counted from the reports that arrived.",
                unit="ops",
            )
        )
        .with_panel(
            lines(
                "Skipped steps per second",
                [query(once_rate("noisescale_skipped_steps_total", RUNS), "{{run_id}}")],
                description=(
                    "Steps left out because a gradient was not finite. A few are normal with fp16 scaling."
                ),
                unit="ops",
            ).min(0)
        )
    )


def advice_lines(panel: timeseries.Panel) -> timeseries.Panel:
    """Draw where advice begins: at half a batch and at two."""
    steps = [
        models.Threshold(value=None, color="transparent"),
        models.Threshold(value=0.5, color=ORANGE),
        models.Threshold(value=2, color=GREEN),
    ]
    return panel.thresholds(
        dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
    ).thresholds_style(
        common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED)
    )


def runs_table() -> table.Panel:
    """One row a run: the number, its interval, the batch, and the advice."""
    noise_scale = per_run("noisescale_noise_scale", WHOLE)
    batch = per_run("noisescale_global_batch_size", RUNS)
    panel = joined_table(
        "Runs",
        {
            "Noise scale": (noise_scale, "short"),
            "Lower": (per_run("noisescale_noise_scale_lower", WHOLE), "short"),
            "Upper (empty: unbounded)": (per_run("noisescale_noise_scale_upper", WHOLE), "short"),
            "Global batch": (batch, "none"),
            "In batches": (f"{noise_scale} / {batch}", "none"),
            "Advice": (action_code(RUNS), "none"),
            "Recommended batch": (per_run("noisescale_recommended_batch_size", RUNS), "none"),
            "Learning rate": (per_run("noisescale_learning_rate", RUNS), "none"),
            "Recommended rate": (per_run("noisescale_recommended_learning_rate", RUNS), "none"),
            "Last report": (f"time() - {per_run('noisescale_last_report_timestamp_seconds', RUNS)}", "s"),
        },
        description=(
            "Click a run for its own dashboard. The noise scale is an order-of-magnitude proxy for the "
            "critical batch size: look at the interval."
        ),
        key="run_id",
        key_name="Run",
        sort_by="In batches",
    )
    link = {
        "title": "Open this run",
        "url": "/d/noisescale-run?var-datasource=${datasource}&var-run=${__value.text}&${__url_time_range}",
    }
    return coloured_words(panel, "Advice").override_by_name(
        "Run", [models.DynamicConfigValue(id_val="links", value=[link])]
    )
