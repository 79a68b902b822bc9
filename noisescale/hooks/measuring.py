"""Which steps are measured, and until when: decided alike on every rank.

A rank that measured a step the others do not would wait for their part of its packet for ever.
So nothing is decided from a rank's own clock or troubles: rank 0's wish for `every`, a failure
on any rank and a wish to stop all travel in the packets, and what a packet says takes effect on
every rank at the same later measured step.

Captures (of DDP's buckets, of FSDP's shards, of micro-batches) differ in how they take norms;
all of them measure through this.
"""

import logging
import threading
import time
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from noisescale.hooks.counting import Tally
from noisescale.hooks.geometry.sampled import GeometryStep, SampledGeometries
from noisescale.hooks.overhead import OverheadMeter
from noisescale.hooks.publish import Reading, Slot, SlotQueue
from noisescale.hooks.reduction import Packet, Share, agree_on_every, own_group, pack, sum_over_ranks
from noisescale.hooks.sampling import Sampling

_log = logging.getLogger(__name__)

DEPTH = 4
"""Measured steps after which what a packet says takes effect: by then every rank has read it, or
waits for the little that is missing."""

UNSYNCED_ACCUMULATION = (
    "noisescale has stopped measuring: gradients are accumulated over several backward passes, each of "
    "which synchronises, so none of them is a sample of known size. Run forward and backward of all "
    "micro-batches but the last inside `with model.no_sync():`, which also saves the communication"
)


class Consumer(Protocol):
    """Takes the measured steps of rank 0; the other ranks have one that does nothing."""

    def take(self, reading: Reading) -> None:
        """One measured step, in order."""

    def refuse(self, why: str) -> None:
        """What is being measured is not what it seemed; nothing more follows."""


