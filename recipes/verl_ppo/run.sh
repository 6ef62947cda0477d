#!/usr/bin/env bash
# verl's PPO: sets up what is missing, trains on verifiable prompts, and says what the policy gained.
#   bash recipes/verl_ppo/run.sh                                the demonstration, on a CPU
#   bash recipes/verl_ppo/run.sh seed=2 run_dir=runs/two        any setting of config.py
#   bash recipes/verl_ppo/run.sh --dry_run                      what would run where, as JSON
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
script="${TROUPE_HOME:-$here/../..}/scripts/run_recipe.sh"
if [[ ! -f "$script" ]]; then
    echo "run.sh: no troupe project at ${TROUPE_HOME:-$here/../..}; set TROUPE_HOME to the folder of its clone" >&2
    exit 2
fi
exec bash "$script" "$here" "$@"
