"""Keeps a forked process, such as a data worker, from collecting its parent's garbage.

The garbage may hold the connections of a closed run, in a cycle. Gloo closes a connection with its threads, which a
fork does not have, and on the parent's descriptors: collecting in the child would hang forever, or end the parent.
"""

import gc
import os

# Once per process, for every kind of fork. A child never collects what existed before it.
os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze)
