"""Workers that end as they are told, one word per worker: a signal's name, an exit code, or what their error says."""

import json
import os
import signal
import sys
from pathlib import Path

# One write: workers share the pipe, and two writes of a line let another worker's come between.
sys.stderr.write(f"worker {os.environ['RANK']} start {os.environ['EVENSTEP_RESTART']}\n")
how = sys.argv[1 + int(os.environ["RANK"])]
if how.startswith("SIG"):
    os.kill(os.getpid(), getattr(signal, how))
if how.isdigit():
    sys.exit(int(how))
error = {"message": f"WorkerLostError: {how}", "extraInfo": {"timestamp": "1"}}
Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": error}))
sys.exit(1)
