#!/bin/bash
# Submits a script that uses Ray Train to a Ray cluster. Change the address and the script, then: bash ray.sh
# Ray installs evenstep from its wheel, beside the script: pip wheel --no-deps --wheel-dir . /path/to/evenstep
set -euo pipefail

wheel="$(echo evenstep-*.whl)"
# Ray knows this variable where it installs.
requirement="\${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}/${wheel}[ray,hosts]"
ray job submit --address "${RAY_ADDRESS:-http://127.0.0.1:8265}" --working-dir . \
  --runtime-env-json "{\"pip\": [\"$requirement\"], \"env_vars\": {\"EVENSTEP_SCHEME\": \"${EVENSTEP_SCHEME:-lb-bsp}\"}}" \
  -- python "${SCRIPT:-train.py}"
