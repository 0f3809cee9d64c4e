"""What is JAX's own: its page, how long it compiles, and what is refused."""

import re
import subprocess
import sys
import threading

import numpy as np
import pytest
from support.frameworks.table import require
from support.guard import GUARD_SECONDS
from support.ports import free_port

import evenstep

require("jax")

ROWS = np.arange(20.0, dtype=np.float32)


class Short:
    """Data that leave out a sample."""

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, indices):
        return ROWS[indices][:-1]


def session_of(scheme="bsp", **given):
    from evenstep.jax import Session

    return Session(scheme, **{"weights": ROWS, "data": ROWS, "global_batch_size": 8, "shuffle": False} | given)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"data": iter([1, 2])},
            "data must be arrays with a row for each sample, which can be indexed, not list_iterator",
        ),
        ({"data": "rows"}, "data must be arrays with a row for each sample, which can be indexed, not 'rows'"),
        ({"data": [1, 2]}, "data must be arrays with a row for each sample, which can be indexed, not 1"),
        (
            {"data": (ROWS, ROWS[:5])},
            "the arrays of data must have equally many rows, one for each sample, but they ha",
        ),
        ({"data": ()}, "the arrays of data must have equally many rows, one for each sample, but there are none"),
        ({"data": Short()}, "the data returned an array of shape [2] for 3 indices: let its __getitem__ take an array"),
        ({"partition": "private"}, "partition must be 'common' or None, not 'private': data that stay with their"),
        ({"timeout": 0}, "timeout must be a positive number of seconds"),
        ({"pad": 0}, "pad must be a whole number from 1"),
        ({"weights": {"name": "text"}}, "workers exchange numbers and arrays of numbers, not 'text': leave it out"),
        ({"scheme": "ssp"}, "the scheme 'ssp' trains on parameter servers: use evenstep.Client"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(given, sentence):
    with pytest.raises(evenstep.ConfigError, match="^" + re.escape(sentence)):
        session_of(**given)


def test_a_process_that_does_not_know_the_others_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        evenstep.ConfigError, match=r"^WORLD_SIZE says that there are 2 processes.*call jax\.distributed"
    ):
        session_of()


@pytest.mark.parametrize(
    ("given", "multiple"),
    [
        ({"scheme": "lb-bsp"}, 1),
        ({"scheme": "lb-bsp:multiple=2"}, 2),
        ({"scheme": "lb-bsp", "pad": 4}, 4),
        ({"scheme": "lb-bsp:multiple=2", "pad": 4}, 2),
        ({"scheme": "lb-bsp", "pad": 5}, 1),  # The global batch is no multiple of it.
        ({"scheme": "bsp", "pad": 4}, 1),
    ],
)
def test_sizes_that_follow_speeds_are_multiples_of_what_batches_are_padded_to(given, multiple):
    session = session_of(**given)
    assert session._balancer.scheme.load.multiple == multiple
    session.close()


def test_a_mean_is_of_numbers_and_of_a_batch():
    session = session_of()
    with pytest.raises(evenstep.ConfigError, match=r"^there is no batch to take a mean over"):
        session.mean(ROWS)
    epoch = session.epoch()
    next(epoch)
    with pytest.raises(evenstep.ConfigError, match=r"^a mean over workers is of floating-point numbers, not of int"):
        session.mean({"loss": ROWS, "count": np.arange(3)})
    for other, told in (("text", "'text'"), ("float32", "'float32'"), (np.array(["text"]), "<U4")):
        with pytest.raises(evenstep.ConfigError, match=f"^workers exchange numbers and arrays of numbers, not {told}:"):
            session.mean({"loss": ROWS, "name": other})
    assert session.mean(ROWS) is ROWS  # What was refused has not ended the batch.
    epoch.close()
    with pytest.raises(evenstep.ConfigError, match=r"^there is no batch to take a mean over"):
        session.mean(ROWS)


def test_a_mean_inside_of_jit_is_refused():
    import jax

    session = session_of()
    for _ in session.epoch():
        with pytest.raises(evenstep.ConfigError, match=r"which jit cannot trace: call it outside of jit"):
            jax.jit(session.mean)(ROWS)
        break


RAISES = """
import sys

import jax
import numpy as np

import evenstep.jax

address, rank = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, rank, shutdown_timeout_seconds=10)
session = evenstep.jax.Session("bsp", weights=(), data=np.arange(100.0), global_batch_size=10)
for batch in session.epoch():
    if rank == 1 and session.share.iteration == 2:
        raise ValueError("an error of the script")
    session.mean(batch)
"""


