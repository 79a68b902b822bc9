"""The `noisescale` command: runs, advice, what-if questions and the demo.

Results go to stdout, everything else to stderr. Exit code 1 is an error that the world made (no
server, no such run), 2 one in what was asked.
"""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import RenderableType
from typer.core import TyperGroup

from noisescale.advice import RecommendRequest, WhatIf
from noisescale.errors import InvalidInputError, NoiseScaleError
from noisescale.recommend import recommend as advise
from noisescale.wire import RunList
from noisescale_client import options
from noisescale_client.client import NoiseScaleClient, parse
from noisescale_client.tables import console_for, recommendation_view, run_view, runs_table
from noisescale_client.transport import DEFAULT_URL

SUPPOSED_MEASURED_STEPS = 1000
"""What a what-if question supposes to have been measured: an estimate's whole window."""


class _Group(TyperGroup):
    """Commands whose errors go to stderr in words: one line, and the log's end where a process failed."""

    def invoke(self, ctx: Any) -> Any:  # typer's versions differ in whose Context this is
        try:
            return super().invoke(ctx)
        except NoiseScaleError as error:
            typer.echo(f"noisescale: {error}", err=True)
            raise typer.Exit(2 if isinstance(error, InvalidInputError) else 1) from error


app = typer.Typer(
    name="noisescale",
    cls=_Group,
    help="Is this training run's batch size right, and its learning rate? Measured, live, with reasons.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"noisescale {version('noisescale')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Set up what all commands share; there is nothing but the version to print."""


@app.command(
    epilog="Examples:\n\n  noisescale runs --contains resnet\n\n"
    "  noisescale runs --url http://trainer:8000 --json"
)
def runs(
    contains: Annotated[str | None, typer.Option("--contains", help="Part of the name.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="At most so many.")] = 100,
    url: options.Url = DEFAULT_URL,
    token: options.Token = None,
    as_json: options.Json = False,
) -> None:
    """List the runs that a server knows, the one that reported last first."""
    with NoiseScaleClient(url, token) as client:
        found = client.runs(name_contains=contains, limit=limit)
    if not as_json and not found and contains is None:
        console_for(stderr=True).print(
            f"{url} knows no runs yet; start one with noisescale.attach(model, optimizer, report_to={url!r})",
            soft_wrap=True,
        )
        return
    _show(RunList(runs=found), runs_table(found), as_json=as_json)


@app.command(epilog="Examples:\n\n  noisescale show resnet50-8gpu\n\n  noisescale show resnet50-8gpu --json")
def show(
    run: options.Run,
    url: options.Url = DEFAULT_URL,
    token: options.Token = None,
    as_json: options.Json = False,
) -> None:
    """Show one run: its layout, its progress, its noise scales."""
    with NoiseScaleClient(url, token) as client:
        found = client.run(run)
    _show(found, run_view(found), as_json=as_json)


@app.command(
    epilog="Examples:\n\n  noisescale recommend resnet50-8gpu\n\n"
    "  noisescale recommend resnet50-8gpu --target-world-size 16 --max-micro-batch-size 64"
)
def recommend(
    ctx: typer.Context,
    run: options.Run,
    url: options.Url = DEFAULT_URL,
    token: options.Token = None,
    as_json: options.Json = False,
    optimizer: options.Optimizer = None,
    global_batch_size: options.GlobalBatchSize = None,
    learning_rate: options.LearningRate = None,
    dp_world_size: options.WorldSize = None,
    micro_batch_size: options.MicroBatchSize = None,
    accumulation_steps: options.AccumulationSteps = None,
    phase: options.LearningRatePhase = None,
    batch_norm: options.BatchNorm = None,
    momentum: options.Momentum = None,
    beta1: options.Beta1 = None,
    beta2: options.Beta2 = None,
    weight_decay: options.WeightDecay = None,
    max_micro_batch_size: options.MaxMicroBatchSize = None,
    target_dp_world_size: options.TargetWorldSize = None,
    target_global_batch_size: options.TargetGlobalBatchSize = None,
    tuned_global_batch_size: options.TunedGlobalBatchSize = None,
    tuned_learning_rate: options.TunedLearningRate = None,
    planned_decay_factor: options.PlannedDecayFactor = None,
    dataset_size: options.DatasetSize = None,
) -> None:
    """Advise on a run's batch and learning rate, from what it measured.

    Options override what the run reported.
    """
    with NoiseScaleClient(url, token) as client:
        answer = client.recommend(run, **_given(ctx, WhatIf))
    _show(answer, recommendation_view(answer, run=run), as_json=as_json)


@app.command(
    epilog="Examples:\n\n  noisescale what-if --global-batch-size 256 --learning-rate 0.1 --optimizer sgd "
    "--noise-scale 15000 --lower 10000 --upper 22000\n\n"
    "  noisescale what-if --global-batch-size 64 --learning-rate 1e-4 --optimizer adamw --lower 900 "
    "--world-size 2 --target-world-size 8"
)
def what_if(
    ctx: typer.Context,
    global_batch_size: options.GlobalBatchSize = None,
    learning_rate: options.LearningRate = None,
    optimizer: options.Optimizer = None,
    noise_scale: Annotated[
        float | None, typer.Option("--noise-scale", help="As measured or supposed.")
    ] = None,
    lower: Annotated[float | None, typer.Option("--lower", help="Lower end of its interval.")] = None,
    upper: Annotated[
        float | None, typer.Option("--upper", help="Upper end; left out beside --lower, it is unbounded.")
    ] = None,
    measured_steps: Annotated[
        int | None,
        typer.Option(
            "--measured-steps",
            help="Steps it was measured over.",
            show_default=str(SUPPOSED_MEASURED_STEPS),
        ),
    ] = None,
    batch_unit: Annotated[str, typer.Option("--batch-unit", help="examples or tokens.")] = "examples",
    dp_world_size: options.WorldSize = None,
    micro_batch_size: options.MicroBatchSize = None,
    accumulation_steps: options.AccumulationSteps = None,
    phase: options.LearningRatePhase = None,
    batch_norm: options.BatchNorm = None,
    momentum: options.Momentum = None,
    beta1: options.Beta1 = None,
    beta2: options.Beta2 = None,
    weight_decay: options.WeightDecay = None,
    max_micro_batch_size: options.MaxMicroBatchSize = None,
    target_dp_world_size: options.TargetWorldSize = None,
    target_global_batch_size: options.TargetGlobalBatchSize = None,
    tuned_global_batch_size: options.TunedGlobalBatchSize = None,
    tuned_learning_rate: options.TunedLearningRate = None,
    planned_decay_factor: options.PlannedDecayFactor = None,
    dataset_size: options.DatasetSize = None,
    as_json: options.Json = False,
) -> None:
    """Advise on numbers that you give; no run and no server is needed."""
    if noise_scale is None and lower is None:
        raise InvalidInputError(
            "give the noise scale: --noise-scale with --lower and --upper, or --lower alone", field="lower"
        )
    assumed = []
    if lower is None:
        lower, upper = noise_scale, noise_scale if upper is None else upper
        assumed.append(f"the noise scale is at least {lower:g} and at most {upper:g} (no --lower was given)")
    if measured_steps is None:
        measured_steps = SUPPOSED_MEASURED_STEPS
        assumed.append(f"measured_steps = {measured_steps} (not given)")
    values = {
        **_given(ctx, RecommendRequest),
        "measured_steps": measured_steps,
        "noise_scale": _present(value=noise_scale, lower=lower, upper=upper),
    }
    if tuned := _present(global_batch_size=tuned_global_batch_size, learning_rate=tuned_learning_rate):
        values["tuned"] = tuned
    if planned_decay_factor is not None:
        values["planned_decay"] = _present(factor=planned_decay_factor, dataset_size=dataset_size)
    answer = advise(parse(RecommendRequest, values), assumed=assumed)
    _show(answer, recommendation_view(answer), as_json=as_json)


@app.command(epilog="Examples:\n\n  noisescale demo\n\n  noisescale demo --steps 2000 --seed 1 --no-serve")
def demo(
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps to train for.")] = 8000,
    local_batch_size: Annotated[
        int, typer.Option("--local-batch-size", min=1, max=700, help="Per rank; there are two.")
    ] = 16,
    learning_rate: Annotated[float, typer.Option("--learning-rate", min=0.0)] = 0.05,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    output: Annotated[
        Path, typer.Option("--output", help="Folder for the database, the logs and the picture.")
    ] = Path("demo-output"),
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65535, help="Of the server.", show_default="a free one")
    ] = None,
    serve: Annotated[
        bool | None,
        typer.Option("--serve/--no-serve", help="Keep serving at the end.", show_default="in a terminal"),
    ] = None,
) -> None:
    """Train on real data for about a minute, and see the advice.

    Two gloo ranks on scikit-learn's handwritten digits, with a server of their own.
    """
    # Here and not above: no other command starts processes.
    from noisescale_client.demo import DemoSettings, run_demo

    settings = DemoSettings(
        steps=steps,
        local_batch_size=local_batch_size,
        learning_rate=learning_rate,
        seed=seed,
        output=output,
        port=port,
        serve=serve,
    )
    run_demo(settings, console=console_for())


def _given(ctx: typer.Context, model: type[BaseModel]) -> dict[str, Any]:
    """The options that were given and are fields of `model`: they share their names."""
    return {k: v for k, v in ctx.params.items() if v is not None and k in model.model_fields}


def _present(**values: object) -> dict[str, object]:
    return {key: value for key, value in values.items() if value is not None}


def _show(answer: BaseModel, view: RenderableType, *, as_json: bool) -> None:
    if as_json:
        typer.echo(answer.model_dump_json(indent=2))
    else:
        console_for().print(view)


def main() -> None:
    """Run the command."""
    app(prog_name="noisescale", args=sys.argv[1:])
