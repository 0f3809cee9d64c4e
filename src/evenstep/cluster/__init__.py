"""The cluster file, and the launcher's `--slow`: text in, devices and disturbances out."""

from evenstep.cluster.cluster import Cluster, ClusterWorker, Host, Link, parse_cluster
from evenstep.cluster.slow import parse_slow
from evenstep.cluster.spot import DrawnSpot, RecordedSpot, Spot, Stay

__all__ = [
    "Cluster",
    "ClusterWorker",
    "DrawnSpot",
    "Host",
    "Link",
    "RecordedSpot",
    "Spot",
    "Stay",
    "parse_cluster",
    "parse_slow",
]
