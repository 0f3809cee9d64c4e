"""A worker that dies of an error of evenstep's, and one that misses it."""

import os

from evenstep.core.errors import ConfigError, WorkerLostError
from evenstep.runtime.error_file import report_failure_to_launcher

report_failure_to_launcher()
raise WorkerLostError("worker 1 died") if os.environ["RANK"] == "0" else ConfigError("the batch is too small: raise it")
