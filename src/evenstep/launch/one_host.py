"""The rendezvous of `evenstep run` on one host, for torchrun's launcher: a store that no other host can reach."""

from typing import Final, final

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from evenstep.launch.loopback import LOOPBACK, loopback_store

ONE_HOST: Final = "evenstep"
"""Its name among torchrun's rendezvous backends."""


@final
class OneHost(RendezvousHandler):
    """The rendezvous of a single torchrun agent.

    Each start of the workers gets a new store, so that none finds the addresses of those before it.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return ONE_HOST

    def next_rendezvous(self) -> RendezvousInfo:
        store = loopback_store()
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """No other agent can come, whom this would have to be told."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def register() -> None:
    """Make the rendezvous known to torchrun's launcher; twice is fine."""
    rendezvous_handler_registry.register(ONE_HOST, _one_host)


def _one_host(parameters: RendezvousParameters) -> RendezvousHandler:
    return OneHost(parameters.run_id)
