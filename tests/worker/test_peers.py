"""What the processes of workers report and tell, as one worker's."""

import numpy as np
import pytest

from evenstep.core.errors import ConfigError, DisagreementError
from evenstep.worker.peers import Peers

TWO = Peers(ranks=np.arange(4).reshape(2, 1, 2), dims=("dp",))
SHARDS = Peers(ranks=np.arange(4).reshape(2, 2, 1), dims=("replicate", "shard"))
ROWS = np.array(
    [  # fingerprint, input, script, samples, compute, forecast, largest batch
        [7, 5, 1, 6, 900, 20, 64],
        [7, 2, 3, 6, 1000, 10, 32],
        [7, 1, 1, 4, 500, 30, 16],
        [7, 1, 1, 4, 400, 40, 99],
    ]
)
SLOWEST = [[7, 5, 3, 6, 1000, 20, 32], [7, 1, 1, 4, 500, 40, 16]]


def test_a_worker_reports_the_compute_of_its_slowest_peer():
    assert TWO.slowest(ROWS).tolist() == SLOWEST


def test_workers_that_wait_for_each_other_report_alike():
    assert SHARDS.slowest(ROWS).tolist() == [SLOWEST[0]] * 2 + [SLOWEST[1]] * 2


def test_peers_need_the_same_batch():
    TWO.require_same_batches(np.array([5, 5, 6, 6]))
    TWO.require_same_batches(np.array([5, 0, 0, 6]))  # Not all can be compared.
    with pytest.raises(
        DisagreementError, match=r"^rank 3 \(replica 1\) got another batch than rank 2 \(replica 1\): give"
    ):
        TWO.require_same_batches(np.array([5, 5, 5, 6]))


def test_an_extra_column_stays():
    assert TWO.slowest(np.pad(ROWS, ((0, 0), (0, 1)), constant_values=5))[:, -1].tolist() == [5, 5]


def test_a_worker_is_bounded_as_each_peer():
    bounds = [(8, 2), (9, 1), (5, 1), (7, 3)]
    records = [{"largest_batch": most, "smallest_batch": least, "host": f"h{most}"} for most, least in bounds]
    assert TWO.merged(records) == [
        {"largest_batch": 8, "smallest_batch": 2, "host": "h8"},
        {"largest_batch": 5, "smallest_batch": 3, "host": "h5"},
    ]


def test_processes_are_named_with_their_replicas():
    assert TWO.named("worker 3 ended") == "rank 3 (replica 1) ended"
    assert TWO.named("workers 0, 1 and 3 wait") == "ranks 0 (replica 0), 1 (replica 0) and 3 (replica 1) wait"
    assert TWO.named("every worker is alive") == "every worker is alive"
    with pytest.raises(ConfigError, match=r"^rank 2 \(replica 1\): no$"):
        TWO.merged([{}, {}, {"error": "no"}, {}])
