#!/usr/bin/env bash
# Runs the test-suite, after setting up what is missing.
#
#   bash scripts/test.sh [--full] [ARGUMENT OF PYTEST ...]
#
# --full adds the tests marked slow. On a quiet machine the whole takes about 60 minutes, with --full 90; each folder of
# tests has a budget of its own, in tests/conftest.py. A run that hangs is ended after 80 minutes, or 160; a busy machine
# needs some of it. `-m vllm` runs those that start vLLM alone, `-m "not vllm and not slow"` the others.
# The tests of the report need a browser: Chromium or Chrome (`apt-get install chromium`).
set -euo pipefail

home="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
minutes=80
options=()
for argument in "$@"; do
    if [[ "$argument" == --full ]]; then
        minutes=160
        options+=(-m "")
    else
        options+=("$argument")
    fi
done

bash "$home/scripts/setup.sh" --quiet recipes dev vllm
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
