"""A worker's place at a server: what it holds is given back."""

import os

import pytest
from support.in_memory import connected_pair

from evenstep.server.server_slot import ServerSlot


def test_a_closed_slot_keeps_neither_its_file_nor_its_memory():
    _, connection = connected_pair()
    slot = ServerSlot(0, 1, 4096, connection)
    (descriptor,) = slot.files
    inode = str(os.fstat(descriptor).st_ino)
    assert inode in _mapped_inodes()
    slot.close()
    slot.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert inode not in _mapped_inodes()


def _mapped_inodes():
    with open("/proc/self/maps") as maps:
        return {line.split()[4] for line in maps if "memfd:evenstep" in line}
