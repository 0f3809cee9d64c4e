"""Checks for code that plugs into evenstep, which evenstep itself does not use.

* Authors of an expert, a load policy or a sync policy call the `check_` functions in their tests.
* `Watched` wraps a sync policy and checks each command while a test or a training run drives it.
* `Scripted` is the load part of a scheme whose batch sizes change at random. Authors of a training script or
  of an integration train with it to check that their results do not depend on the batch sizes.
"""

from evenstep.testing.conformance import check_expert, check_load_policy, check_sync_policy
from evenstep.testing.scripted import Scripted
from evenstep.testing.watched import Watched

__all__ = ["Scripted", "Watched", "check_expert", "check_load_policy", "check_sync_policy"]
