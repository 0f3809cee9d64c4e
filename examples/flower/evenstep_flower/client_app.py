"""A node: trains on its own data with the batch size, steps and learning rate from the server.

Node config: `partition-id` chooses its data, and `slowdown` makes it that many times slower.
"""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from evenstep.integrations.flower import measured
from evenstep_flower import task

app = ClientApp(mods=[measured])


@app.train()
def train(message: Message, context: Context) -> Message:
    config = message.content["config"]
    partition = int(context.node_config["partition-id"])
    data = task.private_data(partition)
    weights = task.train(
        {name: array.numpy() for name, array in message.content["arrays"].items()},
        data,
        batch_size=config["batch-size"],
        steps=config["steps"],
        lr=config["lr"],
        generator=np.random.default_rng(),
        slowdown=int(context.node_config.get("slowdown", 1)),
    )
    arrays = ArrayRecord({name: Array(values) for name, values in weights.items()})
    metrics = MetricRecord({"num-examples": len(data[0]), "accuracy": task.accuracy(weights, data)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
