"""Load balancing for TensorFlow and Keras 3: a plain script with two more lines.

import evenstep.tensorflow

evenstep.tensorflow.init()  # Before other uses of TensorFlow.
model, optimizer, dataset = evenstep.tensorflow.prepare(
    model, optimizer, (inputs, labels), global_batch_size=512
)
"""

from evenstep.tensorflow.balanced import BalancedDataset
from evenstep.tensorflow.prepare import prepare
from evenstep.tensorflow.workers import Peers, init

__all__ = ["BalancedDataset", "Peers", "init", "prepare"]
