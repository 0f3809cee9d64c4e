"""What each benchmark judges: the files and folders whose changes can change its figures, not all that it runs.

A path without `benchmarks/` or `examples/` before it is in src/evenstep. A benchmark's own modules are not named here:
they are found by its imports. Files that it starts as programs, or reads, are.
"""

SIZES = ("core/load",)
WORKERS = (
    "torch/data/loop.py", "torch/engines/collective.py", "torch/engines/engine.py", "torch/engines/reports.py",
    "torch/engines/weighting.py", "worker/iteration.py", "worker/meter.py", "worker/tracker.py",
)  # fmt: skip
EMULATED = (*SIZES, *WORKERS, "cluster/slowness", "worker/hold.py")
DECIDED = (*SIZES, "core/coordinate", "core/sync")
SIMULATED = (*DECIDED, "cluster/slowness", "sim")
UPDATES = ("core/coordinate", "core/sync", "server/shard")
SERVED = (
    "server/commits.py", "server/primary.py", "server/requests.py", "server/shard", "torch/engines/served.py",
    "worker/servers/exchange.py", "worker/servers/replies.py",
)  # fmt: skip
WRAPPERS = (
    "integrations/_accelerate_loader.py", "integrations/accelerate.py", "integrations/lightning.py",
    "integrations/transformers.py",
)  # fmt: skip
CLAIMED = (
    "contention", "contention-hog", "dssp_table_one", "federated", "group_accuracy", "predictors", "steady-4",
    "stragglers", "updates_to_target",
)  # fmt: skip
EXAMPLES = tuple(f"examples/clusters/{name}.toml" for name in ("contended-cpus", "four-gpus", "one-delayed"))
SCRIPTS = tuple(
    f"examples/{name}.py" for name in (
        "char_lm", "custom_policy", "ddp_evenstep", "fsdp", "gpt", "images", "lengths", "numpy_balancer", "own_batches",
        "resume",
    )
)  # fmt: skip

JUDGES = {
    "advice": ("advice", *SIMULATED),
    "balance": ("core/samples/balanced.py", "core/samples/parts.py"),
    "change": EMULATED,
    "claimed_gain": (*SIZES, *WORKERS, "examples/char_lm.py", "report/account", "worker/summary.py"),
    "claims": (
        *(f"benchmarks/results/{name}.json" for name in CLAIMED), *SIMULATED, "examples/clusters/dbs-episodes.toml",
        "examples/clusters/four-gpus.toml", "examples/clusters/r2sp.toml",
    ),
    "combinations": (*SIMULATED, "core/groups"),
    "contention": (*SIZES, *WORKERS, "worker/factors.py"),
    "cost": (*EMULATED, "core/samples", "torch/costs.py", "torch/data"),
    "dbs_fixed_point": EMULATED,
    "compiling": (*SIZES, *WORKERS, "benchmarks/harness/compiled_worker.py", "jax"),
    "deciding": (*SIMULATED, "benchmarks/traces/sizes", *EXAMPLES),
    "dssp_table_one": (*DECIDED, *SERVED),
    "event_log": ("telemetry/events.py", "telemetry/recorder.py", "worker/iteration.py"),
    "exchange": (
        *SERVED, "benchmarks/contestants/mxnet_node.py", "benchmarks/contestants/native.c", "server/local_poller.py",
        "server/send_queue.py", "server/session.py", "torch/engines/served_parameters.py", "transport",
        "worker/servers",
    ),
    "federated": ("benchmarks/contestants/flower_fedavg.py", "cluster/slowness", "core/rounds", "sim/rounds.py"),
    "fidelity": (*SIMULATED, *WORKERS, *SERVED),
    "first_contact": (
        *EMULATED, *SCRIPTS, "examples/cluster.toml", "cli/demonstration", "integrations", "jax", "mxnet",
        "report/account", "tensorflow", "worker/api", "worker/summary.py",
    ),
    "frameworks": (*EMULATED, "benchmarks/harness/framework_worker.py", "jax", "mxnet", "tensorflow", "worker/api"),
    "gpu": (*WORKERS, "benchmarks/harness/gpu_memory.py", "torch/cuda.py", "torch/model.py", "worker/device_memory.py"),
    "gpu_curves": EMULATED,
    "group_accuracy": (*UPDATES, "core/groups", "server/group"),
    "group_rates": ("core/sync/rate.py",),
    "integrations": (*SIZES, *WORKERS, *WRAPPERS),
    "elastic": ("torch/elastic", *SIZES, *WORKERS),
    "accumulation": ("benchmarks/integrations.py", *SIZES, *WORKERS, *WRAPPERS),
    "streams": ("benchmarks/integrations.py", *SIZES, *WORKERS, "core/samples/own.py", "torch/data"),
    "integrations_parity": (*WORKERS, *WRAPPERS, "integrations/ray.py"),
    "load_schemes": EMULATED,
    "loaders": ("core/samples", "torch/data"),
    "local_steps": (
        "benchmarks/harness/local_steps_worker.py", "core/fragments.py", "tensors", "torch/engines/averages.py",
        "torch/engines/hierarchical_sum.py", "torch/engines/local.py", "torch/engines/narrow.py",
        "torch/engines/served_local.py",
    ),
    "meshes": (*SIZES, *WORKERS, "torch/engines/sharded.py", "worker/peers.py"),
    "momentum_rules": SIMULATED,
    "overhead": (
        *WORKERS, "torch/data/batches.py", "torch/data/fetch.py", "torch/engines/direct_sum.py",
        "torch/engines/summing_group.py", "torch/engines/traces.py", "torch/model.py", "worker/hand_outs.py",
    ),
    "planning": (*SIZES, "core/samples"),
    "predictors": ("benchmarks/traces", "core/load/narx.py", "core/load/narx_network.py"),
    "report_cost": ("report/overview.py", "report/page", "report/recorded.py", "telemetry/reading.py"),
    "served_accuracy": UPDATES,
    "served_schemes": (*SIMULATED, *SERVED),
    "server_hosts": (*SERVED, "benchmarks/harness/hosts_worker.py", "schemes/grouped.py", "server/group", "transport"),
    "server_memory": ("server/shard", "server/shard_state.py", "server/server_slot.py", "transport"),
    "simulator_speed": SIMULATED,
    "small_sums": ("torch/engines/direct_sum.py",),
    "startup": (
        "benchmarks/harness/first_iteration.py", "cli/main.py", "cli/run.py", "launch/launch.py", "launch/one_host.py",
        "torch/prepare.py", "torch/processes/join_workers.py", "torch/running.py",
    ),
    "steady": EMULATED,
    "stragglers": (*SIMULATED, *SERVED, "core/groups", "server/group"),
    "time_to_accuracy": SIMULATED,
    "two_unequal_hosts": (
        *SIZES, *WORKERS, "examples/ddp_evenstep.py", "report/account", "worker/summary.py",
    ),
    "updates_to_target": (*SIZES, *WORKERS, "cli/demonstration/setting.py", "cli/demonstration/train.py"),
}  # fmt: skip
ALL = ("",)
"""What a benchmark judges that is not named above."""
