#!/usr/bin/env bash
# Runs the tests, after setting up what they need.
#
#   bash scripts/test.sh [--full | --nightly] [ARGUMENT OF PYTEST ...]
#
# (none)      what a change could break: at most 8 minutes on two quiet cores; needs no compiler, browser or vLLM
# --full      everything but what is nightly, at most 40 minutes: adds vLLM (1 GB), reasoning-gym (needs a C compiler)
#             and the report in a browser (needs Chromium or Chrome: apt-get install chromium)
# --nightly   the rest: learning over seeds, all tasks, every copy of a recipe, long stalls
#
# A tier is held to CPU seconds of all its processes, at the speed of a quiet machine (tests/cpu_budget.py), so a busy one
# makes it late and fails nothing. With arguments (bash scripts/test.sh tests/core -k future) only a part runs, and no
# budget counts. Two tests run side by side; -n 4 makes it four.
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
# SIGINT lets pytest report and its clusters shut down; what does not listen is killed a minute later.
status=0
timeout --foreground --signal=INT --kill-after=60 "${minutes}m" \
    .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "$marks" "${options[@]}" || status=$?
if ((status == 124 || status == 137)); then
    echo "test.sh: not done after $minutes minutes, so the run was ended; pytest --durations=20 shows what is slow" >&2
fi
exit "$status"
