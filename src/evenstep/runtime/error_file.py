"""Tells the launcher why this worker failed, over the error file that torchrun gives each of its workers."""

import os
import sys
from collections.abc import Mapping
from types import TracebackType

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from evenstep.core.errors import EvenstepError


def report_failure_to_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """From now on, write an evenstep error that ends this process into the error file, where there is one.

    The traceback is printed as always. Calling it twice does no harm.
    """
    if "TORCHELASTIC_ERROR_FILE" not in environment:
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, EvenstepError):
            get_error_handler().record_exception(error)
        before(kind, error, traceback)

    sys.excepthook = hook
