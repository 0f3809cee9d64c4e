"""`auto` on real processes: exact whatever it chooses, and told with its reason."""

import numpy as np
import pytest
from support import training
from support.processes import results, run_workers
from support.recorded import by_worker
from support.training import Run, train_alone

from evenstep.cluster import parse_cluster

pytestmark = pytest.mark.multiprocess

CLUSTER = """
[devices.fast]
per_sample = "1 ms"
[devices.slow]
per_sample = "3 ms"
[[workers]]
device = "fast"
[[workers]]
device = "slow"
"""


def test_it_trains_as_one_process_and_says_what_it_chose(tmp_path):
    # 70 iterations in an epoch, so that a choice follows at the end of the first: speeds are known after 12 at most.
    run = Run(samples=562, batch_size=4, epochs=2, scheme="auto", options={"emulate": parse_cluster(CLUSTER)})
    values = results(run_workers(training.record, 2, run, str(tmp_path)))
    expected = train_alone(run, 8)
    for value in values:
        np.testing.assert_allclose(value["weights"], expected, rtol=0, atol=1e-10)
    choices = [[event for event in events if event.kind == "choice"] for events in by_worker(tmp_path)]
    ((choice,), other) = choices
    assert not other
    assert choice.text.startswith("auto uses ")
    assert choice.iteration in (70, 71)


@pytest.mark.parametrize("stop_after", [30, 70])
def test_a_run_that_resumes_before_or_after_a_choice_trains_as_one_process(stop_after):
    run = Run(samples=482, batch_size=4, epochs=2, scheme="auto")
    for value in results(run_workers(training.train_and_resume, 2, run, stop_after)):
        np.testing.assert_allclose(value["weights"], train_alone(run, 8), rtol=0, atol=1e-10)
