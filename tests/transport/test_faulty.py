"""Faults befall the messages that the plan names, are counted, and cost no time under a clock that jumps."""

import os
import threading
import time
from itertools import pairwise

import pytest
from support.clocks import FakeClock
from support.faulty import Fault, Faulty, never_in_a_row, scripted, seeded
from support.in_memory import connected_pair

from evenstep.core.errors import ConfigError
from evenstep.transport.base import SilentError

YEAR = 3.2e7


def arrivals(plan, messages, **options):
    """The numbers of the messages as they arrive, and what befell them."""
    here, there = connected_pair(clock=FakeClock())
    faulty = Faulty(here, plan, **options)
    for number in range(messages):
        faulty.send(str(number).encode(), memoryview(bytes([number])))
    arrived = received(there)
    faulty.close()
    there.close()
    return arrived, dict(faulty.fired)


def received(connection):
    numbers = []
    while True:
        try:
            message = connection.receive(YEAR)
        except SilentError:
            return numbers
        room = bytearray(1)
        connection.receive_payload(memoryview(room))
        assert room == bytes([int(message.header)])
        numbers.append(int(message.header))


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({1: Fault.DROP}, [0, 2, 3, 4]),
        ({1: Fault.DUPLICATE}, [0, 1, 1, 2, 3, 4]),
        ({1: Fault.REORDER}, [0, 2, 1, 3, 4]),
        ({1: Fault.DELAY}, [0, 2, 3, 1, 4]),
        ({0: Fault.DELAY, 1: Fault.REORDER, 2: Fault.DROP, 3: Fault.DUPLICATE}, [0, 1, 3, 3, 4]),
        ({4: Fault.DELAY}, [0, 1, 2, 3]),
    ],
)
def test_a_scripted_fault_befalls_its_message_and_is_counted(faults, expected):
    arrived, fired = arrivals(scripted(faults), 5, later=2)
    assert sorted(arrived) == sorted(expected)
    assert fired == {fault: list(faults.values()).count(fault) for fault in faults.values()}
    if len(faults) < 2:
        assert arrived == expected


def test_seeded_faults_depend_on_the_seed_and_the_number_alone():
    rates = {Fault.DROP: 0.1, Fault.DUPLICATE: 0.2, Fault.DELAY: 0.1, Fault.REORDER: 0.1}
    plan, same, other = seeded(1, rates), seeded(1, rates), seeded(2, rates)
    drawn = [plan(number) for number in range(4000)]
    assert [same(number) for number in reversed(range(4000))] == drawn[::-1]
    assert [other(number) for number in range(4000)] != drawn
    for fault, rate in rates.items():
        assert abs(drawn.count(fault) / 4000 - rate) < 0.03
    arrived, fired = arrivals(plan, 200)
    assert set(fired) == set(rates)
    assert len(arrived) >= 200 - fired[Fault.DROP] + fired[Fault.DUPLICATE] - 3


def test_of_neighbouring_messages_one_arrives_in_its_place():
    plan = seeded(1, {Fault.DROP: 0.3, Fault.DUPLICATE: 0.2, Fault.DELAY: 0.3})
    spared = [never_in_a_row(plan)(number) for number in range(1000)]
    away = [number for number, fault in enumerate(spared) if fault in (Fault.DROP, Fault.DELAY)]
    assert len(away) > 100
    assert min(later - number for number, later in pairwise(away)) > 1
    assert all(fault == plan(number) for number, fault in enumerate(spared) if fault)


@pytest.mark.parametrize("rates", [{Fault.DROP: -0.1}, {Fault.DROP: 0.6, Fault.DELAY: 0.6}])
def test_rates_that_cannot_be_are_refused(rates):
    with pytest.raises(ConfigError, match="use rates"):
        seeded(0, rates)


def test_what_is_held_back_can_be_released_and_its_files_are_closed_otherwise():
    here, there = connected_pair(clock=FakeClock())
    with Faulty(here, scripted({0: Fault.DELAY, 1: Fault.DELAY})) as faulty, there:
        reader, writer = os.pipe()
        faulty.send(b"0", memoryview(b"\0"), files=[writer])
        with pytest.raises(SilentError):
            there.receive(YEAR)
        faulty.release()
        (descriptor,) = there.receive(YEAR).files
        os.close(descriptor)
        faulty.send(b"1", files=[writer])
        os.close(writer)
    assert os.read(reader, 1) == b"", "a held message kept its file open"
    os.close(reader)


def test_a_timeout_in_memory_takes_as_long_as_the_clock_says_and_no_time_at_all():
    clock = FakeClock()
    here, there = connected_pair(clock=clock)
    began = time.monotonic()
    for timeout in (0.0, 5.0, YEAR):
        before = clock.now()
        with pytest.raises(SilentError):
            here.receive(timeout)
        assert clock.now() - before == timeout
    assert time.monotonic() - began < YEAR
    here.close()
    there.close()


def test_time_stands_still_while_a_thread_works_and_goes_to_the_first_timeout():
    clock = FakeClock(threads=2)
    here, there = connected_pair(clock=clock)
    timeouts = []

    def serve():
        for _ in range(100):
            there.send(there.receive(YEAR).header)
        try:
            there.receive(YEAR)
        except SilentError:
            timeouts.append(clock.now())
        clock.leave()

    thread = threading.Thread(target=serve)
    thread.start()
    for number in range(100):
        here.send(str(number).encode())
        assert here.receive(1.0).header == str(number).encode(), "a timeout struck although the peer was at work"
    assert clock.now() == 0.0
    with pytest.raises(SilentError):
        here.receive(1.0)
    assert clock.now() == 1.0
    with pytest.raises(SilentError):
        here.receive(2 * YEAR)
    thread.join()
    assert timeouts == [YEAR]
    here.close()
    there.close()
