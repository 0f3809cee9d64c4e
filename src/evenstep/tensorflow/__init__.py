"""Load balancing for TensorFlow and Keras 3: a plain script with two more lines.

import evenstep.tensorflow

evenstep.tensorflow.init()  # Before anything else of TensorFlow's.
model, optimizer, dataset = evenstep.tensorflow.prepare(
    model, optimizer, (inputs, labels), global_batch_size=512
)
"""

from evenstep.tensorflow.dataset import BalancedDataset
from evenstep.tensorflow.prepare import prepare
from evenstep.tensorflow.workers import Workers, init

__all__ = ["BalancedDataset", "Workers", "init", "prepare"]
