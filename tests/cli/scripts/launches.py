"""`evenstep run` with stand-ins for its servers: launches.py SERVERCOMMAND... -- ARGUMENTS..."""

import sys

from evenstep.cli.run import parse
from evenstep.launch.launch import launch
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.launch.run_failed import RunFailedError

split = sys.argv.index("--")
options = parse(sys.argv[split + 1 :])
try:
    launch(options, LaunchSettings(scheme=options.scheme), server_command=tuple(sys.argv[1:split]))
except RunFailedError as failure:
    print(failure, file=sys.stderr)
    sys.exit(failure.exit_code)
