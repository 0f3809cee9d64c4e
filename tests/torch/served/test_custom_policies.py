"""A user's own policies on servers, in one process: real sessions and workers over a transport in memory."""

import sys
from pathlib import Path

import pytest
import support.own_policies  # noqa: F401 - registers its recipes
from support.memory_servers import SAMPLES, WORKERS, Trial

from evenstep.core.errors import EvenstepError
from evenstep.schemes import import_recipes

EXAMPLES = Path(__file__).parents[3] / "examples"
OWN = "support.own_policies"


def test_a_users_policies_train_every_sample_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    import_recipes("custom_policy", str(EXAMPLES))
    trial = Trial(tmp_path, "custom_policy:warm_up:iterations=3,bound=1,load=custom_policy:by_last_time", 1, {})
    weights = trial.run()
    assert sorted(weights) == list(range(WORKERS))
    assert sum(event.samples for event in trial.events.kept if hasattr(event, "samples")) >= SAMPLES


@pytest.mark.parametrize(
    ("scheme", "says"),
    [
        ("wrong_sync:wrong=twice", "on_push() of the sync policy WrongSyncPolicy committed a push"),
        ("wrong_sizes:servers=1", "the load policy WrongPolicy gave the sizes"),
    ],
)
def test_a_wrong_decision_is_told_to_the_worker_before_a_weight_changes(tmp_path, scheme, says):
    trial = Trial(tmp_path, f"{OWN}:{scheme}", 1, {})
    with pytest.raises(EvenstepError) as caught:
        trial.run()
    assert says in str(caught.value)
    assert trial.shard_states[0].version == 0
