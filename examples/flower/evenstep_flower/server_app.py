"""The server: Flower's FedAvg in rounds whose nodes finish together, or without rounds."""

import time

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from evenstep.integrations.flower import Asynchronous, LoadBalanced
from evenstep.schemes import parse_scheme
from evenstep_flower import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    scheme = parse_scheme(config["scheme"])
    fedavg = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)  # With the remaining nodes.
    if scheme.served is None:
        strategy = LoadBalanced(
            fedavg, scheme, mode=config["mode"], patience=config["patience"] or None, run_dir=config["run-dir"] or None
        )
    else:
        strategy = Asynchronous(fedavg, scheme, buffer=config["buffer"], run_dir=config["run-dir"] or None)
    while len(list(grid.get_node_ids())) < config["nodes"]:
        time.sleep(1.0)
    data = task.test_data()

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": task.accuracy({name: array.numpy() for name, array in arrays.items()}, data)})

    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord({name: Array(values) for name, values in task.initial().items()}),
        num_rounds=config["rounds"],
        timeout=config["timeout"],
        train_config=ConfigRecord({name: config[name] for name in ("batch-size", "steps", "lr")}),
        evaluate_fn=evaluate,
    )
    print("final accuracy:", result.evaluate_metrics_serverapp[config["rounds"]]["accuracy"])
