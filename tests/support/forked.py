"""What the fork server imports for those that it forks, once and without searches for garbage, of which there is none.

The workers then never look through it: in them an import would search all of it several times, and copy it for that.
"""

import gc
from importlib import import_module

gc.disable()
# DDP imports the compiler too, so that a worker starts in tens of milliseconds.
for name in ("torch", "torch._dynamo", "evenstep.torch.prepare", "support.training", "support.served"):
    import_module(name)
gc.freeze()
gc.enable()
