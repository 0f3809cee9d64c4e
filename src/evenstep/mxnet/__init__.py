"""Load balancing for MXNet's Gluon, which is retired: one line in a script with a Trainer and a DataLoader.

trainer, loader = evenstep.mxnet.prepare(trainer, loader)
"""

from evenstep.mxnet.prepare import Loader, prepare

__all__ = ["Loader", "prepare"]
