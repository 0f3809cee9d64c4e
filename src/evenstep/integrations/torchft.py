"""torchft: batch sizes by speed, and each sample once, while replicas come and go without a restart.

    from evenstep.integrations.torchft import ElasticSession

    session = ElasticSession(manager, global_batch_size=256)
    model, optimizer, loader = session.model(model), session.optimizer(optimizer), session.loader(loader)

docs/elastic.md describes what a script needs, and `evenstep run --elastic`, which needs no change of the script.
"""

from evenstep.torch.elastic.session import ElasticOptions, ElasticSession

__all__ = ["ElasticOptions", "ElasticSession"]