@pytest.mark.multiprocess
def test_an_error_in_the_script_of_one_worker_ends_the_others(tmp_path):
    """At its exit jax.distributed waits for all processes, so the connections to them end before."""
    (tmp_path / "train.py").write_text(RAISES)
    address = f"127.0.0.1:{free_port()}"
    workers = [
        subprocess.Popen(
            [sys.executable, "train.py", address, str(rank)], cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    first, second = (worker.communicate(timeout=GUARD_SECONDS)[1] for worker in workers)
    assert "ValueError: an error of the script" in second
    assert "WorkerLostError: worker 1 is gone: its own output tells why" in first
    assert [worker.returncode for worker in workers] == [1, 1]


UNLIKE = """
import sys

import jax
import numpy as np

import evenstep
import evenstep.jax

address, rank = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, rank)


def session_of(rows=np.arange(100.0), weights=(), **given):
    return evenstep.jax.Session("bsp", weights=weights, data=rows, global_batch_size=10, **given)


def said(call):
    try:
        call()
    except evenstep.EvenstepError as error:
        return str(error)


shard = np.arange(100.0)[rank::2]
assert said(lambda: session_of(shard, partition="common")) is None
told = said(lambda: session_of(shard))
assert told.startswith("worker 1 has other samples than worker 0, in a dataset of the same length"), told
weights = {"bias": np.zeros(3, "float32"), "key": jax.random.key(rank)}
assert said(lambda: session_of(weights=weights | {"key": jax.random.key(1)})) is None
told = said(lambda: session_of(weights=weights))
assert told.startswith("worker 1 has \\"an array ['key']: key<fry> [] with the checksum "), told
assert told.endswith("start every worker with the same model and optimizer"), told
session = session_of()
for batch in session.epoch():
    told = said(lambda: session.mean(np.ones(2 + rank, "float32")))
    assert told.startswith("worker 1 has 'an array : float32 [3]' where worker 0 has 'an array : float32 [2]'"), told
    everywhere = jax.sharding.NamedSharding(jax.make_mesh((2,), "d"), jax.sharding.PartitionSpec("d"))
    spread = jax.make_array_from_process_local_data(everywhere, np.ones(1, "float32"))
    for call in (lambda: session.mean(spread), lambda: session_of(weights=spread)):
        told = said(call)
        assert told.startswith("an array is spread over the devices of several processes"), told
    break
"""


@pytest.mark.multiprocess
def test_workers_with_other_samples_first_weights_or_gradients_are_named(tmp_path):
    (tmp_path / "train.py").write_text(UNLIKE)
    address = f"127.0.0.1:{free_port()}"
    workers = [
        subprocess.Popen(
            [sys.executable, "train.py", address, str(rank)], cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [worker.communicate(timeout=GUARD_SECONDS)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], said


LEFT = """
import jax
import numpy as np

import evenstep.jax

session = evenstep.jax.Session("bsp", weights=(), data=np.arange(100.0), global_batch_size=10)
mean = jax.jit(lambda batch: batch.mean())
epoch = session.epoch()
for batch in epoch:
    session.mean(mean(batch))
    break
"""


def test_a_script_may_end_with_an_epoch_that_it_left(tmp_path):
    """The generator of the epoch is closed after the modules of evenstep have been taken apart."""
    (tmp_path / "train.py").write_text(LEFT)
    ended = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=GUARD_SECONDS, check=True
    )
    assert "Exception ignored" not in ended.stderr


class Ahead:
    """Rows, each padded to the longest of its batch; it says when a batch is fetched in a thread."""

    def __init__(self, padded):
        self.padded, self.began = padded, threading.Event()

    def __len__(self):
        return 40

    def __getitem__(self, indices):
        if threading.current_thread() is not threading.main_thread():
            self.began.set()
        return np.repeat(indices[:, None], indices.max() + 1 if self.padded else 3, 1).astype("float32")


@pytest.mark.parametrize("pad", [None, 4])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("prefetch", [False, True])
def test_the_next_batch_is_fetched_while_this_one_is_computed_on(padded, pad, prefetch):
    data = Ahead(padded)
    session = session_of(data=data, pad=pad, prefetch=prefetch)
    for batch in session.epoch():
        batch = batch[0] if pad else batch
        np.testing.assert_array_equal(batch, data[session.share.indices])
        if prefetch and session.share.iteration < 4:
            assert data.began.wait(GUARD_SECONDS)
        assert data.began.is_set() <= prefetch
        data.began.clear()
        session.mean(batch)


def test_a_batch_without_a_mean_is_refused():
    epoch = session_of().epoch()
    next(epoch)
    with pytest.raises(evenstep.ConfigError, match=r"^a batch was asked for before the mean over the last one"):
        next(epoch)


def test_weights_that_a_period_ends_without_averaging_are_refused():
    session = session_of("local-sgd:period=2")
    epoch = session.epoch()
    first = next(epoch)
    with pytest.raises(
        evenstep.ConfigError, match=r"^call average inside the loop over session\.epoch\(\), after mean"
    ):
        session.average(first)
    session.mean(first)
    assert session.average(first) is first
    session.mean(next(epoch))
    with pytest.raises(
        evenstep.ConfigError, match=r"these were not averaged: let the loop have weights, state = session\.average"
    ):
        next(epoch)


def test_an_average_leaves_counts_as_they_are():
    session = session_of("local-sgd:period=1")
    for batch in session.epoch():
        session.mean(batch)
        averaged = session.average({"weights": batch, "count": np.int64(3), "nothing": None})
        assert averaged["weights"].tolist() == batch.tolist()
        assert averaged["count"] == 3


def test_a_padded_batch_has_rows_in_steps_and_a_mask_of_those_that_count():
    found = []
    session = session_of(pad=5)
    for batch, mask in session.epoch(0):
        found.append((batch.tolist(), mask.tolist()))
        with pytest.raises(evenstep.ConfigError, match=r"^weigh_by takes a number .* not 'text'"):
            session.weigh_by("text")
        session.mean(batch)
    # The short one at the end has the rows of the one before, for which jit has compiled.
    assert [len(batch) for batch, _ in found] == [10, 10, 10]
    assert [
        value for batch, mask in found for value, counts in zip(batch, mask, strict=True) if counts
    ] == ROWS.tolist()
    assert found[0][0][8:] == [7.0, 7.0]


def test_an_epoch_goes_on_where_it_was_left():
    session = session_of()
    for batch in session.epoch(0):
        session.mean(batch)
        state = session.state_dict()
        break
    session = session_of()
    session.load_state_dict(state)
    assert session.next_epoch == 0
    left = []
    for batch in session.epoch(0):
        left += batch.tolist()
        session.mean(batch)
    assert left == ROWS[8:].tolist()
