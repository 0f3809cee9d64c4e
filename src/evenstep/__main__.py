"""`python -m evenstep` is the command `evenstep`."""

import sys

from evenstep.cli.main import main

sys.exit(main())
