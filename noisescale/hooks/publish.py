"""From device to host without waiting: one measured step's numbers, read one step late.

On a CPU a number is there as soon as the all-reduce is done. On an accelerator it is copied to
pinned memory behind the kernels that make it, and read once an event says that the copy is done.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from noisescale.hooks.counting import Tally
from noisescale.hooks.geometry.sampled import GeometryStep
from noisescale.hooks.reduction import Packet

POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class Reading:
    """One measured step, on the host.

    Attributes:
        step: Synchronised backward passes before this one, since the monitor was attached.
        packet: Summed over ranks.
        global_squares: Per layer group, |mean over ranks of g|^2 as the optimizer sees it; empty
            on ranks that report nothing.
        geometry_numbers: What GeometryStep.finish gave; empty where no geometry was sampled.
        divisor: What the sum over ranks was divided by.
        tally: Of this rank.
        learning_rate: Of the optimizer step that followed; None if there was none yet.
        error: What went wrong with this rank's own numbers, which are then not there. The packet is,
            for what it says holds on every rank.
    """

    step: int
    packet: Packet
    global_squares: tuple[float, ...]
    geometry_numbers: tuple[float, ...]
    divisor: int
    tally: Tally
    learning_rate: float | None
    error: Exception | None = None


@dataclass(slots=True)
class Slot:
    """One measured step on its way to the host.

    Attributes:
        measuring: Whether this rank takes norms; False where it failed and only takes part.
        local_squares, global_squares: Per bucket, or whatever else the capture takes the gradient
            in pieces by: a float64 vector over layer groups.
        shard_squares: Of a sharded model, this rank's part of the averaged gradient's squares.
        unscale: 0-d float64 factor of the squares that undoes a loss scale.
        carried: 0-d float64; above 0 where the samples are not what they seem, as of Packet.
        cost_s: Host time spent in measuring so far.
    """

    step: int
    tally: Tally
    divisor: int
    examples: int
    measuring: bool
    local_squares: dict[int, Tensor] = field(default_factory=dict)
    global_squares: dict[int, Tensor] = field(default_factory=dict)
    shard_squares: Tensor | None = None
    unscale: Tensor | None = None
    carried: Tensor | None = None
    learning_rate: float | Tensor | None = None
    geometry: GeometryStep | None = None
    cost_s: float = 0.0
    packet: Tensor | None = None
    work: Any = None
    reading: Reading | None = None
    _host: Tensor | None = None
    _rate_copied: bool = False
    _geometry_numbers: int = 0
    _event: Any = None
    _error: Exception | None = None

    def local_total(self) -> Tensor:
        """Per layer group, this rank's |g|^2, a float64 vector."""
        return self._total(self.local_squares)

    def is_ready(self) -> bool:
        """Whether read() would not wait; on an accelerator also starts the copy to the host."""
        if self._host is None:
            if not self.work.is_completed() or not (self.geometry is None or self.geometry.is_ready()):
                return False
            self.work.wait()
            self._start_copy()
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Until it is ready, however long the other ranks take."""
        if self._host is None:
            self.work.wait()
            self._start_copy()
        if self._event is not None:
            self._event.synchronize()

    def wait_for(self, *, deadline: float) -> bool:
        """Until it is ready or time.monotonic() reaches the deadline; whether it is ready."""
        while not self.is_ready():
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    def read(self) -> Reading:
        """The numbers, once it is ready; only the first call reads them."""
        if self.reading is None:
            if self._host is None or self.packet is None:
                raise RuntimeError("a slot was read before it was ready")
            numbers: list[float] = self._host.tolist()
            split = self.packet.numel()
            rate = self.learning_rate if not isinstance(self.learning_rate, Tensor) else None
            if self._rate_copied:
                rate = numbers.pop()
            until = len(numbers) - self._geometry_numbers
            self.reading = Reading(
                step=self.step,
                packet=Packet.read(numbers[:split]),
                global_squares=tuple(numbers[split:until]),
                geometry_numbers=tuple(numbers[until:]),
                divisor=self.divisor,
                tally=self.tally,
                learning_rate=rate,
                error=self._error,
            )
            self.local_squares.clear()
            self.global_squares.clear()
        return self.reading

    def _start_copy(self) -> None:
        if self.packet is None:
            raise RuntimeError("a slot was copied before its packet was sent")
        if self.geometry is not None:
            self.geometry.wait()
        try:
            own = self._own_numbers(self.packet.device)
        except Exception as error:  # noqa: BLE001  told with the reading
            self._error, own = error, []
            self._geometry_numbers, self._rate_copied = 0, False
        self.geometry = None
        self._copy(torch.cat([self.packet, *own]))

    def _own_numbers(self, device: torch.device) -> list[Tensor]:
        """What only this rank knows, behind the packet: one step's numbers of the averaged gradient."""
        parts: list[Tensor] = []
        if self.global_squares:
            parts.append(self._total(self.global_squares))
            if self.geometry is not None:
                parts.append(self.geometry.finish(unscale=self.unscale).to(device, non_blocking=True))
                self._geometry_numbers = parts[-1].numel()
        if isinstance(self.learning_rate, Tensor):
            parts.append(self.learning_rate.double().reshape(1).to(device, non_blocking=True))
            self._rate_copied = True
        return parts

    def _copy(self, numbers: Tensor) -> None:
        if numbers.device.type == "cpu":
            self._host = numbers
            return
        self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._host.copy_(numbers, non_blocking=True)
        self._event = torch.Event(numbers.device)
        self._event.record()

    def _total(self, squares: dict[int, Tensor]) -> Tensor:
        # In the order of the pieces, not of their arrival, so that the sum has the same digits
        # every time.
        pieces = [squares[index] for index in sorted(squares)]
        device = pieces[0].device
        for piece in pieces if device.type != "cpu" else ():
            piece.record_stream(torch.accelerator.current_stream())
        return self.unscaled(
            torch.stack([piece.to(device, non_blocking=True) for piece in pieces]).sum(dim=0)
        )

    def unscaled(self, squares: Tensor) -> Tensor:
        """Without the loss scale."""
        return (
            squares if self.unscale is None else squares * self.unscale.to(squares.device, non_blocking=True)
        )


class SlotQueue:
    """Measured steps that were sent, oldest first; its owner keeps it short."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []

    def __len__(self) -> int:
        return len(self._slots)

    def push(self, slot: Slot) -> None:
        """One more, whose packet is on its way."""
        self._slots.append(slot)

    def pop(self) -> Slot:
        """The oldest, taken out."""
        return self._slots.pop(0)

    @property
    def newest(self) -> Slot | None:
        return self._slots[-1] if self._slots else None

    def newly_read(self, *, deadline: float | None = None) -> Iterator[Reading]:
        """In order, those that have become ready and were not read before.

        Args:
            deadline: Wait for each until then, in time.monotonic(); None does not wait.
        """
        for slot in list(self._slots):
            if slot.reading is not None:
                continue
            if not (slot.is_ready() if deadline is None else slot.wait_for(deadline=deadline)):
                return
            yield slot.read()

    @property
    def all_read(self) -> bool:
        return all(slot.reading is not None for slot in self._slots)
