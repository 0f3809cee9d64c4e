"""Flower's own FedAvg, run as `python -m contestants.flower_fedavg NODES ROUNDS` in an environment that has Flower.

Weights go to the program that trains and come back from it, pickled, through the standard streams: one array of all
weights, and for a round one array by each node with its examples.
"""

import pickle
import sys

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

TO, FROM = sys.stdout.buffer, sys.stdin.buffer


def tell(kind, number, weights):
    """Send a request; the answer."""
    pickle.dump((kind, number, weights), TO)
    TO.flush()
    return pickle.load(FROM)


class Piped(Grid):
    """A grid whose nodes train in the program at the other end of the pipe."""

    def __init__(self, nodes):
        self.nodes = nodes

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **options):
        raise NotImplementedError

    def push_messages(self, messages):
        raise NotImplementedError

    def pull_messages(self, message_ids):
        raise NotImplementedError

    def get_node_ids(self):
        return list(range(1, self.nodes + 1))

    def send_and_receive(self, messages, *, timeout=None):
        messages = {message.metadata.dst_node_id: message for message in messages}
        if not messages:
            return []
        content = next(iter(messages.values())).content
        weights, number = content["arrays"]["weights"].numpy(), content["config"]["server-round"]
        trained = tell("train", number, weights)
        replies = []
        for node, message in messages.items():
            message.metadata.__dict__["_message_id"] = f"{number}-{node}"
            changed, examples = trained[node - 1]
            records = {"arrays": record(changed), "metrics": MetricRecord({"num-examples": examples})}
            replies.append(Message(RecordDict(records), reply_to=message))
        return replies


def record(weights):
    return ArrayRecord({"weights": Array(np.ascontiguousarray(weights))})


def main(nodes, rounds):
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes).start(
        Piped(nodes),
        record(pickle.load(FROM)),
        rounds,
        evaluate_fn=lambda number, arrays: tell("evaluate", number, arrays["weights"].numpy()),
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
