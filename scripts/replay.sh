#!/usr/bin/env bash
# Repeat a training step of a run from its nearest checkpoint and its stored rollouts, and compare it to the bit:
#
#   bash scripts/replay.sh runs/a --step 12
#   bash scripts/replay.sh runs/a --step 12 --set algorithm.clip_high=0.3      what changes with another option
#   bash scripts/replay.sh runs/a --step 12 --regenerate                        generate the rollouts again
#
# Exit code: 0 equal, or options were changed; 1 different; 2 the step cannot be replayed.
set -euo pipefail
exec python3 "$(dirname -- "${BASH_SOURCE[0]}")/replay.py" "$@"
