"""All that a server's primary is told, it is told by a thread that holds the server's lock."""

from support.lone_server import LoneServer

from evenstep.core.activity import Doing
from evenstep.protocol.messages import Again, Ping, Pong, Stop


def test_a_head_hears_of_its_worker_under_the_lock(tmp_path):
    server = LoneServer(tmp_path / "snapshots")
    server.begin()
    assert server.ask(Ping(doing=Doing.COMPUTING, iteration=0, seconds=0.0, echo=True)) == Pong()
    while not server.push().body.over:
        server.look(seconds=1.0)
    version = server.shard_state.version
    server.ask(Again(sequence=3 + version))
    server.request(4 + version, Stop(), has=version)
    assert server.unlocked == 0
