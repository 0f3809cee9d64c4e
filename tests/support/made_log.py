"""Logs of small made-up runs behind a barrier, as their workers would have written them."""

import json


def worker_events(worker, *, scheme="bsp", parts, sizes=None, plans=None, notes=False):
    """The events of one of several workers that never drift apart.

    `parts[worker]` is what it does for itself in an iteration, in seconds: (input, compute, script); `sizes[k]` are
    everybody's samples of iteration k, by default 10 each in 12 iterations. Communication takes 5 ms.
    """
    sizes = sizes or [(10,) * len(parts)] * 12
    plans = plans or [(0, sizes[0])]
    run = {
        "worker": worker, "event": "run", "schema": 2, "at": 100.0, "unix_seconds": 5000.0, "workers": len(parts),
        "scheme": scheme, "engine": "collective", "global_batch_size": sum(sizes[0]), "iterations_per_epoch": 6,
    }  # fmt: skip
    yield run
    for iteration, plan in plans:
        yield {"worker": worker, "event": "plan", "iteration": iteration, "batch_sizes": list(plan)}
    began = 100.0
    slowest_compute = max(compute for _, compute, _ in parts)
    latest = max(sum(part) for part in parts)
    entered, compute, script = parts[worker]
    for number, size in enumerate(sizes):
        # All leave the synchronisation before together, then do their own; the script's part ends an iteration.
        synchronised = latest + 0.005 - (entered + compute + script)
        waited = min(slowest_compute - compute, synchronised)
        yield {
            "worker": worker, "event": "iteration", "iteration": number, "epoch": number // 6, "at": began,
            "samples": size[worker], "iteration_seconds": latest + 0.005, "input_seconds": entered,
            "compute_seconds": compute, "wait_seconds": waited, "comm_seconds": synchronised - waited,
            "row": [size[worker], round(compute * 1e6), 0, 2**31 - 1],
            "factors": [1.0, 1.0, 1.0, 1.0],
        }  # fmt: skip
        if notes:
            values = {"loss": 1.0 / (number + 1)}
            yield {
                "worker": worker, "event": "note", "iteration": number, "at": began + latest, "samples": size[worker],
                "values": values,
            }  # fmt: skip
        began += latest + 0.005


def events_of(parts, **more):
    """The events of all workers, worker after worker."""
    return [event for worker in range(len(parts)) for event in worker_events(worker, parts=parts, **more)]


def write_log(folder, parts, **more):
    """The same as files of a run directory."""
    folder.mkdir(parents=True, exist_ok=True)
    for worker in range(len(parts)):
        lines = (json.dumps(event, separators=(",", ":")) for event in worker_events(worker, parts=parts, **more))
        (folder / f"worker-{worker}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder
