"""The costs of a pass, which a worker brings when it begins it."""

import dataclasses

import numpy as np
import pytest
from msgspec.structs import replace
from support.lone_server import BEGIN, LoneServer

from evenstep.protocol.messages import Initialise, NumberedRequest, SendWeights
from evenstep.protocol.run_spec import RunSpec

BY_COST = replace(BEGIN, mean=10)
COSTS = [10, 10, 50, 10, 5, 5, 5, 5]


def payload(costs):
    return np.array(costs, dtype="<u4").view(np.uint8).data


def asked(server, sequence, costs, begin=BY_COST):
    return server.ask(NumberedRequest(sequence=sequence, has=-1, body=begin), payload(costs))


def begun(server):
    assert isinstance(asked(server, 1, COSTS).body, SendWeights)
    server.fill(0.0)
    server.request(2, Initialise())


@pytest.mark.parametrize("local", [True, False])
def test_claims_are_sized_by_what_the_worker_says(tmp_path, local):
    server = LoneServer(tmp_path / "snapshots")
    server.local = local
    begun(server)
    answer = asked(server, 3, COSTS)
    assert answer.body.claims == ((0, ((0, 2),)),)
    server.claim = 0
    assert server.push().body.claims == ((1, ((2, 3),)),)


def test_a_repeated_request_is_answered_again_whatever_comes_with_it(tmp_path):
    server = LoneServer(tmp_path / "snapshots")
    begun(server)
    answer = asked(server, 3, COSTS)
    assert asked(server, 3, COSTS) == answer
    assert asked(server, 3, COSTS[:2]) == answer


@pytest.mark.parametrize("costs", [[0, *COSTS[1:]], [*COSTS[:7], 2**31 + 1]])
def test_a_cost_out_of_range_is_refused(tmp_path, costs):
    server = LoneServer(tmp_path / "snapshots")
    refusal = asked(server, 1, costs)
    assert (refusal.sequence, refusal.kind) == (1, "ProtocolError")
    assert "1 to 2^31 is possible" in refusal.error


@pytest.mark.parametrize("costs", [COSTS[:7], [*COSTS, 1], []])
def test_another_number_of_costs_than_positions_ends_the_connection(tmp_path, costs):
    server = LoneServer(tmp_path / "snapshots")
    server.say(NumberedRequest(sequence=1, has=-1, body=BY_COST), payload(costs))
    assert not server.session.serve_one()


def test_costs_that_do_not_fit_into_a_message_are_refused_before_memory_is_taken(tmp_path):
    server = LoneServer(tmp_path / "snapshots")
    server.shard_state.spec = dataclasses.replace(server.shard_state.spec, length=2**50)
    assert "do not fit into a message" in asked(server, 1, COSTS).error


def test_a_run_with_other_costs_is_another_run(tmp_path):
    server = LoneServer(tmp_path / "snapshots")
    known = server.shard_state.spec
    assert b"costs" not in known.encode()
    other = RunSpec.decode(server.described[:-1] + b',"costs":"ab12"}', 1)
    assert RunSpec.decode(other.encode(), 1).costs == "ab12"
    assert other.difference(known) == "checksum of costs is ab12 where the others have None"
