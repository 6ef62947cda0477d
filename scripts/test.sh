#!/usr/bin/env bash
# Run the tests, after installing what they need.
#
#   bash scripts/test.sh [--full | --nightly] [ARGUMENT OF PYTEST ...]
#
# (none)      the default tier, for every change: at most 8 minutes on two idle cores; no compiler, browser or vLLM
# --full      all tests except the nightly ones, at most 40 minutes: adds vLLM (1 GB), reasoning-gym (needs a C compiler)
#             and the report in a browser (needs Chromium or Chrome: apt-get install chromium)
# --nightly   the other tests: learning over several seeds, all tasks, every copy of a recipe, long stalls
#
# Each tier has a budget of CPU seconds for all its processes, scaled to the speed of an idle machine
# (tests/cpu_budget.py). A busy machine makes a tier slower, but does not make it fail. With arguments
# (bash scripts/test.sh tests/core -k future) the budget is not checked. Two tests run in parallel; -n 4 runs four.
set -euo pipefail

home="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
tier=default
options=()
for argument in "$@"; do
    case "$argument" in
        --full) tier=full ;;
        --nightly) tier=nightly ;;
        *) options+=("$argument") ;;
    esac
done
case "$tier" in
    default) extras=(recipes test) marks="not full and not nightly" budget=900 minutes=60 ;;
    full) extras=(recipes dev vllm) marks="not nightly" budget=4800 minutes=85 ;;
    nightly) extras=(recipes dev vllm) marks="nightly" budget=0 minutes=480 ;;
esac
((${#options[@]} || budget == 0)) || options=(--cpu-budget="$budget")

bash "$home/scripts/setup.sh" --quiet "${extras[@]}"
cd -- "$home"
# SIGINT lets pytest print its report and shut its clusters down. Processes that ignore it are killed a minute later.
status=0
timeout --foreground --signal=INT --kill-after=60 "${minutes}m" \
    .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "$marks" "${options[@]}" || status=$?
if ((status == 124 || status == 137)); then
    echo "test.sh: stopped after $minutes minutes; pytest --durations=20 lists the slowest tests" >&2
fi
exit "$status"
