"""Checks for code that plugs into evenstep, which evenstep itself does not use.

* Authors of an expert, a load policy or a sync policy call the functions of `conformance` in their tests.
* `watched.Watched` wraps a sync policy and checks each command while a test or a training run drives it.
* `scripted.Scripted` is the load part of a scheme whose batch sizes change at random. Authors of a training script or
  of an integration train with it to check that their results do not depend on the batch sizes.
"""