class Measuring:
    """One rank's part in measuring steps together.

    Args:
        group: The model's data-parallel ranks; a group of their own is made of them. None is one
            process alone.
        device: Where the packets are reduced.
        meter: Decides every how many steps to measure; rank 0's counts.
        consumer: Of measured steps.
        groups: Layer groups, each with a square norm of its own in the packet.
        sampling: What the samples are.
        geometries: Measured beside the Euclidean one, on some of the measured steps.
        sharded: Whether each rank has a part of the averaged gradient, whose squares are summed too.
        carried_means: What is said where a packet's `carried` is above 0, and measuring stops.
    """

    def __init__(
        self,
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
        meter: OverheadMeter,
        consumer: Consumer,
        groups: int = 1,
        sampling: Sampling,
        geometries: SampledGeometries | None = None,
        sharded: bool = False,
        carried_means: str = UNSYNCED_ACCUMULATION,
    ) -> None:
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.sampling = sampling
        self._carried_means = carried_means
        self._geometries = geometries
        self._sharded = sharded
        self._geometry: GeometryStep | None = None
        self._measured = 0
        self.meter = meter
        self.group = own_group(group)
        self._device = device
        self._groups = groups
        self._consumer = consumer
        self._every = agree_on_every(meter.every, group=self.group, device=device)
        self._lock = threading.RLock()
        self._sent = SlotQueue()
        self._passes = 0
        self._next = 0
        self._examples = 0
        self._failed = False
        self._leaving = False
        self._stopped = False
        self._decided: bool | None = None
        # Made now, so that it can be sent whatever goes wrong later.
        self._failure = pack(Share(failed=1), carried=None, local_squares=self._no_squares())

    @property
    def every(self) -> int:
        """Every how many steps one is measured now; the same on every rank."""
        return self._every

    @property
    def passes(self) -> int:
        """Synchronised backward passes so far."""
        return self._passes

    @property
    def stopped(self) -> bool:
        """Whether no more steps will be measured."""
        return self._stopped

    def decide(self) -> bool:
        """Whether the next synchronised backward pass is to be measured; alike on all ranks. Never raises.

        For captures that begin before that pass does: at the first of several micro-batches.
        """
        if self._decided is None:
            if not self._stopped:
                self.collect()
            if not self._stopped and self._passes >= self._next and len(self._sent) >= DEPTH:
                self._settle_oldest()
            self._decided = not self._stopped and self._passes >= self._next
            if self._decided and self._geometries is not None:
                self._begin_geometry(self._geometries)
        return self._decided

    @property
    def geometry(self) -> GeometryStep | None:
        """Where the samples of the pass that decide() answered for are gathered, in other geometries."""
        return self._geometry

    def begin_pass(self, tally: Tally, *, divisor: int) -> Slot | None:
        """A synchronised backward pass has begun: a slot if it is to be measured, alike on all ranks.

        Never raises.

        Args:
            tally: Of this rank's sample.
            divisor: What the sum of gradients over ranks will be divided by.
        """
        started = time.perf_counter()
        self.meter.passed(started)
        measured, self._decided = self.decide(), None
        index, self._passes = self._passes, self._passes + 1
        self._examples += tally.count
        if not measured:
            return None
        self._next = index + self._every
        self._measured += 1
        geometry, self._geometry = self._geometry, None
        examples, self._examples = self._examples, 0
        return Slot(
            geometry=geometry,
            step=index,
            tally=tally,
            divisor=divisor,
            examples=examples,
            measuring=not (self._failed or self._leaving),
            cost_s=time.perf_counter() - started,
        )

    def send(self, slot: Slot) -> None:
        """All of this rank's gradient is in the slot: start the all-reduce of its packet. Never raises.

        Call it where every rank does so in the same order among its collectives.
        """
        started = time.perf_counter()
        try:
            if slot.geometry is not None:
                # Before the packet, which tells the others if it goes wrong.
                self._ready_geometry(slot, slot.geometry)
            slot.packet = self._packet(slot)
            slot.work = sum_over_ranks(slot.packet, self.group)
            if slot.geometry is not None:
                slot.geometry.reduce(self.group)
            with self._lock:
                self._sent.push(slot)
            slot.cost_s += time.perf_counter() - started
            self.meter.measured(slot.cost_s)
        except Exception as error:  # noqa: BLE001  it cannot reach the other ranks: training will tell
            self.fail(error)
            self._stopped = True

    def fail(self, error: BaseException) -> None:
        """Measuring went wrong on this rank: say so once, and have all ranks stop."""
        if not self._failed:
            self._failed = True
            _log.error(
                "noisescale failed on rank %d and stops measuring; training is not affected",
                self.rank,
                exc_info=error,
            )

    def leave(self) -> None:
        """Stop measuring. Until all ranks have read it, this one goes on taking part."""
        self._leaving = True

    def note_learning_rate(self, rate: float | Tensor | None) -> None:
        """The learning rate of the optimizer step that has just followed the last pass."""
        with self._lock:
            newest = self._sent.newest
            if newest is not None and newest.step == self._passes - 1 and newest.reading is None:
                newest.learning_rate = rate

    def collect(self, *, timeout_s: float | None = None) -> bool:
        """Hand on the measured steps that are ready; whether none is left on its way.

        Args:
            timeout_s: Wait so long for those that are not; None does not wait.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            with self._lock:
                for reading in self._sent.newly_read(deadline=deadline):
                    self._hand_on(reading)
                return self._sent.all_read
        except Exception as error:  # noqa: BLE001  training must go on; all ranks are told in the next packet
            self.fail(error)
            return False

    def _settle_oldest(self) -> None:
        """Do what the oldest packet says, as every rank does at this very step."""
        with self._lock:
            slot = self._sent.pop()
            try:
                read_before = slot.reading is not None
                if not read_before:
                    slot.wait()
                reading = slot.read()
            except Exception as error:  # noqa: BLE001  a rank is gone, or the device is: training will tell
                self.fail(error)
                self._stopped = True
                return
            if not read_before:
                self._hand_on(reading)
        self._obey(reading.packet)

    def _obey(self, packet: Packet) -> None:
        if packet.every >= 1:
            self._every = packet.every
        if packet.failed or packet.leaving or packet.carried > 0:
            self._stopped = True
            if packet.failed and self.rank == 0 and not self._failed:
                _log.error("noisescale has stopped measuring: it failed on %d rank(s)", packet.failed)

    def _begin_geometry(self, geometries: SampledGeometries) -> None:
        # There on every rank or on none, whatever goes wrong: all of them reduce what is in it.
        self._geometry = geometries.begin(self._measured)
        if self._geometry is not None:
            try:
                self._geometry.weigh()
            except Exception as error:  # noqa: BLE001  training must go on; all ranks are told in the packet
                self.fail(error)

    def _ready_geometry(self, slot: Slot, geometry: GeometryStep) -> None:
        if not self._failed and slot.measuring:
            try:
                factor = self.sampling.rank_factor(slot.tally)
                geometry.ready(rank_factor=factor, divisor=slot.divisor)
                return
            except Exception as error:  # noqa: BLE001  the others wait for its numbers: zeros are sent
                self.fail(error)
        geometry.ready_nothing()

    def _hand_on(self, reading: Reading) -> None:
        if self._failed or reading.packet.failed or reading.packet.leaving:
            return
        try:
            if reading.error is not None:
                raise reading.error
            if reading.packet.carried > 0:
                self._consumer.refuse(self._carried_means)
            else:
                self._consumer.take(reading)
        except Exception as error:  # noqa: BLE001  training must go on; all ranks are told in the next packet
            self.fail(error)

    def _packet(self, slot: Slot) -> Tensor:
        if not self._failed:
            try:
                return self._own_packet(slot)
            except Exception as error:  # noqa: BLE001  the others wait for a packet: one that says so is sent
                self.fail(error)
        return self._failure.clone()

    def _own_packet(self, slot: Slot) -> Tensor:
        share = Share(
            active=int(slot.tally.micro_batches > 0),
            samples=self.sampling.samples(slot.tally),
            weight_over_count=self.sampling.weight_over_count(slot.tally),
            squared_weight_over_count=self.sampling.squared_weight_over_count(slot.tally),
            count=slot.tally.count,
            examples=slot.examples,
            leaving=int(self._leaving),
            every=self.meter.every if self.rank == 0 else 0,
        )
        if not slot.measuring:
            told = Share(leaving=share.leaving, every=share.every)
            return pack(told, carried=None, local_squares=self._no_squares())
        squares = slot.local_total().to(self._device, non_blocking=True)
        if self._geometries is not None:
            squares = torch.cat([squares, self._geometry_numbers(slot)])
        squares = squares * self.sampling.rank_factor(slot.tally)
        if slot.shard_squares is not None:
            shard = slot.unscaled(slot.shard_squares).to(self._device, non_blocking=True)
            squares = torch.cat([squares, shard])
        return pack(share, carried=slot.carried, local_squares=squares)

    def _no_squares(self) -> Tensor:
        """As many zeros as a packet has square norms."""
        others = self._geometries.local_numbers if self._geometries is not None else 0
        count = self._groups * (1 + self._sharded) + others
        return torch.zeros(count, dtype=torch.float64, device=self._device)

    def _geometry_numbers(self, slot: Slot) -> Tensor:
        """This rank's part of other geometries in the packet, at the scale of the squares."""
        count = self._geometries.local_numbers if self._geometries is not None else 0
        if slot.geometry is None:
            return torch.zeros(count, dtype=torch.float64, device=self._device)
        own = slot.geometry.local_numbers()
        return slot.unscaled(own)
