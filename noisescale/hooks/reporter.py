"""Rank 0's end of the measuring: blocks, kept for the job's own questions and sent to a sink."""

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Protocol

from noisescale.blocks import BatchUnit, Block, BlockBuilder, main_geometry
from noisescale.errors import NotMeasuredError
from noisescale.estimate import Estimate, estimate
from noisescale.history import current_regime
from noisescale.hooks.checkpoint import restored_run, run_state
from noisescale.hooks.overhead import OverheadMeter
from noisescale.hooks.publish import Reading
from noisescale.hooks.steps import StepReader
from noisescale.sinks import Sink
from noisescale.wire import BlocksReport, RunInfo

_log = logging.getLogger(__name__)

KEPT_BLOCKS = 2000
"""Blocks kept in the job: more than an estimate's window ever takes."""

SEND_INTERVAL_S = 1.0
"""At most one report in so long a time; several blocks then go in one."""

HEARTBEAT_S = 10.0
"""A report at least so often, though there is nothing to say: the job is alive."""

MAX_UNSENT_BLOCKS = 500


class Reporter(Protocol):
    """What a monitor asks of either kind of reporter."""

    @property
    def attempt(self) -> int:
        """Which start of the job this is."""

    def take(self, reading: Reading) -> None:
        """One measured step, in order."""

    def refuse(self, why: str) -> None:
        """What was measured is not what it seemed."""

    def estimate(self) -> Estimate:
        """Of the current regime."""

    def blocks(self) -> list[Block]:
        """All that are known, the unfinished one too."""

    def info(self) -> RunInfo:
        """What is known of the run now."""

    def flush(self, timeout_s: float) -> bool:
        """Send what there is and wait for its delivery."""

    def close(self, timeout_s: float) -> bool:
        """Send what there is, say that the run has ended, and wait for its delivery."""

    def state(self, *, passes: int) -> dict[str, Any] | None:
        """To go on from; None where nothing is kept."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state() of this version."""


