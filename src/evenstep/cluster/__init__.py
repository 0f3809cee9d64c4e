"""Describes a cluster: its workers, devices, network and disturbances, from the cluster file and `--slow`."""

from evenstep.cluster.cluster import Cluster, ClusterWorker, Host, Link
from evenstep.cluster.read import parse_cluster, parse_slow
from evenstep.cluster.spot import DrawnSpot, RecordedSpot, Stay

__all__ = [
    "Cluster",
    "ClusterWorker",
    "DrawnSpot",
    "Host",
    "Link",
    "RecordedSpot",
    "Stay",
    "parse_cluster",
    "parse_slow",
]
