#!/usr/bin/env bash
# A reward model from pairs of answers: sets up what is missing, trains, exports for transformers.
#   bash recipes/reward_model/run.sh                                     the demonstration, on a CPU
#   bash recipes/reward_model/run.sh seed=2 run_dir=runs/two             any setting of config.py
#   bash recipes/reward_model/run.sh --dry_run                           what would run where, as JSON
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
is_home() { grep -Eqs '^name *= *"troupe"' "$1/pyproject.toml"; }

# The project: where TROUPE_HOME says; else above this folder; else where a Python on PATH imports core from.
find_home() {
    home="${TROUPE_HOME:-$here}"
    [[ -z "${TROUPE_HOME:-}" ]] || return 0
    while ! is_home "$home" && [[ "$home" != / ]]; do home="$(dirname -- "$home")"; done
    ! is_home "$home" || return 0
    for python in ${TROUPE_PYTHON:+"$TROUPE_PYTHON"} python python3 python3.11 python3.12; do
        home="$(cd / && "$python" -c 'import core; print(core.__path__[0])' 2>/dev/null)" || continue
        home="$(dirname -- "$home")"
        ! is_home "$home" || { export TROUPE_PYTHON="$python"; return 0; }
    done
    home=/
}

find_home
if ! is_home "$home"; then
    echo "run.sh: no troupe project at ${TROUPE_HOME:-or above $here}; set TROUPE_HOME to the folder of its clone" >&2
    exit 2
fi
exec bash "$home/scripts/run_recipe.sh" "$here" "$@"
