"""Shared memory without a name: it is seen by both sides, cannot shrink, and leaves nothing behind."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from evenstep.core.errors import ProtocolError
from evenstep.transport.segment import create_segment, open_segment


@pytest.fixture
def segment():
    descriptor, mapping = create_segment(5000)
    yield descriptor, mapping
    os.close(descriptor)
    mapping.close()


def test_what_one_side_writes_the_other_reads(connected, segment):
    client, server = connected("unix")
    descriptor, ours = segment
    server.send(b"5000", files=[descriptor])
    with open_segment(client.receive(30.0).files[0], 5000) as theirs:
        assert ours[:] == bytes(5000)
        ours[:3] = b"abc"
        assert theirs[:3] == b"abc"
        theirs[-1:] = b"z"
        assert ours[4999] == ord("z")


def test_no_size_of_a_segment_can_be_changed(segment):
    for size in (0, 4999, 5001):
        with pytest.raises(PermissionError):
            os.ftruncate(segment[0], size)


@pytest.mark.parametrize("nbytes", [0, 4999, 5001, 2**40])
def test_a_segment_of_another_size_is_refused_and_its_descriptor_closed(segment, nbytes):
    passed = os.dup(segment[0])
    with pytest.raises(ProtocolError, match=f"a file of 5000 bytes as a segment of {nbytes}"):
        open_segment(passed, nbytes)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(passed)


@pytest.mark.parametrize("flags", [os.MFD_CLOEXEC, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING])
def test_memory_that_could_shrink_is_refused(flags):
    passed = os.memfd_create("test", flags)
    os.ftruncate(passed, 5000)
    if flags & os.MFD_ALLOW_SEALING:
        fcntl.fcntl(passed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    with pytest.raises(ProtocolError, match="can still shrink"):
        open_segment(passed, 5000)


def test_what_is_no_memory_is_refused(tmp_path):
    path = tmp_path / "named"
    path.write_bytes(bytes(5000))
    reader, writer = os.pipe()
    for passed in (os.open(path, os.O_RDWR), reader, writer):
        with pytest.raises(ProtocolError):
            open_segment(passed, 5000)
    with tempfile.TemporaryFile() as file:
        file.truncate(5000)
        with pytest.raises((ProtocolError, OSError)):
            open_segment(os.dup(file.fileno()), 5000)


def test_the_memory_lives_as_long_as_an_array_views_it_and_no_longer():
    descriptor, mapping = create_segment(800)
    # Other tests' segments may be mapped still.
    inode = str(os.fstat(descriptor).st_ino)
    os.close(descriptor)
    array = np.frombuffer(mapping, dtype=np.float64)
    del mapping
    array[:] = 3.0
    assert inode in _mapped_inodes()
    assert array.sum() == 300.0
    del array
    assert inode not in _mapped_inodes()


def _mapped_inodes():
    with open("/proc/self/maps") as maps:
        return {line.split()[4] for line in maps if "memfd:evenstep" in line}


HOLDS_UNTIL_KILLED = """
import signal
import sys
from evenstep.transport.segment import create_segment
content = sys.argv[1].encode()
descriptor, mapping = create_segment(2**20)
mapping[: len(content)] = content
print("ready", flush=True)
signal.pause()
"""


@pytest.mark.multiprocess
def test_a_killed_process_leaves_no_file_behind(tmp_path):
    content = f"a segment of the test in {tmp_path}"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_UNTIL_KILLED, content],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())
    assert not [path for path in Path("/dev/shm").iterdir() if _begins_with(path, content)]


def _begins_with(path, content):
    try:
        with path.open("rb") as file:
            return file.read(len(content)) == content.encode()
    except OSError:  # another test's, gone meanwhile, or no file
        return False


def test_what_needs_no_segment_can_be_imported_where_memory_cannot_be_sealed():
    without = "import fcntl, os; [delattr(fcntl, name) for name in dir(fcntl) if 'SEAL' in name]; del os.memfd_create"
    code = f"{without}; import evenstep.checkpoint, evenstep.torch, evenstep.sim"
    subprocess.run([sys.executable, "-c", code], check=True)
