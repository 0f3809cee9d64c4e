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
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from evenstep.launch.c10d import TCPStore

ONE_HOST: Final = "evenstep"
"""The name among torchrun's rendezvous backends."""
LOOPBACK: Final = "127.0.0.1"


@final
class OneHost(StaticTCPRendezvous):
    """The rendezvous of a single torchrun agent.

    Each start of the workers gets a new store, so that no worker finds the addresses of those before it.
    """

    def __init__(self, run_id: str) -> None:
        super().__init__(LOOPBACK, 0, rank=0, world_size=1, run_id=run_id, timeout=0)

    def get_backend(self) -> str:
        return ONE_HOST

    def next_rendezvous(self) -> RendezvousInfo:
        listening = socket.create_server((LOOPBACK, 0))
        port = listening.getsockname()[1]
        store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
        return RendezvousInfo(store, self.rank, self.world_size, RendezvousStoreInfo(LOOPBACK, port))


def register() -> None:
    """Make the rendezvous known to torchrun's launcher; calling this twice is harmless."""
    rendezvous_handler_registry.register(ONE_HOST, _one_host)


def _one_host(parameters: RendezvousParameters) -> RendezvousHandler:
    return OneHost(parameters.run_id)
