"""Loops over shares and over several loaders of a session are the mathematics of one process, or are refused."""

from functools import cache

import numpy as np
import pytest
from support import habits, session_loops
from support.processes import results, run_workers
from support.training import Run

from evenstep.schemes import Scheme
from evenstep.testing.scripted import Scripted

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("habits")]

# 3 workers x 5 = 15 a slice, and a last one of 2 that leaves a worker with nothing.
RUN = Run(samples=77, epochs=2)
SCHEMES = {
    "bsp": {"scheme": "bsp"},
    "sizes that always change": {"scheme": Scheme(name="scripted", load=Scripted(seed=11))},
    "dbs": {"scheme": "dbs"},
    "local-sgd": {"scheme": "local-sgd:period=1"},
    "micro-batches": {"scheme": "bsp:micro_batch=3"},
}
# Under local SGD a worker steps on each batch alone, so that nothing accumulates over batches.
OTHERWISE = {
    "dbs": {session_loops.never_end},
    "local-sgd": {
        session_loops.never_end,
        session_loops.take_one_of_each,
        session_loops.take_one_of_each_in_two_backwards,
        session_loops.weigh_each_by_units,
    },
    "micro-batches": {*session_loops.EXACT} - {session_loops.make_batches, session_loops.train_in_turn},
}
CASES = [
    (scheme, loop, RUN) for scheme in SCHEMES for loop in session_loops.EXACT if loop not in OTHERWISE.get(scheme, ())
]
RESUMED = [scheme for scheme in SCHEMES if scheme != "micro-batches"]
UNLIKE = "the backward of a batch came after the next batch had begun"
MISTAKES = {
    "sizes that always change": {
        session_loops.take_one_of_each_unlike: UNLIKE,
        session_loops.weigh_the_second_before_the_first: "a loader whose batch is not computed now",
    },
    "micro-batches": {session_loops.take_one_of_each: "micro_batch goes with one at a time"},
    "bsp": {
        session_loops.take_one_of_each_unlike: UNLIKE,
        session_loops.loop_in_another_order: "worker 2 is at loader 1 where the others are at 0",
    },
    "dbs": {session_loops.never_end: "changes sizes between epochs"},
    "local-sgd": {
        session_loops.take_one_of_each: "the backward of the last batch of a period came after the forward pass of"
    },
}


def everything(cases, schemes, mistakes, run):
    """On this worker: what each case comes to, what is said of each mistake, and what resuming comes to."""
    return {
        "exact": session_loops.together(cases, schemes),
        "mistakes": {name: session_loops.mistakes(run, schemes[name], loops) for name, loops in mistakes.items()},
        "resumed": {name: session_loops.in_pieces(run, schemes[name]) for name in RESUMED},
    }


@pytest.fixture(scope="module")
def found():
    mistakes = {scheme: list(loops) for scheme, loops in MISTAKES.items()}
    untold = ("sizes that always change", session_loops.pack_ahead_and_tell_nothing, RUN)
    return results(run_workers(everything, habits.WORKERS, [*CASES, untold], SCHEMES, mistakes, RUN))


@cache
def alone(loop):
    return session_loops.alone(loop, RUN)


@pytest.mark.parametrize(("scheme", "loop", "run"), CASES, ids=lambda part: getattr(part, "__name__", part))
def test_it_is_the_mathematics_of_one_process(found, scheme, loop, run):
    for value in found:
        came_to = value["exact"][scheme, loop.__name__]
        assert not isinstance(came_to, str), came_to
        np.testing.assert_allclose(came_to, alone(loop), rtol=0, atol=1e-12)


@pytest.mark.parametrize("scheme", RESUMED)
def test_every_loader_goes_on_from_the_state_of_its_session(found, scheme):
    for value in found:
        weights, loaders = value["resumed"][scheme]
        np.testing.assert_allclose(weights, alone(session_loops.whole), rtol=0, atol=1e-12)
        assert loaders == 3


def test_a_batch_that_cannot_be_told_is_refused_unless_the_script_tells(found):
    said = [value["exact"]["sizes that always change", "pack_ahead_and_tell_nothing"] for value in found]
    assert any("call loader.computes(batch) before its first forward pass" in each for each in said)


@pytest.mark.parametrize("scheme", MISTAKES)
def test_what_cannot_be_exact_is_refused_before_a_weight_changes(found, scheme):
    for loop, sentence in MISTAKES[scheme].items():
        said = [value["mistakes"][scheme][loop.__name__] for value in found]
        assert any(sentence in each for each, _ in said), said
        assert all(unchanged for _, unchanged in said)
