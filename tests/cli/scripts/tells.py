"""Writes down what the launcher gave it."""

import json
import os
import sys
from pathlib import Path

names = (
    *("RANK", "WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS", "EVENSTEP_LAUNCH", "EVENSTEP_SECRET"),
    *("EVENSTEP_SCHEME", "EVENSTEP_SLOW", "EVENSTEP_EMULATE", "EVENSTEP_RUN_DIR", "EVENSTEP_TIMEOUT"),
    *("EVENSTEP_BATCH_SIZES", "TORCHELASTIC_USE_AGENT_STORE"),
)
told = {"arguments": sys.argv[2:], **{name: os.environ.get(name) for name in names}}
Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(told))
