#!/usr/bin/env bash
# Episodes of many turns: sets up what is missing, trains a policy in a world that answers, and says what it gained.
#   bash recipes/multi_turn/run.sh                                    the demonstration, on a CPU
#   bash recipes/multi_turn/run.sh agent.func_path=my_agent.py        a world of your own
#   bash recipes/multi_turn/run.sh seed=2 run_dir=runs/two            any setting of config.py
#   bash recipes/multi_turn/run.sh --dry_run                          what would run where, as JSON
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
script="${TROUPE_HOME:-$here/../..}/scripts/run_recipe.sh"
if [[ ! -f "$script" ]]; then
    echo "run.sh: no troupe project at ${TROUPE_HOME:-$here/../..}; set TROUPE_HOME to the folder of its clone" >&2
    exit 2
fi
exec bash "$script" "$here" "$@"
