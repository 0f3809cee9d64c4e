#!/bin/bash
# Submits a script that uses Ray Train to a Ray cluster. Change the address and the script, then: bash ray.sh
set -euo pipefail

ray job submit --address "${RAY_ADDRESS:-http://127.0.0.1:8265}" --working-dir . \
  --runtime-env-json "{\"pip\": [\"evenstep[ray,hosts]\"], \"env_vars\": {\"EVENSTEP_SCHEME\": \"${EVENSTEP_SCHEME:-lb-bsp}\"}}" \
  -- python "${SCRIPT:-train.py}"
