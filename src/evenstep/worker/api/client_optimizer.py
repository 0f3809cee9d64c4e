"""The optimizer of a `Client`, whose updates the servers compute."""

from typing import Any, final

from evenstep.core.errors import ConfigError
from evenstep.protocol.optimizer import OptimizerSpec, Options, plain_option
from evenstep.worker.servers.link import Link


@final
class ClientOptimizer:
    """The options of the optimizer, and the state from which the servers are to begin."""

    def __init__(self, link: Link, spec: OptimizerSpec) -> None:
        self.values: dict[str, Any] = dict(spec.groups[0])
        self.pending: list[bytes] | None = None
        self._link = link
        self._known = set(self.values)

    def options(self) -> tuple[Options, ...]:
        """The present options of the only param group."""
        if self.values.keys() != self._known:
            odd = ", ".join(sorted(self.values.keys() ^ self._known))
            raise ConfigError(f"client.options must keep its names, but {odd} came or went: give them to the Client")
        return ({name: plain_option(name, value) for name, value in self.values.items()},)

    def hand_over(self) -> None:
        """Send the state to the servers, if there is one."""
        if self.pending is not None:
            self._link.load_states([[memoryview(each)] for each in self.pending])

    def clear(self) -> None:
        """The servers have the state."""
        self.pending = None
