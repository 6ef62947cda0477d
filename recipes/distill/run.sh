#!/usr/bin/env bash
# On-policy distillation. Installs missing dependencies, lets a teacher train a student on the student's own responses,
# and prints the improvement.
#   bash recipes/distill/run.sh                                  the demonstration, on a CPU
#   bash recipes/distill/run.sh seed=2 run_dir=runs/two          any option; --help lists them
#   bash recipes/distill/run.sh --dry_run                        the plan as JSON; starts nothing
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
script="${TROUPE_HOME:-$here/../..}/scripts/run_recipe.sh"
if [[ ! -f "$script" ]]; then
    echo "run.sh: no troupe project at ${TROUPE_HOME:-$here/../..}; set TROUPE_HOME to the folder of its clone" >&2
    exit 2
fi
exec bash "$script" "$here" "$@"
