"""The capture of one process without accumulation: per-example gradients at normalization layers.

A normalization layer's weight and bias act on each example alone, so that their per-example gradients
follow from the layer's input and the gradient of its output, with no further pass: with y = x_hat w + b
they are the sums over an example's positions of dL/dy x_hat and of dL/dy. Gray et al. 2024
(arXiv 2411.00999) find that the noise scale of these layers alone predicts that of the whole model up
to a factor near 1. It is a proxy, and is reported as a geometry of its own, "norm_layers".
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from noisescale.errors import UnsupportedModelError
from noisescale.hooks.assembly import assemble
from noisescale.hooks.options import Options
from noisescale.hooks.stepwise import StepwiseCapture
from noisescale.hooks.uncopied import UncopiedHook

NORM_LAYERS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


def capture_norm_layers(model: nn.Module, optimizer: Optimizer | None, options: Options) -> StepwiseCapture:
    """Measure a module that one process trains, at its normalization layers.

    Args:
        model: With LayerNorm, RMSNorm or GroupNorm layers whose inputs have the batch first.
        optimizer, options: As of noisescale.attach.

    Raises:
        UnsupportedModelError: It has no such layer with a trained weight, or something is asked for that
            they cannot tell.
        OptimizerNotFoundError, InvalidInputError: As noisescale.attach.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, NORM_LAYERS) and trained(layer)]
    if not layers:
        raise UnsupportedModelError(
            "the model has no LayerNorm, RMSNorm or GroupNorm with a trained weight (BatchNorm mixes "
            'examples); accumulate at least 2 micro-batches per step and say samples="micro_batch"'
        )
    for name, asked in (
        ("batch_unit", options.batch_unit != "examples"),
        ("loss_reduction", options.loss_reduction == "global_mean"),
        ("groups", options.groups is not None),
        ("geometry", options.geometry not in ("euclidean", ("euclidean",), ["euclidean"])),
    ):
        if asked:
            raise UnsupportedModelError(
                f'{name}={getattr(options, name)!r} cannot be had with samples="norm_layers", which takes '
                f"single examples at some layers; leave {name} out"
            )
    built = assemble(model, optimizer, options, group=None, sampled_by="norm_layers")
    parameters = list({id(p): p for layer in layers for p in trained(layer)}.values())
    squares = NormLayerSquares(layers, on_error=built.measuring.fail)
    return StepwiseCapture(model, built, options, squares=squares, summed=parameters)


def trained(layer: nn.Module) -> list[nn.Parameter]:
    """A layer's own parameters that require a gradient."""
    return [parameter for parameter in layer.parameters(recurse=False) if parameter.requires_grad]


class NormLayerSquares:
    """The sum, over the examples of a step, of the square norms of their gradients at these layers.

    Args:
        layers: Of NORM_LAYERS.
        on_error: Told what went wrong inside a hook; nothing is raised there.

    Attributes:
        cost_s: Host time spent since the step began.
        sampled: None: which parameters have got a gradient is not looked at.
    """

    cost_s = 0.0
    sampled = None

    def __init__(self, layers: Sequence[nn.Module], *, on_error: Callable[[Exception], None]) -> None:
        self._layers = layers
        self._on_error = on_error
        self._handles: list[Any] = []
        self._rows: dict[int, Tensor] = {}
        self._total: Tensor | None = None
        self._count = 0

    def watch(self, geometry: object = None) -> None:
        """Begin a step: put the hooks on the layers."""
        del geometry  # none is measured at these layers
        if not self._handles:
            self._begin()
            self._handles = [layer.register_forward_hook(UncopiedHook(self, "saw")) for layer in self._layers]

    def unwatch(self) -> None:
        """Take the hooks off, and forget."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._begin()

    def next_micro_batch(self, count: int) -> None:
        """One is to come, of so many examples."""
        self._settle()
        self._count = count

    def take(self, *, micro_batches: int) -> Tensor:
        """The sum of squares, one number; unwatches."""
        del micro_batches
        self._settle()
        total = self._total
        self.unwatch()
        return torch.zeros(1, dtype=torch.float64) if total is None else total.reshape(1)

    def saw(self, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        """One use of a layer in a forward pass."""
        inputs = args[0]
        if not (self._handles and output.requires_grad):
            return
        try:
            if inputs.shape[0] != self._count:
                raise UnsupportedModelError(
                    f"the input of a {type(layer).__name__} has shape {tuple(inputs.shape)}, and the batch "
                    f"of {self._count} examples is not its first dimension; measure with "
                    'samples="micro_batch" and accumulation'
                )
            kept = inputs.detach()
            output.register_hook(lambda gradient: self._add(layer, kept, gradient))  # type: ignore[no-untyped-call]  # torch has no types for it
        except Exception as error:  # noqa: BLE001  training must go on
            self._on_error(error)

    def _add(self, layer: nn.Module, inputs: Tensor, gradient: Tensor) -> None:
        try:
            for key, rows in _per_example(layer, inputs, gradient):
                # Summed over all uses of the layer in this pass, before anything is squared.
                self._rows[key] = self._rows[key] + rows if key in self._rows else rows
        except Exception as error:  # noqa: BLE001  training must go on
            self._on_error(error)

    def _settle(self) -> None:
        for rows in self._rows.values():
            square = rows.double().square().sum()
            self._total = square if self._total is None else self._total + square
        self._rows = {}

    def _begin(self) -> None:
        self._rows = {}
        self._total = None
        self._count = 0


def _per_example(layer: nn.Module, inputs: Tensor, gradient: Tensor) -> Iterator[tuple[int, Tensor]]:
    """By parameter, the gradients of each example: a row of float32 at least each."""
    wide = torch.promote_types(inputs.dtype, torch.float32)
    x, g = inputs.to(wide), gradient.to(wide)
    if isinstance(layer, nn.GroupNorm):
        normal = functional.group_norm(x, layer.num_groups, None, None, layer.eps)
        others = tuple(range(2, x.dim()))  # (N, C, *)
    else:
        shape = list(layer.normalized_shape)  # type: ignore[arg-type]  # LayerNorm and RMSNorm have one
        others = tuple(range(1, x.dim() - len(shape)))
        if isinstance(layer, nn.RMSNorm):
            # Its eps=None is that of the input's own dtype.
            eps = layer.eps if layer.eps is not None else torch.finfo(inputs.dtype).eps
            normal = functional.rms_norm(x, shape, None, eps)
        else:
            normal = functional.layer_norm(x, shape, None, None, layer.eps)  # type: ignore[arg-type]  # as above
    for name, value in (("weight", g * normal), ("bias", g)):
        parameter = getattr(layer, name, None)
        if parameter is not None and parameter.requires_grad:
            summed = value.sum(dim=others) if others else value
            yield id(parameter), summed.flatten(1)