class SilentReporter:
    """Of every rank but 0: takes nothing, keeps nothing, sends nothing."""

    def __init__(self, *, rank: int, batch_unit: BatchUnit, meter: OverheadMeter, attempt: int) -> None:
        self.attempt = attempt
        self._rank = rank
        self._batch_unit: BatchUnit = batch_unit
        self._meter = meter

    def take(self, reading: Reading) -> None:
        """Nothing to do: rank 0 has the same numbers."""

    def refuse(self, why: str) -> None:
        """Nothing to do: rank 0 says it."""

    def estimate(self) -> Estimate:
        """Empty."""
        return Estimate(batch_unit=self._batch_unit)

    def blocks(self) -> list[Block]:
        """Never returns.

        Raises:
            NotMeasuredError: Always: rank 0 is the one to ask.
        """
        raise NotMeasuredError(
            f"rank {self._rank} keeps no measurements; ask on rank 0 of the model's process group"
        )

    def info(self) -> RunInfo:
        """Empty."""
        return RunInfo()

    def flush(self, timeout_s: float) -> bool:
        """Nothing waits."""
        return True

    def close(self, timeout_s: float) -> bool:
        """Nothing waits."""
        return True

    def state(self, *, passes: int) -> dict[str, Any] | None:
        """None: rank 0's is the state of the run."""
        return None

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing to do: rank 0 goes on from it."""


class RankZeroReporter:
    """Makes blocks of measured steps, answers from them, and sends them.

    Args:
        sink: Where reports go; None keeps them in the job.
        info: What is known of the run at its start.
        reader: Makes steps of readings.
        meter: Tells every how many steps is measured, and at what cost.
        world_size: Data-parallel ranks.
        attempt: Of every report.
    """

    def __init__(
        self,
        *,
        sink: Sink | None,
        info: RunInfo,
        reader: StepReader,
        meter: OverheadMeter,
        world_size: int,
        batch_unit: BatchUnit,
        attempt: int,
    ) -> None:
        self.attempt = attempt
        self._sink = sink
        self._info = info
        self._reader = reader
        self._meter = meter
        self._world_size = world_size
        self._builder = BlockBuilder(batch_unit=batch_unit)
        self._lock = threading.RLock()
        self._kept: deque[Block] = deque(maxlen=KEPT_BLOCKS)
        self._unsent: list[Block] = []
        self._micro_batches = 0
        self._seq = 0
        self._sent_at = float("-inf")
        self._refused = False
        self._broken = False
        self._closed = False
        self._pid = os.getpid()
        self._pulse: threading.Thread | None = None

    def take(self, reading: Reading) -> None:
        """One measured step: into the open block, and blocks that are full to the sink.

        What it raises stops the reports too.
        """
        if self._refused or self._closed or self._broken:
            return
        try:
            step = self._reader.read(reading)
            if step is None:
                return
            with self._lock:
                self._micro_batches = max(reading.tally.micro_batches, 1)
                self._keep(self._builder.add(step))
                self._start_pulse()
                self.send_if_due()
        except Exception:
            self._broken = True  # who calls says so; the pulse and the end would only meet it again
            raise

    def refuse(self, why: str) -> None:
        """Say so once, and forget what was measured and not yet sent."""
        if not self._refused:
            self._refused = True
            with self._lock:
                self._builder.close(final=True)
                self._unsent.clear()
                self._kept.clear()
            _log.error("%s", why)

    def estimate(self) -> Estimate:
        """Of the current regime, the unfinished block too."""
        blocks = current_regime(self.blocks()).blocks
        return estimate(blocks, geometry=main_geometry(blocks), every=self._meter.every).model_copy(
            update={"batch_unit": self._builder.batch_unit}
        )

    def blocks(self) -> list[Block]:
        """All that are kept; the unfinished one as it stands."""
        with self._lock:
            return [*self._kept, *deepcopy(self._builder).close(final=True)]

    def info(self) -> RunInfo:
        """What is known of the run now; layout and cost as last measured."""
        update: dict[str, object] = {"every": self._meter.every, "measured_share": self._meter.share}
        if self._kept and self._micro_batches:
            global_batch_size = self._kept[-1].global_batch_size
            update["accumulation_steps"] = self._micro_batches
            update["micro_batch_size"] = global_batch_size / (self._world_size * self._micro_batches)
        return self._info.model_copy(update=update)

    def flush(self, timeout_s: float) -> bool:
        """Close the open block, send, wait; whether all of it was delivered, in time."""
        with self._lock:
            self._keep(self._builder.close())
            if self._unsent:
                self._send()
        return self._sink is None or self._sink.flush(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Send the rest with the farewell, wait; whether all of it was delivered, in time."""
        if self._closed or os.getpid() != self._pid:
            return True
        with self._lock:
            self._closed = True
            try:
                self._keep(self._builder.close(final=True))
                self._send(ended=True)
            except Exception as error:  # noqa: BLE001  a job must not fail at its end for this
                self.give_up(error)
        return (self._sink is None or self._sink.close(timeout_s)) and not self._broken

    def give_up(self, error: Exception) -> None:
        """Report nothing more, and say so once."""
        if not self._broken:
            self._broken = True
            _log.error("noisescale stops reporting; training is not affected", exc_info=error)

    def state(self, *, passes: int) -> dict[str, Any]:
        """See noisescale.hooks.checkpoint.

        Args:
            passes: Synchronised backward passes since attaching.
        """
        with self._lock:
            return run_state(
                builder=self._builder,
                blocks=self._kept,
                next_step=self._reader.first_step + passes,
                every=self._meter.every,
                attempt=self.attempt,
            )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state(): step numbers, blocks, the open block.

        The attempt becomes later than the one that saved it, though this machine's clock may be behind:
        else what it repeats would not take the place of what was sent then.

        Raises:
            StateError: It is of another version or another batch unit, or no such state.
        """
        restored = restored_run(state, like=self._builder)
        with self._lock:
            self._kept = deque(restored.blocks, maxlen=KEPT_BLOCKS)
            self._builder = restored.builder
            self._reader.first_step = restored.next_step
            self._meter.resume(restored.every)
            self.attempt = max(self.attempt, restored.attempt + 1)

    def send_if_due(self) -> None:
        """What the pulse does every second: old blocks go, and a sign of life now and then."""
        with self._lock:
            if self._sink is None or self._closed or self._refused or self._broken:
                return
            if self._builder.age_s() >= self._builder.max_age_s:
                self._keep(self._builder.close())
            since = time.monotonic() - self._sent_at
            due = self._unsent and (since >= SEND_INTERVAL_S or len(self._unsent) >= MAX_UNSENT_BLOCKS)
            if due or since >= HEARTBEAT_S:
                self._send()

    @property
    def is_open(self) -> bool:
        return not (self._closed or self._broken)

    def _keep(self, blocks: list[Block]) -> None:
        self._kept.extend(blocks)
        if self._sink is not None:
            self._unsent.extend(blocks)

    def _send(self, *, ended: bool = False) -> None:
        if self._sink is None:
            return
        report = BlocksReport(
            attempt=self.attempt, seq=self._seq, run=self.info(), blocks=tuple(self._unsent), ended=ended
        )
        self._unsent.clear()
        self._seq += 1
        self._sent_at = time.monotonic()
        self._sink.report(report)

    def _start_pulse(self) -> None:
        if self._pulse is None and self._sink is not None:
            self._pulse = threading.Thread(
                target=_pulse, args=(weakref.ref(self),), name="noisescale pulse", daemon=True
            )
            self._pulse.start()


def _pulse(reporter: "weakref.ref[RankZeroReporter]") -> None:
    """Until the reporter is closed or gone; a thread, so that a long evaluation looks alive."""
    while True:
        time.sleep(SEND_INTERVAL_S)
        alive = reporter()
        if alive is None or not alive.is_open:
            return
        try:
            alive.send_if_due()
        except Exception as error:  # noqa: BLE001  a thread that ends by it would say so in no log
            alive.give_up(error)
        del alive
