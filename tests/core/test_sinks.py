"""BackgroundSink: what training may rely on, with real threads and real forks."""

import copy
import logging
import os
import pickle
import threading

import pytest

from noisescale.blocks import Block, MomentSums
from noisescale.errors import InvalidInputError
from noisescale.sinks import BackgroundSink
from noisescale.wire import BlocksReport


def a_report(step: int, *, blocks: int = 1) -> BlocksReport:
    sums = MomentSums(
        trace_covariance=40.0,
        true_grad_sq_norm=0.1,
        trace_covariance_sq=160.0,
        true_grad_sq_norm_sq=0.01,
        product=0.4,
    )
    return BlocksReport(
        attempt=1,
        seq=step,
        blocks=tuple(
            Block(
                first_step=step + i,
                last_step=step + i,
                measured_steps=1,
                examples=32,
                global_batch_size=32,
                sums=(sums,),
            )
            for i in range(blocks)
        ),
    )


class Destination:
    """Collects what is delivered; can be made to wait or to fail."""

    def __init__(self) -> None:
        self.received: list[BlocksReport] = []
        self.started = threading.Event()
        self.open = threading.Event()
        self.open.set()
        self.fail = False

    def deliver(self, report: BlocksReport) -> None:
        self.started.set()
        assert self.open.wait(timeout=60), "the test never opened the destination"
        if self.fail:
            raise OSError("the disk is full")
        self.received.append(report)

    @property
    def seqs(self) -> list[int]:
        return [report.seq for report in self.received]


def sink_of_one_busy(destination: Destination, *, capacity: int) -> BackgroundSink:
    """A sink whose thread is busy with report 0, so that all further ones wait."""
    sink = BackgroundSink(destination.deliver, name="test", capacity=capacity)
    destination.open.clear()
    sink.report(a_report(0))
    assert destination.started.wait(timeout=60)
    return sink


def test_reports_arrive_in_order() -> None:
    """Everything is delivered, once, in the order it was reported; nothing is dropped."""
    destination = Destination()
    sink = BackgroundSink(destination.deliver, name="test")
    for step in range(100):
        sink.report(a_report(step))
    assert sink.flush(60)
    assert destination.seqs == list(range(100))
    assert sink.dropped_blocks == 0
    assert sink.close(60)


def test_a_full_queue_drops_the_oldest_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """With room for 3, the last 3 of 10 survive; the 7 lost are counted, reported on, and said once."""
    destination = Destination()
    sink = sink_of_one_busy(destination, capacity=3)
    with caplog.at_level(logging.WARNING, logger="noisescale.sinks"):
        for step in range(1, 11):
            sink.report(a_report(step, blocks=2))
    assert sink.dropped_blocks == 14
    assert len(caplog.records) == 1
    assert "3 reports are waiting" in caplog.text
    destination.open.set()
    assert sink.flush(60)
    assert destination.seqs == [0, 8, 9, 10]
    assert [report.dropped_blocks for report in destination.received] == [0, 14, 14, 14]
    sink.close(60)


def test_dropped_blocks_add_to_what_the_report_knew() -> None:
    """A count that the report already carries is added to, not replaced."""
    destination = Destination()
    sink = sink_of_one_busy(destination, capacity=1)
    sink.report(a_report(1))
    sink.report(a_report(2).model_copy(update={"dropped_blocks": 5}))
    destination.open.set()
    assert sink.close(60)
    assert destination.received[-1].dropped_blocks == 6


def test_a_failing_delivery_is_said_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """What deliver raises never comes out; it is logged once and its blocks count as dropped."""
    destination = Destination()
    destination.fail = True
    sink = BackgroundSink(destination.deliver, name="test")
    with caplog.at_level(logging.WARNING, logger="noisescale.sinks"):
        sink.report(a_report(0))
        assert not sink.flush(60), "a flush during which something was lost has not delivered all"
        sink.report(a_report(1, blocks=3))
        assert not sink.flush(60)
    assert sink.dropped_blocks == 4
    assert len(caplog.records) == 1
    assert "OSError: the disk is full" in caplog.text
    destination.fail = False
    sink.report(a_report(2))
    assert sink.close(60)
    assert destination.seqs == [2]
    assert destination.received[0].dropped_blocks == 4


