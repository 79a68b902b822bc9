"""Noise of known tr(Sigma) and |G|^2, for tests of everything that estimates them.

The problem of the documentation's science page: d = 64, |G|^2 = .01, tr(Sigma) = 4, so the
noise scale is 400; at a batch of 64 from 4 ranks, a quarter of the per-step |G|^2 are negative.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from noisescale.blocks import Block, BlockBuilder, MeasuredStep
from noisescale.moments import SampleGeometry, StepMoments, step_moments

DIMENSION = 64
TRACE_COVARIANCE = 4.0
TRUE_GRAD_SQ_NORM = 0.01
NOISE_SCALE = 400.0


def gaussian_moments(
    *, steps: int, counts: Sequence[int], seed: int, weights: Sequence[float] | None = None
) -> list[StepMoments]:
    """Per-step moments of samples of `counts` examples each, with the estimator under test."""
    rng = np.random.default_rng(seed)
    weights = weights or [1 / len(counts)] * len(counts)
    true_gradient = np.full(DIMENSION, np.sqrt(TRUE_GRAD_SQ_NORM / DIMENSION))
    spread = np.sqrt(TRACE_COVARIANCE / DIMENSION / np.asarray(counts, dtype=float))
    noise = rng.standard_normal((steps, len(counts), DIMENSION)) * spread[None, :, None]
    gradients = true_gradient + noise
    w = np.asarray(weights)
    local_sq = ((gradients**2).sum(axis=2) * w).sum(axis=1)
    global_sq = ((gradients * w[None, :, None]).sum(axis=1) ** 2).sum(axis=1)
    geometry = SampleGeometry.of(counts=counts, weights=weights)
    return [
        step_moments(local_sq=float(a), global_sq=float(q), geometry=geometry)
        for a, q in zip(local_sq, global_sq, strict=True)
    ]


def averages(moments: Sequence[StepMoments]) -> tuple[float, float]:
    """Means of tr(Sigma) and |G|^2 over steps."""
    return (
        float(np.mean([m.trace_covariance for m in moments])),
        float(np.mean([m.true_grad_sq_norm for m in moments])),
    )


def normal_moments(
    *, steps: int, cv: float, correlation: float, rng: np.random.Generator
) -> list[StepMoments]:
    """Moments with per-step relative standard deviation `cv` of |G|^2, an AR(1) of `correlation`."""
    noise = np.empty((steps, 2))
    innovation = rng.standard_normal((steps, 2))
    noise[0] = innovation[0]
    for step in range(1, steps):
        noise[step] = correlation * noise[step - 1] + np.sqrt(1 - correlation**2) * innovation[step]
    trace: NDArray[np.float64] = TRACE_COVARIANCE * (1 + 0.2 * noise[:, 0])
    signal: NDArray[np.float64] = TRUE_GRAD_SQ_NORM * (1 + cv * noise[:, 1])
    return [StepMoments(float(s), float(g)) for s, g in zip(trace, signal, strict=True)]


def blocks_of(
    moments: Sequence[StepMoments | None],
    *,
    block_steps: int = 10,
    global_batch_size: float = 64.0,
    learning_rates: Sequence[float] | float | None = 0.1,
    first_step: int = 0,
) -> list[Block]:
    """The blocks a job would report for these steps; None is a step with a non-finite gradient."""
    builder = BlockBuilder(block_steps=block_steps, clock=lambda: 0.0, first_step=first_step)
    blocks: list[Block] = []
    for index, m in enumerate(moments):
        rate = learning_rates[index] if isinstance(learning_rates, Sequence) else learning_rates
        blocks += builder.add(
            MeasuredStep(
                step=first_step + index,
                examples=int(global_batch_size),
                global_batch_size=global_batch_size,
                learning_rate=rate,
                moments=None if m is None else {("total", "euclidean"): m},
            )
        )
    return blocks + builder.close(final=True)
