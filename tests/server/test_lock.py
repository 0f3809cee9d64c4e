"""All that a server's primary is told, it is told by a thread that holds the server's lock."""

from support.lone_server import LoneServer


def test_a_head_hears_of_its_worker_under_the_lock(tmp_path):
    server = LoneServer(tmp_path / "snapshots")
    server.begin()
    pulse = {"op": "ping", "doing": "computing", "iteration": 0, "seconds": 0.0, "echo": True}
    assert server.ask(pulse) == {"pong": True}
    while not server.push()["over"]:
        server.look(seconds=1.0)
    server.ask({"op": "again", "seq": 3 + server.shard_state.version})
    server.ask({"op": "stop", "seq": 4 + server.shard_state.version, "has": server.shard_state.version})
    assert server.unlocked == 0