def test_flush_gives_up_in_time() -> None:
    """A delivery that hangs makes flush answer False, and close too; nothing waits longer than told."""
    destination = Destination()
    sink = sink_of_one_busy(destination, capacity=8)
    sink.report(a_report(1))
    assert not sink.flush(0.05)
    assert sink.dropped_blocks == 0, "a flush only waits"
    assert not sink.close(0.05)
    assert sink.dropped_blocks == 1, "what close could not deliver is dropped"
    destination.open.set()


def test_reports_after_close_are_dropped_and_counted() -> None:
    """A closed sink takes nothing more, does not raise, and counts; closing twice is harmless."""
    destination = Destination()
    sink = BackgroundSink(destination.deliver, name="test")
    assert sink.close(60)
    sink.report(a_report(0, blocks=2))
    assert sink.dropped_blocks == 2
    assert sink.close(60)
    assert destination.received == []


def test_neighbours_are_combined() -> None:
    """Reports that wait are combined by `combine` as long as it answers one, in order."""

    def combine(first: BlocksReport, second: BlocksReport) -> BlocksReport | None:
        if len(first.blocks) + len(second.blocks) > 3:
            return None
        return second.model_copy(update={"blocks": first.blocks + second.blocks})

    destination = Destination()
    sink = BackgroundSink(destination.deliver, name="test", combine=combine)
    destination.open.clear()
    sink.report(a_report(0))
    assert destination.started.wait(timeout=60)
    for step in range(1, 8):
        sink.report(a_report(step))
    destination.open.set()
    assert sink.close(60)
    steps = [[block.first_step for block in report.blocks] for report in destination.received]
    assert steps == [[0], [1, 2, 3], [4, 5, 6], [7]]


def test_a_pause_ends_with_a_flush_and_with_close() -> None:
    """A delivery that sleeps between tries is woken by flush to try once more, and by close to stop."""
    tries: list[bool] = []
    slept = threading.Event()

    def deliver(report: BlocksReport) -> None:
        go_on = True
        while go_on:
            slept.set()
            go_on = sink.pause(600)
            tries.append(go_on)
        raise OSError("never got through")

    sink = BackgroundSink(deliver, name="test")
    sink.report(a_report(0))
    assert slept.wait(timeout=60)
    assert not sink.flush(0.2)
    assert not sink.close(0.2)
    for thread in threading.enumerate():
        if thread.name == "noisescale to test":
            thread.join(timeout=60)
    assert tries[-1] is False
    assert True in tries[:-1]
    assert sink.dropped_blocks == 1


def test_a_forked_child_starts_afresh() -> None:
    """A fork while the parent's lock is held: the child reports and flushes, the parent keeps its queue."""
    destination = Destination()
    sink = sink_of_one_busy(destination, capacity=8)
    sink.report(a_report(1))
    with sink._changed:  # the worst moment to fork at
        pid = os.fork()
        if pid == 0:
            try:
                destination.open.set()
                destination.received.clear()
                sink.report(a_report(7))
                good = sink.flush(30) and destination.seqs == [7]
                os._exit(0 if good else 1)
            finally:
                os._exit(2)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    destination.open.set()
    assert sink.close(60)
    assert destination.seqs == [0, 1]


def _print_report(report: BlocksReport) -> None:
    print(report.seq)  # noqa: T201  a module-level function, so that it pickles


def test_a_sink_pickles_and_copies() -> None:
    """A sink in use pickles and deep-copies into a fresh, working one; the original is untouched."""
    sink = BackgroundSink(_print_report, name="test", capacity=5)
    sink.report(a_report(0))
    for copied in (pickle.loads(pickle.dumps(sink)), copy.deepcopy(sink)):  # noqa: S301  our own bytes
        assert (copied.name, copied.capacity, copied.dropped_blocks) == ("test", 5, 0)
        copied.report(a_report(1))
        assert copied.close(60)
    assert sink.close(60)


def test_a_thread_that_cannot_start_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where no thread can be had (a process limit), reports are dropped, counted and said once."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    sink = BackgroundSink(_print_report, name="test")
    with caplog.at_level(logging.WARNING, logger="noisescale.sinks"):
        sink.report(a_report(0))
        sink.report(a_report(1))
    assert sink.dropped_blocks == 2
    assert len(caplog.records) == 1
    assert "can't start new thread" in caplog.text


def test_a_capacity_of_nothing_is_refused() -> None:
    """A queue with no room is an error at construction, by name."""
    with pytest.raises(InvalidInputError, match="capacity must be at least 1"):
        BackgroundSink(_print_report, name="test", capacity=0)
