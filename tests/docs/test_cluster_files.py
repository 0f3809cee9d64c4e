"""The page of cluster files has every key that a file may have, and its example is one."""

import re

import pytest
from support.page_blocks import DOCS

from evenstep.cluster import Cluster, DrawnSpot, RecordedSpot, parse_cluster, read
from evenstep.cluster.record import keys_of
from evenstep.cluster.slowness.devices import AffineCurve, Device, DeviceMemory, PointCurve

PAGE = (DOCS / "cluster-files.md").read_text()
TABLES = (
    read._File,
    read._Server,
    read._Repeated,
    read._Measured,
    read._Kind,
    read.ClusterWorker,
    read.Host,
    read.Link,
)
DEVICES = (AffineCurve, PointCurve, Device, DeviceMemory)
KEYS = [*read._SECTIONS, *read._TAKEN, *read._KINDS]
KEYS += [key for table in (*TABLES, *DEVICES, DrawnSpot, RecordedSpot, *read._KINDS.values()) for key in keys_of(table)]


@pytest.mark.parametrize(
    "key", sorted({*KEYS} - {"worker"})
)  # A file says which worker a disturbance slows by `disturb`.
def test_the_page_has_each_key(key):
    assert re.search(rf"(`|\[\[?|\"){key}\b", PAGE)


def test_its_example_is_a_cluster():
    cluster = parse_cluster(re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)[1])
    assert isinstance(cluster, Cluster)
    assert len(cluster) == 4
