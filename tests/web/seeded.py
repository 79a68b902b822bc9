"""Runs of every kind, reported over HTTP: noise of known noise scale, with schedules that people use."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from noisescale.blocks import Block, MomentSums
from tests.server.reports import report
from tests.services import Server

Curve = Callable[[float], float]
"""Something as a function of the share of a run that is done, from 0 to 1."""

GROUPS = {"embed": 0.25, "blocks.0": 0.7, "blocks.1": 1.0, "blocks.2": 1.5, "head": 4.0}
"""Layer groups, and their noise scale over the whole model's."""

GEOMETRIES = {"euclidean": 1.0, "adam": 0.35, "sign": 0.12}


def made_blocks(
    *,
    steps: int,
    noise_scale: Curve,
    batch: Curve,
    learning_rate: Curve,
    block_steps: int = 10,
    first_step: int = 0,
    of_steps: int | None = None,
    keys: Mapping[tuple[str, str], float] | None = None,
    cv: float = 2.0,
    unit: str = "examples",
    seed: int = 0,
) -> list[Block]:
    """Blocks of a run.

    Args:
        of_steps: How long the run is in all; the curves are over that.
        keys: (group, geometry) and its noise scale over the whole model's.
        cv: Relative standard deviation of one step's |G|^2, at a batch of the noise scale.
    """
    rng = np.random.default_rng(seed)
    keys = keys or {("total", "euclidean"): 1.0}
    blocks: list[Block] = []
    for start in range(first_step, first_step + steps, block_steps):
        count = min(block_steps, first_step + steps - start)
        done = start / (of_steps or steps)
        scale, size = noise_scale(done), batch(done)
        trace = 4.0 * math.exp(-done)
        sums = []
        for (group, geometry), factor in keys.items():
            signal = trace / (scale * factor)
            noise = rng.standard_normal((count, 2))
            s = trace * (1 + 0.25 * noise[:, 0])
            g = signal * (1 + cv * (0.25 + scale * factor / size / 10) * noise[:, 1])
            sums.append(
                MomentSums(
                    group=group,
                    geometry=geometry,  # type: ignore[arg-type]  # a name, checked by the model
                    trace_covariance=float(s.sum()),
                    true_grad_sq_norm=float(g.sum()),
                    trace_covariance_sq=float((s * s).sum()),
                    true_grad_sq_norm_sq=float((g * g).sum()),
                    product=float((s * g).sum()),
                )
            )
        blocks.append(
            Block(
                first_step=start,
                last_step=start + count - 1,
                measured_steps=count,
                examples=int(size) * count,
                learning_rate=learning_rate(done),
                global_batch_size=size,
                batch_unit=unit,  # type: ignore[arg-type]  # a name, checked by the model
                sums=tuple(sums),
            )
        )
    return blocks


def send(server: Server, name: str, blocks: Sequence[Block], **fields: Any) -> None:
    """Report blocks, as many at a time as may be."""
    for start in range(0, max(1, len(blocks)), 500):
        answer = server.post(f"/v1/runs/{name}/blocks", report(blocks[start : start + 500], **fields))
        assert answer.status == 200, answer.text


def warmup_cosine(peak: float) -> Curve:
    """A learning rate that rises over a twentieth of the run and then falls along a cosine."""
    return lambda done: (
        peak * max(done, 1e-3) / 0.05 if done < 0.05 else peak * (0.55 + 0.45 * math.cos(math.pi * done))
    )


def constant(value: float) -> Curve:
    """The same all along."""
    return lambda _: value


def info(**fields: Any) -> dict[str, Any]:
    """What a job says of itself, with today's usual things."""
    return {
        "optimizer": "sgd",
        "optimizer_name": "SGD",
        "momentum": 0.9,
        "dp_world_size": 8,
        "micro_batch_size": 32,
        "accumulation_steps": 1,
        "max_micro_batch_size": 256,
        "loss_reduction": "mean",
        "every": 1,
        "versions": {"noisescale": "0.1.0", "torch": "2.13.0"},
        **fields,
    }


def seed_all(server: Server) -> None:
    """One run of each kind, the most telling one last, so that it is on top of the list."""
    send(server, "waiting", [], run=info())
    send(
        server,
        "vit-small.too-big",
        made_blocks(
            steps=2000,
            noise_scale=constant(520),
            batch=constant(4096),
            learning_rate=constant(0.4),
            seed=3,
            cv=0.6,
        ),
        run=info(dp_world_size=32, micro_batch_size=128),
        ended=True,
    )
    send(
        server,
        "bert-finetune",
        made_blocks(
            steps=400,
            noise_scale=constant(900),
            batch=constant(64),
            learning_rate=constant(2e-5),
            cv=40,
            seed=4,
        ),
        run=info(optimizer="adamw", optimizer_name="AdamW", weight_decay=0.01, micro_batch_size=8),
    )
    send(
        server,
        "unet-in-band",
        made_blocks(
            steps=3000,
            noise_scale=constant(290),
            batch=constant(256),
            learning_rate=constant(0.05),
            seed=5,
            cv=0.8,
        ),
        run=info(batch_norm=True),
    )
    send(
        server,
        "gpt-124m.adamw",
        made_blocks(
            steps=4000,
            noise_scale=lambda done: 40_000 * (1 + 9 * done),
            batch=constant(65_536),
            learning_rate=warmup_cosine(6e-4),
            keys={("total", geometry): factor for geometry, factor in GEOMETRIES.items()},
            unit="tokens",
            seed=6,
            cv=1.0,
        ),
        run=info(
            optimizer="adamw", optimizer_name="AdamW", beta1=0.9, beta2=0.95, weight_decay=0.1,
            micro_batch_size=8192, max_micro_batch_size=16_384,
        ),
    )  # fmt: skip
    seed_resnet(server)


def seed_resnet(server: Server, run: str = "resnet50-8gpu") -> None:
    """A run with layer groups whose batch and rate were raised, and that was started again."""
    schedule: dict[str, Any] = {
        "noise_scale": lambda done: 500 * (1 + 12 * done**1.2),
        "batch": lambda done: 256.0 if done < 0.3 else 512.0,
        "learning_rate": lambda done: 0.1 if done < 0.3 else 0.16,
        "of_steps": 6000,
        "keys": {("total", "euclidean"): 1.0} | {(name, "euclidean"): f for name, f in GROUPS.items()},
        "cv": 0.8,
    }
    about = info(micro_batch_size=64)
    send(server, run, made_blocks(steps=3500, seed=1, **schedule), run=about)
    # From a checkpoint of step 3,000.
    again = made_blocks(steps=3000, first_step=3000, seed=2, **schedule)
    send(server, run, again, run=about, attempt=1_764_547_300_000)
