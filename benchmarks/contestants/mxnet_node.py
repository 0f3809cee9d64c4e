"""One node of MXNet's ps-lite, run as `python -m contestants.mxnet_node` in an environment that has MXNet.

The role comes from ps-lite's own environment variables; a worker prints what it timed as JSON.
"""

import json
import sys
from dataclasses import asdict

# In a scheduler or a server this import is the whole life of the process.
import mxnet

from contestants.case import LEARNING_RATE, Case
from contestants.models import parameter_sizes
from contestants.timing import timed


def main(case, layout):
    store = mxnet.kv.create("dist_async")
    sizes = [case.elements] if layout == "one key" else parameter_sizes(case.elements)
    keys = list(range(len(sizes)))
    weights, gradients = ([mxnet.nd.zeros(size) for size in sizes] for _ in range(2))
    store.init(keys, weights)
    store.set_optimizer(mxnet.optimizer.SGD(learning_rate=LEARNING_RATE, momentum=0.0, wd=0.0, rescale_grad=1.0))

    def exchange():
        store.push(keys, gradients)
        store.pull(keys, out=weights)
        mxnet.nd.waitall()

    store._barrier()
    result = timed(case, exchange, store._barrier)
    # A pull also leaves the weights in the store's buffer, which is the gradients' own. Training computes gradients
    # anew, and here they need no value while time counts; one more exchange, of ones, shows that the server updates.
    store._barrier()
    before = _ends(store, keys, weights)
    for one in gradients:
        one[:] = 1.0
    store._barrier()
    exchange()
    store._barrier()
    updates = [(old - new) / LEARNING_RATE for old, new in zip(before, _ends(store, keys, weights), strict=True)]
    store._barrier()
    if any(count != case.workers for count in updates):
        raise RuntimeError(f"{case.workers} pushes changed the weights as {min(updates):g} to {max(updates):g} do")
    print(json.dumps({**asdict(result), "keys": len(keys)}))


def _ends(store, keys, weights):
    """The first and the last weight of each key."""
    store.pull(keys, out=weights)
    return [float(one[at].asscalar()) for one in weights for at in (0, -1)]


if __name__ == "__main__":
    main(Case(**json.loads(sys.argv[1])), sys.argv[2])
