#!/usr/bin/env bash
# GRPO. Installs missing dependencies, trains on prompts with verifiable answers, and prints the improvement.
#   bash recipes/grpo/run.sh                                          the demonstration, on a CPU
#   bash recipes/grpo/run.sh seed=2 run_dir=runs/two                  any option; --help lists them
#   bash recipes/grpo/run.sh --dry_run                                the plan as JSON; starts nothing
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
script="${TROUPE_HOME:-$here/../..}/scripts/run_recipe.sh"
if [[ ! -f "$script" ]]; then
    echo "run.sh: no troupe project at ${TROUPE_HOME:-$here/../..}; set TROUPE_HOME to the folder of its clone" >&2
    exit 2
fi
exec bash "$script" "$here" "$@"
