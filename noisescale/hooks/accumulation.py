"""The capture of one process alone: its micro-batches are the samples.

Needs gradient accumulation, M >= 2 micro-batches to an optimizer step.
"""

from torch import nn
from torch.optim import Optimizer

from noisescale.errors import UnsupportedModelError
from noisescale.hooks.assembly import assemble, trainable
from noisescale.hooks.micro_batches import MicroBatchSquares
from noisescale.hooks.options import Options
from noisescale.hooks.stepwise import StepwiseCapture


def capture_alone(model: nn.Module, optimizer: Optimizer | None, options: Options) -> StepwiseCapture:
    """Measure a module that one process trains.

    Args:
        model: Any module that is not distributed.
        optimizer, options: As of noisescale.attach.

    Raises:
        UnsupportedModelError: Nothing in the model can be trained.
        OptimizerNotFoundError, InvalidInputError: As noisescale.attach.
    """
    parameters = trainable(model)
    if not parameters:
        raise UnsupportedModelError(
            "no parameter of the model requires a gradient; there is nothing to measure"
        )
    built = assemble(model, optimizer, options, group=None, sampled_by="micro_batch")
    squares = MicroBatchSquares(
        parameters,
        groups=built.groups,
        sampling=built.measuring.sampling,
        on_error=built.measuring.fail,
    )
    return StepwiseCapture(model, built, options, squares=squares, summed=parameters)
