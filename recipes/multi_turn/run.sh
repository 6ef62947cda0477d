#!/usr/bin/env bash
# Multi-turn RL. Installs missing dependencies, trains a policy in an environment, and prints the improvement.
#   bash recipes/multi_turn/run.sh                                    the demonstration, on a CPU
#   bash recipes/multi_turn/run.sh agent.func_path=my_agent.py        an environment of your own
#   bash recipes/multi_turn/run.sh seed=2 run_dir=runs/two            any option; --help lists them
#   bash recipes/multi_turn/run.sh --dry_run                          the plan as JSON; starts nothing
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
script="${TROUPE_HOME:-$here/../..}/scripts/run_recipe.sh"
if [[ ! -f "$script" ]]; then
    echo "run.sh: no troupe project at ${TROUPE_HOME:-$here/../..}; set TROUPE_HOME to the folder of its clone" >&2
    exit 2
fi
exec bash "$script" "$here" "$@"
