"""The clock of a device, with a device whose kernels take prescribed times: who waits for whom is known exactly."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from paceline.observe import clock as host_clock
from paceline.observe.clock import PHASES
from paceline.observe.device_clock import STEP_PHASES, DeviceClock, DeviceTime, apportion
from paceline.observe.epoch import wait_shares


class Machine:
    """A host and a device in milliseconds: the host launches, the device follows in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.free_at = 0.0
        """When the device has done all that was launched."""
        monkeypatch.setattr(host_clock, "perf_counter_ns", lambda: round(self.now * 1e6))

    def launch(self, launching: float, computing: float) -> None:
        self.now += launching
        self.free_at = max(self.free_at, self.now) + computing

    def wait(self) -> None:
        self.now = max(self.now, self.free_at)

    def event(self) -> Mark:
        return Mark(self)


@dataclass
class Mark:
    machine: Machine
    at: float = -1.0

    def record(self) -> None:
        self.at = max(self.machine.free_at, self.machine.now)

    def query(self) -> bool:
        return self.at <= self.machine.now

    def elapsed_time(self, end: Mark) -> float:
        assert self.query(), "not done yet"
        assert end.query(), "not done yet"
        return end.at - self.at


def run(
    machine: Machine,
    clock: DeviceClock,
    steps: int,
    *,
    reading: float = 0.0,
    launching: float = 1.0,
    computing: float = 10.0,
    waiting: float = 2.0,
) -> None:
    """Steps of a training loop: data, forward and backward, reduction, update; a look at the losses every 8 steps."""
    clock.begin_epoch()
    for number in range(steps):
        machine.now += reading
        clock.begin_step()
        machine.launch(launching, computing)
        clock.lap("compute")
        machine.launch(0.0, waiting)
        clock.meet()
        machine.launch(launching / 2, 1.0)
        clock.lap("optimizer")
        clock.lap("compute")
        if number % 8 == 7:
            machine.wait()
            clock.lap("compute")
            clock.collect()
    machine.wait()
    clock.lap("compute")
    clock.collect()


def test_a_busy_device_is_divided_by_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    clock = DeviceClock(machine.event, every=4)
    before = clock.read()
    run(machine, clock, 64)
    device = clock.device
    assert device.num_steps == 16
    assert device.num_caught_up == 0
    per_step = {phase: 1e3 * value / device.num_steps for phase, value in device.seconds.items()}
    assert per_step == pytest.approx(
        {"data": 0.0, "transfer": 0.0, "compute": 10.0, "communication": 2.0, "optimizer": 1.0}
    )
    assert clock.waits.numbers == pytest.approx([0.002] * 16)
    host = host_clock.elapsed(before, clock.read())
    assert host["communication"] == 0.0, "the host launches it and goes on"
    true = apportion(host, device)
    assert tuple(true) == PHASES
    assert sum(true.values()) == pytest.approx(machine.now / 1e3)
    assert true["communication"] / true["compute"] == pytest.approx(0.2)


def test_a_device_that_waits_for_data_says_so_and_one_that_does_not_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    # The second is read while the device computes, but for one batch after each look at the losses.
    for reading, share in ((40.0, 1 - 14 / 41.5), (8.0, 8 / (8 + 1 + 8 * 13))):
        machine = Machine(monkeypatch)
        clock = DeviceClock(machine.event, every=1)
        run(machine, clock, 100, reading=reading)
        assert sum(apportion(clock.read(), clock.device).values()) == pytest.approx(machine.now / 1e3)
        found = apportion(clock.read(), clock.device)["data"] / (machine.now / 1e3)
        assert found == pytest.approx(share, abs=0.02)


def test_small_kernels_are_done_before_the_next_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    clock = DeviceClock(machine.event, every=4)
    run(machine, clock, 64, launching=10.0, computing=1.0, waiting=0.0)
    assert clock.device.num_caught_up == clock.device.num_steps == 16


def test_validation_within_a_sampled_step_is_not_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    clock = DeviceClock(machine.event, every=2)
    clock.begin_epoch()
    for _ in range(3):
        clock.begin_step()
        machine.launch(1.0, 10.0)
        clock.lap("compute")
        machine.launch(0.0, 1000.0)
        machine.wait()
        clock.lap("validation")
    clock.begin_step()
    clock.collect()
    assert clock.device.num_steps == 2
    assert 1e3 * sum(clock.device.seconds.values()) == pytest.approx(2 * 11.0), "launching it, and computing it"


def test_what_is_not_done_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    clock = DeviceClock(machine.event, every=1)
    clock.begin_epoch()
    for _ in range(3):
        clock.begin_step()
        machine.launch(1.0, 50.0)
        clock.lap("compute")
    clock.collect()
    assert clock.device.num_steps == 0
    machine.wait()
    clock.collect()
    assert clock.device.num_steps == 2, "the third has not ended"
    clock.begin_epoch()
    assert clock.device == DeviceTime()


def test_ranks_that_meet_between_steps_are_timed_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    clock = DeviceClock(machine.event, every=1)
    clock.begin_epoch(meets_on_host=True)
    for number in range(6):
        clock.begin_step()
        machine.launch(1.0, 5.0)
        clock.lap("optimizer")
        if number % 3 == 2:
            machine.wait()
            machine.now += 30.0
            clock.meet()
    clock.begin_step()
    clock.collect()
    assert clock.waits.numbers == pytest.approx([0.043, 0.043]), "what the device still had to do is waited for as well"
    assert "communication" not in clock.device.seconds
    host = clock.read()
    assert apportion(host, clock.device)["communication"] == host["communication"] == pytest.approx(0.086)


def test_two_devices_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is slow in computing, so the other's stream waits for it."""
    waits = []
    for computing, waiting in ((10.0, 6.0), (15.0, 1.0)):
        machine = Machine(monkeypatch)
        clock = DeviceClock(machine.event, every=4)
        run(machine, clock, 64, computing=computing, waiting=waiting)
        waits.append(clock.waits.numbers)
    found = wait_shares(waits)
    assert found is not None
    assert found.last == (0.0, 1.0)
    assert found.exchange == pytest.approx(2 / 7)


def test_the_first_batch_of_an_epoch_is_waited_for_outside_of_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    clock = DeviceClock(machine.event, every=4)
    clock.begin_epoch()
    machine.now += 500.0  # workers start
    clock.begin_step()
    for _ in range(12):
        machine.launch(1.0, 10.0)
        clock.lap("compute")
        machine.wait()
        clock.begin_step()
    clock.collect()
    host = clock.read()
    assert apportion(host, clock.device)["data"] == pytest.approx(0.5 + (host["data"] - 0.5), rel=0.2)


def test_without_a_sample_the_host_has_the_word() -> None:
    host = {**dict.fromkeys(PHASES, 0.0), "data": 1.0, "compute": 2.0}
    assert apportion(host, DeviceTime()) == host
    assert set(STEP_PHASES) < set(PHASES)
