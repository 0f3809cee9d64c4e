import json

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from evenstep.runtime.run_failed import failure_of


@pytest.fixture
def failed(tmp_path):
    """The failure of workers 0, 1, ... with these exit codes and errors, the latter as a worker writes them down."""

    def make(*ends):
        failures = {}
        for worker, (exit_code, error) in enumerate(ends):
            file = tmp_path / f"{worker}.json"
            if error:
                file.write_text(json.dumps({"message": {"message": error, "extraInfo": {"timestamp": "1"}}}))
            failures[worker] = ProcessFailure(worker, pid=1000 + worker, exitcode=exit_code, error_file=str(file))
        return failure_of(ChildFailedError("train.py", failures))

    return make


@pytest.mark.parametrize(
    ("ends", "worker", "exit_code", "text"),
    [
        ([(-9, "")], 0, 137, "worker 0 was killed by SIGKILL, which is what a system out of memory does"),
        ([(-15, ""), (3, "")], 1, 3, "worker 1 ended with exit code 3: its own output above tells why"),
        ([(1, "WorkerLostError: worker 1 died"), (1, "")], 1, 1, "worker 1 ended with exit code 1"),
        ([(1, ""), (-9, "")], 1, 137, "worker 1 was killed by SIGKILL"),
        ([(1, "WorkerLostError: worker 7 died"), (-15, "")], 0, 1, "worker 0 ended with exit code 1: worker 7 died"),
        ([(1, "ConfigError: too small: raise it"), (1, "ConfigError: x")], 0, 1, "exit code 1: too small: raise it"),
        ([(1, "it: broke")], 0, 1, "worker 0 ended with exit code 1: it: broke"),
        # It had stopped, was missed, and only then killed by the launcher.
        ([(1, "WorkerLostError: worker 1 stopped"), (-9, "")], 0, 1, "worker 1 stopped"),
    ],
)
def test_names_the_worker_that_failed_first_and_how(failed, ends, worker, exit_code, text):
    failure = failed(*ends)
    assert failure.worker == worker
    assert failure.exit_code == exit_code
    assert text in str(failure)
    assert "\n" not in str(failure)
