"""Ray Train: `evenstep.prepare` inside `train_loop_per_worker`, and parameter servers as Ray actors.

    from evenstep.integrations.ray import EvenstepConfig

    TorchTrainer(train_loop_per_worker, torch_config=EvenstepConfig(scheme="ssp:bound=3"), ...).fit()

Schemes without servers need no config: Ray Train starts the workers and their process group before `prepare`.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from evenstep.launch.launch_settings import VARIABLES, LaunchSettings
from evenstep.launch.server_settings import SECRET_VARIABLE
from evenstep.launch.servers import start_servers
from evenstep.schemes import parse_scheme
from evenstep.server.shard.snapshots import Snapshots

_START_SECONDS = 180.0
_CLOSE_SECONDS = 60.0


@dataclass
class EvenstepConfig(TorchConfig):
    """Ray Train's `TorchConfig` with evenstep's settings, as `torch_config` of a `TorchTrainer`.

    The settings reach `evenstep.prepare` and `evenstep.Session` through the workers' environment, over which their own
    arguments win. For a scheme on parameter servers, an actor on the first worker's node runs the servers and ends with
    the run. When Ray restarts the workers after a failure, new servers continue from the last snapshot in `run_dir`;
    without `run_dir` the run starts over.

    Attributes:
        scheme: Such as `ssp:bound=3`; `EVENSTEP_SCHEME` unless given; None for the script's own, else the default.
        run_dir: The run directory, on a file system that all nodes share.
        wait_seconds: How long a worker waits for another; None for the default.
    """

    scheme: str | None = field(default_factory=lambda: os.environ.get(VARIABLES["scheme"]) or None)
    run_dir: str | None = None
    wait_seconds: float | None = None

    @property
    def backend_cls(self) -> type["_EvenstepBackend"]:
        return _EvenstepBackend

    def to_dict(self) -> dict[str, Any]:
        own = {"scheme": self.scheme, "run_dir": self.run_dir, "wait_seconds": self.wait_seconds}
        return {**super().to_dict(), **own}

    @property
    def environment(self) -> dict[str, str]:
        """The settings as environment variables."""
        given = {"scheme": self.scheme, "run_dir": self.run_dir, "timeout": self.wait_seconds}
        return {VARIABLES[name]: str(value) for name, value in given.items() if value is not None}


class _EvenstepBackend(_TorchBackend):
    """Starts the servers of a group of workers, and tells the workers how to reach them."""

    _servers: Any = None
    _starts = 0

    def on_start(self, worker_group: Any, backend_config: EvenstepConfig) -> None:
        super().on_start(worker_group, backend_config)
        environment = backend_config.environment
        if backend_config.scheme is not None and parse_scheme(backend_config.scheme).served is not None:
            environment |= self._start(worker_group, backend_config)
        self._starts += 1
        worker_group.execute(_set, environment)

    def on_shutdown(self, worker_group: Any, backend_config: EvenstepConfig) -> None:
        # First, because failed workers make Ray's own part fail, too. The first server prints the summary of the run.
        if self._servers is not None:
            with suppress(ray.exceptions.RayError):  # The actor may be lost, or too slow.
                ray.get(self._servers.close.remote(), timeout=_CLOSE_SECONDS)
            ray.kill(self._servers)
            self._servers = None
        super().on_shutdown(worker_group, backend_config)

    def _start(self, worker_group: Any, config: EvenstepConfig) -> Mapping[str, str]:
        """Start the servers on the first worker's node; returns the variables that workers need to find them."""
        nodes = worker_group.execute(lambda: (ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()))
        first, address = nodes[0]
        beside = NodeAffinitySchedulingStrategy(first, soft=False)
        self._servers = ray.remote(num_cpus=0, scheduling_strategy=beside)(_Servers).remote(
            config.scheme,
            workers=len(nodes),
            run_dir=config.run_dir,
            listen="127.0.0.1" if len(set(nodes)) == 1 else address,
            resume=self._starts > 0 and config.run_dir is not None,
        )
        environment: Mapping[str, str] = ray.get(self._servers.environment.remote(), timeout=_START_SECONDS)
        return environment


class _Servers:
    """Runs the servers, as an actor."""

    def __init__(self, scheme: str, *, resume: bool, **settings: Any) -> None:
        served = parse_scheme(scheme).served
        if resume and served is not None:  # The run may have failed before its first snapshot.
            resume = Snapshots(Path(settings["run_dir"], "snapshots"), served.servers).newest >= 0
        self._servers = start_servers(scheme, resume=resume, **settings)
        self._resume = resume

    def environment(self) -> dict[str, str]:
        """The environment variables for the workers."""
        launched = LaunchSettings(servers=self._servers.addresses, resume=self._resume)
        return {**launched.to_environment(), SECRET_VARIABLE: self._servers.secret}

    def close(self) -> None:
        """End the servers."""
        self._servers.close()


def _set(environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
