"""A worker that finishes when the named pipe has been written."""

import sys
from pathlib import Path

Path(sys.argv[1]).read_text()
