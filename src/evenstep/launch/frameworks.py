"""The environment in which workers of frameworks other than PyTorch meet on one host."""

import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Final

from evenstep.core.errors import ConfigError
from evenstep.launch.supervisor import TASKS_VARIABLE, Supervisor, signal_when_parent_dies

_HOST: Final = "127.0.0.1"


@contextmanager
def meeting(framework: str, workers: int | None, python: str, restarts: int) -> Iterator[Mapping[str, str]]:
    """Yield the variables with which the workers meet, as long as the context is open.

    * `tensorflow`: the addresses from which each worker's keeper makes its `TF_CONFIG`;
    * `jax`: the address of the coordinator, on loopback, which `jax.distributed.initialize` reads;
    * `mxnet`: the `DMLC_` variables of a distributed kvstore, whose scheduler and server run meanwhile.

    Args:
        framework: `tensorflow`, `jax` or `mxnet`.
        workers: The number of workers; None if other hosts start workers too.
        python: The interpreter of the workers.
        restarts: How often all workers may be started again.

    Raises:
        ConfigError: There are several hosts, or workers of MXNet are to be started again.
    """
    if workers is None:
        raise ConfigError(
            f"--framework {framework} lets workers of one host meet: on several hosts leave it out, and set what"
            f" {framework} itself reads"
        )
    if framework == "mxnet" and restarts:
        raise ConfigError(
            "--max-restarts cannot work with MXNet, whose scheduler lets no worker join in the place of another: leave"
            " it out, and start the run again from a checkpoint"
        )
    with ExitStack() as stack:
        # The sockets hold the ports until the end, so that no other process gets one; gRPC shares them.
        ports = [_held_port(stack, shared=framework != "mxnet") for _ in range(workers)]
        address = f"{_HOST}:{ports[0]}"
        if framework == "tensorflow":
            tasks = ",".join(f"{_HOST}:{port}" for port in ports)
            yield {TASKS_VARIABLE: tasks, "TF_GRPC_REUSE_PORT": "1"}
        elif framework == "jax":
            # Its preemption service takes SIGTERM, and the worker would not end.
            yield {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_COORDINATOR_BIND_ADDRESS": address,
                "JAX_ENABLE_PREEMPTION_SERVICE": os.environ.get("JAX_ENABLE_PREEMPTION_SERVICE", "0"),
            }
        else:
            store = {
                "DMLC_PS_ROOT_URI": _HOST,
                "DMLC_NODE_HOST": _HOST,
                "DMLC_PS_ROOT_PORT": str(ports[0]),
                "DMLC_NUM_WORKER": str(workers),
                "DMLC_NUM_SERVER": "1",
            }
            for role in ("scheduler", "server"):
                stack.enter_context(_running(python, {**store, "DMLC_ROLE": role}))
            yield {**store, "DMLC_ROLE": "worker"}


def _held_port(stack: ExitStack, *, shared: bool) -> int:
    """Return a free port. It stays taken if others can share it, which ZeroMQ cannot."""
    held = stack.enter_context(socket.socket())
    if shared:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((_HOST, 0))
    port: int = held.getsockname()[1]
    if not shared:
        held.close()
    return port


@contextmanager
def _running(python: str, variables: Mapping[str, str]) -> Iterator[None]:
    """Run a scheduler or server of MXNet's kvstore, which a process becomes by importing mxnet."""
    process = Supervisor.start(
        [python, "-c", "import mxnet"],
        env={**os.environ, **variables},
        preexec_fn=lambda: signal_when_parent_dies(signal.SIGKILL),
    )
    try:
        yield
    finally:
        process.kill()
