"""Rows go through worker 0: every worker gets all of them, and learns who is gone."""

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import numpy as np
import pytest
from support.guard import GUARD_SECONDS

from evenstep.core.errors import WorkerLostError
from evenstep.launch.supervisor import first_message
from evenstep.worker.api.row_exchange import RowExchange

WORKERS = 3


@pytest.fixture
def together():
    """Runs a function of each rank's exchange on all workers at the same time; an exception is its result."""
    barrier, vectors = Barrier(WORKERS), {}

    def made(rank):
        def add_up(vector):
            vectors[rank] = vector
            barrier.wait()
            return sum(vectors.values())

        return RowExchange(rank=rank, workers=WORKERS, host="127.0.0.1", framework="a framework", add_up=add_up)

    def run(function):
        def one(rank):
            try:
                return function(exchanges[rank], rank)
            except WorkerLostError as error:
                return error

        return list(pool.map(one, range(WORKERS)))

    with ThreadPoolExecutor(WORKERS) as pool:
        exchanges = list(pool.map(made, range(WORKERS)))
        yield run
        for each in exchanges:
            for peer in each._peers.values():
                peer.close()


def gone(exchange):
    """As the end of its process does."""
    peers, exchange._peers = exchange._peers, {}
    for peer in peers.values():
        peer.close()


def test_every_worker_has_the_rows_of_all_by_rank(together):
    for number in range(3):
        rows = [np.full(5 + number, rank, np.uint8).tobytes() for rank in range(WORKERS)]
        assert together(lambda exchange, rank, rows=rows: exchange.all_gather(rows[rank])) == [rows] * WORKERS


def test_one_worker_has_its_row():
    assert RowExchange(rank=0, workers=1, host="", framework="", add_up=None).all_gather(b"row") == [b"row"]


@pytest.mark.parametrize("lost", range(WORKERS))
def test_a_worker_that_dies_before_its_row_is_named(together, lost):
    found = together(lambda exchange, rank: gone(exchange) if rank == lost else exchange.all_gather(b"row"))
    assert found.pop(lost) is None
    assert [str(each) for each in found] == [f"worker {lost} is gone: its own output tells why"] * 2


@pytest.mark.parametrize("lost", range(WORKERS))
def test_a_worker_that_dies_in_an_exchange_of_the_framework_is_named(together, lost):
    found = together(lambda exchange, rank: gone(exchange) if rank == lost else exchange.failed())
    assert found.pop(lost) is None
    assert [str(each) for each in found] == [f"worker {lost} is gone: its own output tells why"] * 2


class EndsAtOnce:
    """Worker 0's connection to a worker whose process ends as soon as it has its rows, before others have theirs."""

    def __init__(self, peer, ended, news):
        self._peer, self._ended, self._news = peer, ended, news

    def send(self, *message, **options):
        self._peer.send(*message, **options)
        self._ended.wait()
        for _ in range(10_000):
            if not self._news.empty():
                return
            os.sched_yield()

    def close(self):
        self._peer.close()


def test_a_worker_that_ends_with_its_rows_leaves_the_others_theirs(together):
    ended = Event()

    def function(exchange, rank):
        if rank == 0:
            exchange._peers[1] = EndsAtOnce(exchange._peers[1], ended, exchange._came)
            exchange._peers = dict(sorted(exchange._peers.items()))
        rows = exchange.all_gather(b"row")
        if rank == 1:
            gone(exchange)
            ended.set()
        return rows

    assert together(function) == [[b"row"] * WORKERS] * WORKERS


def test_a_worker_is_named_while_worker_0_waits_in_the_framework(together):
    here = Barrier(2)

    def function(exchange, rank):
        if rank == 2:
            return gone(exchange)
        if rank == 1:
            try:
                exchange.failed()
            finally:
                here.wait()
        return here.wait()

    assert str(together(function)[1]) == "worker 2 is gone: its own output tells why"


def test_an_error_of_the_framework_that_no_loss_explains_says_nothing(together, monkeypatch):
    monkeypatch.setattr("evenstep.worker.api.row_exchange.NEWS_SECONDS", 0.01)
    assert together(lambda exchange, _: exchange.failed()) == [None] * WORKERS


@pytest.mark.parametrize("late", range(WORKERS))
def test_a_worker_that_does_not_come_in_time_is_named_by_all_others(together, monkeypatch, late):
    monkeypatch.setattr("evenstep.worker.api.row_exchange.NEWS_SECONDS", 0.01 if late == 0 else GUARD_SECONDS)
    missed = Barrier(WORKERS)

    def function(exchange, rank):
        try:
            if rank == late:
                return None
            exchange.limit(0.01)
            while rank == 0 and exchange._came.empty():  # A busy machine may take as long as it needs.
                os.sched_yield()
            return exchange.all_gather(b"row")
        finally:
            missed.wait()

    found = together(function)
    assert found.pop(late) is None
    said = f"worker {late} did not come to the next exchange within 0.01 s: see what its script does there"
    assert [str(each).partition(", then")[0] for each in found] == [said] * 2


def test_the_launcher_is_told_of_a_loss_that_a_framework_has_wrapped(together, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error"))
    lost = together(lambda exchange, rank: gone(exchange) if rank == 2 else exchange.failed() or exchange)[0]
    assert isinstance(lost, WorkerLostError)

    def shown(exchange, rank):
        if rank == 1:
            exchange._show = lambda *error: None
            exchange._tell(RuntimeError, RuntimeError("of the framework"), None)

    together(shown)
    assert first_message(str(tmp_path / "error")) == "WorkerLostError: worker 2 is gone: its own output tells why"
