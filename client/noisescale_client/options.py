"""The command line's options, named as the fields of /recommend are."""

from typing import Annotated

import typer

from noisescale.history import Phase
from noisescale.wire import OptimizerFamily
from noisescale_client.transport import DEFAULT_URL, TOKEN_VARIABLE, URL_VARIABLE

Url = Annotated[str, typer.Option("--url", envvar=URL_VARIABLE, help="The server.", show_default=DEFAULT_URL)]
Token = Annotated[
    str | None,
    typer.Option("--token", envvar=TOKEN_VARIABLE, help="Read token, where the server wants one."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")]

_NOW = "What is run now"
_PLAN = "What is planned"

Optimizer = Annotated[
    OptimizerFamily | None,
    typer.Option("--optimizer", help="Decides which learning-rate rule applies.", rich_help_panel=_NOW),
]
GlobalBatchSize = Annotated[
    float | None,
    typer.Option(
        "--global-batch-size", help="Over all ranks and accumulation, per step.", rich_help_panel=_NOW
    ),
]
LearningRate = Annotated[float | None, typer.Option("--learning-rate", rich_help_panel=_NOW)]
WorldSize = Annotated[
    int | None,
    typer.Option("--world-size", help="Data-parallel ranks.", rich_help_panel=_NOW),
]
MicroBatchSize = Annotated[
    float | None,
    typer.Option("--micro-batch-size", help="One forward and backward on one rank.", rich_help_panel=_NOW),
]
AccumulationSteps = Annotated[
    int | None,
    typer.Option("--accumulation-steps", help="Micro-batches per step and rank.", rich_help_panel=_NOW),
]
MaxMicroBatchSize = Annotated[
    int | None,
    typer.Option(
        "--max-micro-batch-size",
        help="The largest that fits in memory; the present one if left out.",
        rich_help_panel=_PLAN,
    ),
]
TargetWorldSize = Annotated[
    int | None,
    typer.Option(
        "--target-world-size",
        help="Data-parallel ranks there will be.",
        rich_help_panel=_PLAN,
    ),
]
TargetGlobalBatchSize = Annotated[
    float | None,
    typer.Option(
        "--target-global-batch-size",
        help="A batch that is planned anyway: answered with the learning rate for it.",
        rich_help_panel=_PLAN,
    ),
]
LearningRatePhase = Annotated[
    Phase | None,
    typer.Option("--phase", help="What the learning rate is doing.", rich_help_panel=_NOW),
]
BatchNorm = Annotated[
    bool | None,
    typer.Option(
        "--batch-norm/--no-batch-norm",
        help="BatchNorm layers that keep statistics per rank: the micro-batch then stays.",
        rich_help_panel=_NOW,
    ),
]
Momentum = Annotated[float | None, typer.Option("--momentum", rich_help_panel=_NOW)]
Beta1 = Annotated[float | None, typer.Option("--beta1", rich_help_panel=_NOW)]
Beta2 = Annotated[float | None, typer.Option("--beta2", rich_help_panel=_NOW)]
WeightDecay = Annotated[float | None, typer.Option("--weight-decay", rich_help_panel=_NOW)]
TunedGlobalBatchSize = Annotated[
    float | None,
    typer.Option(
        "--tuned-global-batch-size",
        help="The batch that a tuned learning rate was tuned at; checks the present rate.",
        rich_help_panel=_PLAN,
    ),
]
TunedLearningRate = Annotated[
    float | None, typer.Option("--tuned-learning-rate", help="That rate.", rich_help_panel=_PLAN)
]
PlannedDecayFactor = Annotated[
    float | None,
    typer.Option(
        "--planned-decay-factor",
        help="A learning-rate decay ahead, which may be had as a larger batch instead.",
        rich_help_panel=_PLAN,
    ),
]
DatasetSize = Annotated[
    float | None, typer.Option("--dataset-size", help="In examples (or tokens).", rich_help_panel=_PLAN)
]
