"""A session's parts come in any order, more than once in a process; what other people's code does with them."""

from itertools import product

import numpy as np
import pytest
from support import habits, session_habits
from support.processes import results, run_workers
from support.served import run_served
from support.training import Run

from evenstep.schemes import Scheme
from evenstep.testing.scripted import Scripted

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("habits")]

RUN = Run(samples=77, epochs=2)
SCHEMES = {
    "bsp": {"scheme": "bsp"},
    "sizes that always change": {"scheme": Scheme(name="scripted", load=Scripted(seed=11))},
    "local-sgd": {"scheme": "local-sgd:period=1"},
}
BEHIND_A_BARRIER = [scheme for scheme in SCHEMES if scheme != "local-sgd"]
SENTENCES = {
    "wrap_again": "pass the model to the loop as it is",
    "use_another_loader": "loop over the loader that prepare returned",
    "use_another_after_a_peek": "Batches of another loader are the same samples on every worker",
    "use_another_before_the_start": "loop over the loader that prepare returned",
    "bring_a_loop": "has its own _get_iterator",
    "part_in_a_closure": "worker 2 has a learning rate of",
}


@pytest.fixture(scope="module")
def found():
    return results(run_workers(session_habits.together, habits.WORKERS, RUN, SCHEMES))


@pytest.fixture(scope="module")
def alone():
    return habits.alone(session_habits.plainly, RUN)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_session_takes_its_parts_in_any_order(found, alone, scheme):
    for value in found:
        came_to = value[scheme, "in_another_order"]
        np.testing.assert_allclose(came_to["weights"], alone, rtol=0, atol=1e-12)
        assert came_to["rows"] == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
        assert came_to["scalars"] == [0, 1, 2]
        assert came_to["mean"] == pytest.approx(5 / 3)
        assert came_to["before"] == [0, 6, 15, 5, 0]
        assert came_to["after"] == 6
        assert came_to["known"] == (True, ["module.0.weight", "module.0.bias", "module.2.weight", "module.2.bias"])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_wrapper_of_ones_own_stays_what_it_is_where_gradients_are_summed(found, alone, scheme):
    for value in found:
        came_to = value[scheme, "in_a_wrapper_of_ones_own"]
        np.testing.assert_allclose(came_to["weights"], alone, rtol=0, atol=1e-12)
        assert came_to["stays"] == (scheme in BEHIND_A_BARRIER)


@pytest.mark.parametrize(
    ("scheme", "act"),
    [
        *product(SCHEMES, ["twice", "peek", "restore_the_optimizer_first"]),
        *product(BEHIND_A_BARRIER, ["normalise_globally"]),
    ],
)
def test_it_is_the_mathematics_of_one_process(found, alone, scheme, act):
    for value in found:
        np.testing.assert_allclose(value[scheme, act], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("scheme", "mistake"), [each for each in product(SCHEMES, SENTENCES) if each != ("local-sgd", "part_in_a_closure")]
)
def test_what_cannot_work_is_refused_before_a_weight_changes(found, scheme, mistake):
    for value in found:
        said, unchanged = value[scheme, "mistakes"][mistake]
        assert SENTENCES[mistake] in said
        assert unchanged


def test_weights_of_the_script_are_refused_where_workers_step_on_their_own_gradients(found):
    for value in found:
        assert (
            "weights goes with schemes that sum gradients behind a barrier" in value["local-sgd", "normalise_globally"]
        )


@pytest.mark.parametrize("scheme", ["ssp:bound=1", "bsp:engine=server"])
def test_on_servers_a_peek_costs_nothing_mistakes_are_refused_and_closures_are_pushed(tmp_path, alone, scheme):
    values = results(run_served(session_habits.on_servers, 3, RUN, scheme, run_dir=tmp_path))
    for value in values:
        assert SENTENCES["use_another_loader"] in value["refused"]
        assert (value["unchanged"], value["peeked"]) == (True, 0)
        assert value["weights"] == values[0]["weights"]
        if scheme.startswith("bsp"):
            np.testing.assert_allclose(value["weights"], alone, rtol=0, atol=1e-10)
    for epoch in range(RUN.epochs):
        assert sorted(position for value in values for position in value["positions"][epoch]) == list(range(77))
