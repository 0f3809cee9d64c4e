"""DBS on four measured GPUs: how even the epochs become, in virtual time, and in one real segment of training.

DBS sets sizes once an epoch, from the speeds of the last one as if time were in proportion to size. Where it has a
fixed part too, each epoch comes nearer to even times without being there at once.
"""

import itertools
import sys

import numpy as np
from harness import clusters, record, segments, virtual

from evenstep.cluster.slowness import MEASURED_CURVES, PointCurve
from evenstep.core.errors import ConfigError
from evenstep.core.load.equal import EqualPolicy
from evenstep.schemes import parse_scheme

BATCH, EPOCHS, EPOCH = 512, 7, 12
SCHEME = "dbs"


def main():
    options = record.arguments(__doc__).parse_args()
    epochs = 3 if options.quick else EPOCHS
    try:
        scheme = parse_scheme(SCHEME)
    except ConfigError as error:
        record.console.print(f"nothing to measure: {error}")
        return 0
    curves = [PointCurve.measured(name) for name in MEASURED_CURVES]
    cluster = clusters.cluster_of(curves)
    if isinstance(scheme.load.policy(len(cluster)), EqualPolicy):
        record.console.print(f"nothing to measure: {SCHEME} always has equal sizes, so it has not been built yet")
        return 0
    sizes, _ = virtual.train(scheme.load, cluster, BATCH, epochs * EPOCH, EPOCH)
    plan = segments.Plan(
        cluster=cluster,
        global_batch_size=BATCH,
        variants=(
            segments.Variant(
                name=SCHEME, scheme=SCHEME, iterations=epochs * EPOCH, warmup=EPOCH, epoch_iterations=EPOCH
            ),
        ),
        repetitions=1,
        seed=options.seed,
    )
    raw = segments.run(plan, record.console.print)
    real_sizes = segments.sizes_of(raw[SCHEME][0])
    in_virtual_time, for_real = _epochs(curves, sizes), _epochs(curves, real_sizes)
    unrounded = _unrounded(curves, epochs)
    least, _ = clusters.best(curves, BATCH)
    done = record.publish(
        "dbs_fixed_point",
        f"DBS on four measured GPUs, global batch {BATCH}, optimum {1000 * least:.1f} ms",
        options,
        config={
            "curves": list(MEASURED_CURVES),
            "global_batch_size": BATCH,
            "optimum_seconds": least,
            "epochs": epochs,
            "epoch_iterations": EPOCH,
        },
        figures=[
            record.figure(f"slowest over fastest worker, epoch {epochs}, in virtual time",
                          [in_virtual_time[-1]["ratio"]]),
            record.figure(f"slowest over fastest worker, epoch {epochs}, real", [for_real[-1]["ratio"]]),
            record.figure(f"time of epoch {epochs} over the optimum, in virtual time",
                          [in_virtual_time[-1]["seconds"] / least]),
            record.figure(f"time of epoch {epochs} over the optimum, real", [for_real[-1]["seconds"] / least]),
        ],
        tables=[
            _table("In virtual time", in_virtual_time, unrounded),
            _table("Real training on emulated devices", for_real, unrounded),
        ],
        raw={"virtual": in_virtual_time, "real": for_real, "unrounded": unrounded, "segments": raw},
        overrun=record.overruns(raw),
    )  # fmt: skip
    return 0 if done else 1


def _epochs(curves, sizes):
    """Each epoch's sizes, and the emulated times of its iterations."""
    epochs = []
    for first in range(0, len(sizes), EPOCH):
        of_epoch = [list(map(int, each)) for each in sizes[first : first + EPOCH]]
        if any(each != of_epoch[0] for each in of_epoch):
            raise AssertionError("the sizes changed within an epoch")
        seconds = [curve.seconds(size) for curve, size in zip(curves, of_epoch[0], strict=True)]
        epochs.append({"sizes": of_epoch[0], "seconds": max(seconds), "ratio": max(seconds) / min(seconds)})
    return epochs


def _unrounded(curves, epochs):
    """The published recursion on real numbers of samples, with straight lines between whole ones: the ratios."""
    sizes, ratios, whole = np.full(len(curves), BATCH / len(curves)), [], np.arange(1, BATCH + 1)
    times = [np.array([curve.seconds(int(size)) for size in whole]) for curve in curves]
    for _ in range(epochs):
        seconds = np.array([np.interp(size, whole, each) for size, each in zip(sizes, times, strict=True)])
        ratios.append(float(seconds.max() / seconds.min()))
        sizes = BATCH * (sizes / seconds) / (sizes / seconds).sum()
    return ratios


def _table(title, epochs, unrounded):
    changes = [
        None,
        *(np.abs(np.subtract(b["sizes"], a["sizes"])).sum() // 2 for a, b in itertools.pairwise(epochs)),
    ]
    return record.table(
        title,
        ("epoch", "sizes", "iteration, ms", "slowest over fastest", "without rounding", "samples moved"),
        [
            [
                str(number),
                "/".join(map(str, epoch["sizes"])),
                f"{1000 * epoch['seconds']:.1f}",
                f"{epoch['ratio']:.3f}",
                f"{exact:.3f}",
                "" if moved is None else str(moved),
            ]
            for number, (epoch, exact, moved) in enumerate(zip(epochs, unrounded, changes, strict=True), start=1)
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
