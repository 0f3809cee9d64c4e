"""Keeps a forked process, such as a data worker, from collecting its parent's garbage.

The garbage may hold the connections of a closed run, in a cycle. Gloo closes a connection with its threads, which a
fork does not have, and on the parent's descriptors: collecting in the child would hang forever, or end the parent.
"""

import gc
import os
import threading


class _Collecting(threading.local):
    before = False


_collecting = _Collecting()


def _begin() -> None:
    # Otherwise the child's first collection might come before its hook.
    _collecting.before = gc.isenabled()
    gc.disable()


def _end() -> None:
    if _collecting.before:
        gc.enable()


def _end_in_child() -> None:
    gc.freeze()
    _end()


# Once per process, for every kind of fork.
os.register_at_fork(before=_begin, after_in_parent=_end, after_in_child=_end_in_child)
