#!/usr/bin/env bash
# Measure that the demonstration of a recipe learns, and that it does not with learning rate 0:
#
#   bash scripts/prove.sh [--recipe NAME] [SEED ...]
#
# It runs the recipe (openrlhf_ppo, grpo, reinforce_pp, multi_turn or verl_ppo; default openrlhf_ppo) once per seed
# (default 1 2 3), and once with learning rate 0 for the first seed. It then prints a table and the thresholds
# (scripts/prove_table.py). The runs stay in runs/prove-<time>/, or in the folder PROVE_DIR. Exit code: 0 all thresholds
# are reached; 1 not all; 2 invalid arguments.
set -euo pipefail

home="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
recipe=openrlhf_ppo
if [[ "${1:-}" == --recipe ]]; then
    recipe="${2:-}"
    shift $(($# < 2 ? $# : 2))
fi
case "$recipe" in
    openrlhf_ppo) still=(train.learning_rate=0 critic.learning_rate=0) ;;
    grpo | reinforce_pp | multi_turn) still=(train.learning_rate=0) ;;
    verl_ppo) still=(actor_rollout_ref.actor.optim.lr=0 critic.optim.lr=0) ;;
    *) echo "prove.sh: there is no threshold for \"$recipe\"; set --recipe to openrlhf_ppo, grpo, reinforce_pp, multi_turn or verl_ppo" >&2; exit 2 ;;
esac
seeds=("$@")
((${#seeds[@]})) || seeds=(1 2 3)
for seed in "${seeds[@]}"; do
    [[ "$seed" =~ ^[0-9]+$ ]] || { echo "prove.sh: a seed is a whole number, not \"$seed\"" >&2; exit 2; }
done

runs="${PROVE_DIR:-$home/runs/prove-$(date +%Y%m%d-%H%M%S)}"
if [[ -e "$runs" ]]; then
    echo "prove.sh: $runs exists, and its runs would be mixed with the new ones; set PROVE_DIR to a new folder" >&2
    exit 2
fi
mkdir -p -- "$runs"

# A failed run is shown in the table. It does not stop the others, whose results are still useful.
run() {
    local name="$1"
    shift
    printf '== %s\n' "$name"
    bash "$home/recipes/$recipe/run.sh" run_dir="$runs/$name" "$@" ||
        echo "prove.sh: the run $name ended with exit code $?" >&2
}
for seed in "${seeds[@]}"; do run "seed-$seed" seed="$seed"; done
run "lr-0" seed="${seeds[0]}" "${still[@]}"

"$home/.venv/bin/python" -P "$home/scripts/prove_table.py" "$runs" "$recipe"
