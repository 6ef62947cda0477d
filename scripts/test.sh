#!/usr/bin/env bash
# Runs the test-suite, after setting up what is missing.
#
#   bash scripts/test.sh [--full] [ARGUMENT OF PYTEST ...]
#
# --full adds the tests marked slow. On a quiet machine the whole takes 20 to 30 minutes, with --full 70; each folder of
# tests has a budget of its own, in tests/conftest.py. Twice that time ends a run that hangs; a busy machine needs some
# of it.
set -euo pipefail

home="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
minutes=60
options=()
for argument in "$@"; do
    if [[ "$argument" == --full ]]; then
        minutes=140
        options+=(-m "")
    else
        options+=("$argument")
    fi
done

bash "$home/scripts/setup.sh" --quiet recipes dev
cd -- "$home"
# Two cores and many processes: more threads make every one of them slower.
export OMP_NUM_THREADS=1
# SIGINT lets pytest report and its clusters shut down; what does not listen is killed a minute later.
status=0
timeout --foreground --signal=INT --kill-after=60 "${minutes}m" \
    .venv/bin/python -m pytest "${options[@]}" || status=$?
if ((status == 124 || status == 137)); then
    echo "test.sh: not done after $minutes minutes, so the run was ended; pytest --durations=20 shows what is slow" >&2
fi
exit "$status"
