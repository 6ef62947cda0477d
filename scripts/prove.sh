#!/usr/bin/env bash
# Shows that the demonstration learns, and that it is the learning rate that does it:
#
#   bash scripts/prove.sh [--recipe NAME] [SEED ...]
#
# One run of the recipe (openrlhf_ppo, grpo, reinforce_pp, multi_turn or verl_ppo; the first without --recipe) for each
# seed (1 2 3), and one with learning rate 0 of the first seed. Ends with a table and the bars it is held to
# (scripts/prove_table.py). The runs stay in runs/prove-<time>/, or in the folder that PROVE_DIR names. Exit code: 0 all
# bars reached; 1 not; 2 bad input.
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
    *) echo "prove.sh: there is no bar for \"$recipe\"; set --recipe to openrlhf_ppo, grpo, reinforce_pp, multi_turn or verl_ppo" >&2; exit 2 ;;
esac
seeds=("$@")
((${#seeds[@]})) || seeds=(1 2 3)
for seed in "${seeds[@]}"; do
    [[ "$seed" =~ ^[0-9]+$ ]] || { echo "prove.sh: a seed is a whole number, not \"$seed\"" >&2; exit 2; }
done

runs="${PROVE_DIR:-$home/runs/prove-$(date +%Y%m%d-%H%M%S)}"
if [[ -e "$runs" ]]; then
    echo "prove.sh: $runs exists; name a folder that does not, so that no earlier run is taken for a new one" >&2
    exit 2
fi
mkdir -p -- "$runs"

# A run that fails shows in the table; the others are still worth having.
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
