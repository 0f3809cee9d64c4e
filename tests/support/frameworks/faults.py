"""The faults that befall a worker of another framework than PyTorch under `evenstep run`, and what comes of each."""

from support.frameworks.task import SLICES

ITERATIONS = {"first iteration": 0, "mid-epoch": 4, "evaluation": len(SLICES) - 1}
"""After which the fault befalls a worker; a loss that is not finite is one in that iteration."""
TIMEOUT, HEARTBEAT = 20, 2
"""Seconds; the timeout is as long where a worker has to be waited for."""

_GONE = r"worker 1 (is gone: its own output tells why|had ended with exit code 0)"
_STOPPED = {
    "killed": r"worker 1 was killed by SIGKILL",
    "stopped": rf"worker 1 stood still for {HEARTBEAT} s, stopped by a signal",
    "hangs": rf"worker 1 did not come to the next exchange within {TIMEOUT} s",
    "exits": _GONE,
    "raises": rf"worker 1 ended with exit code 1|{_GONE}",
}
_AT_START = {
    "hangs": rf"worker 1 did not come to prepare within {TIMEOUT} s",
    "exits": r"worker 1 ended with exit code 0 before it called prepare",
    # At its exit a process of JAX waits for the others.
    "raises": rf"worker 1 ended with exit code 1|worker 1 did not come to prepare within {TIMEOUT} s",
}
_REFUSED = {
    "another model": r"worker 1 has .*: start every worker with the same model and optimizer",
    "other data": r"worker 1 has other samples than worker 0",
}
_NOT_FINITE = "which holds a NaN or an infinity"
MOMENTS = ("start", *ITERATIONS, "close")
FAULTS = {
    **{(fault, "start"): ("stopped", _AT_START.get(fault, said)) for fault, said in _STOPPED.items()},
    **{(fault, moment): ("stopped", said) for fault, said in _STOPPED.items() for moment in ITERATIONS},
    # At the end nobody waits for a worker that is stopped or hangs.
    **{(fault, "close"): ("stopped", _STOPPED[fault]) for fault in ("killed", "raises")},
    **{(fault, "start"): ("refused", said) for fault, said in _REFUSED.items()},
}
"""By fault and moment: how the run ends, and what the terminal says."""
for _moment in ("first iteration", "mid-epoch"):
    _number = ITERATIONS[_moment]
    FAULTS["NaN", _moment] = "finish", rf"worker 1 left out its gradient of iteration {_number}, {_NOT_FINITE}"
    FAULTS["NaN refused", _moment] = "stopped", rf"the gradient of iteration {_number} on worker 1 holds a NaN"
