"""The rendezvous of `evenstep run` on one host, for torchrun's launcher: a store that no other host can reach."""

import socket
from typing import Final, final

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from evenstep.launch.c10d import TCPStore

ONE_HOST: Final = "evenstep"
"""The name among torchrun's rendezvous backends."""
LOOPBACK: Final = "127.0.0.1"


@final
class OneHost(RendezvousHandler):
    """The rendezvous of a single torchrun agent.

    Each start of the workers gets a new store, so that no worker finds the addresses of those before it.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return ONE_HOST

    def next_rendezvous(self) -> RendezvousInfo:
        listening = socket.create_server((LOOPBACK, 0))
        port = listening.getsockname()[1]
        store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: no other agent can come that would have to know."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def register() -> None:
    """Make the rendezvous known to torchrun's launcher; calling this twice is harmless."""
    rendezvous_handler_registry.register(ONE_HOST, _one_host)


def _one_host(parameters: RendezvousParameters) -> RendezvousHandler:
    return OneHost(parameters.run_id)
