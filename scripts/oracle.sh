#!/usr/bin/env bash
# How far the recipes are from the real packages: makes these an environment of their own, and compares.
#
#   bash scripts/oracle.sh [--write] [ARGUMENT OF PYTEST ...]
#
# --write     write docs/differences.md of what was measured
#
# Others than the page's, to see whether the rows still hold:
# ORACLE_SEED=11       what responses, rewards and masks are drawn from
# ORACLE_SHAPE=4x4x8   prompts of a step (even), responses to each (8 or a multiple of it in all), tokens of the longest
#
# The environment is ORACLE_VENV, .oracle_venv unless it is set; tests/oracle/constraints.txt has what is in it. It takes 3 GB
# and some minutes the first time, and then as long as the comparisons, a minute. Part of no tier of scripts/test.sh: run it
# nightly, and after a change of a formula or of an adapter.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${ORACLE_VENV:-.oracle_venv}
wanted=$(cat tests/oracle/upstream.txt tests/oracle/constraints.txt)
if [ "$wanted" != "$(cat "$venv/ready" 2>/dev/null)" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet "$(grep '^torch==' constraints.txt)"
    # Without dependencies: verl's own bounds exclude versions that these recipes have.
    "$venv/bin/pip" install --quiet --no-deps -r tests/oracle/upstream.txt
    "$venv/bin/pip" install --quiet -r tests/oracle/constraints.txt
    # hydra-core asks for an older one than the recipes.
    "$venv/bin/pip" install --quiet --no-deps "$(grep '^omegaconf==' constraints.txt)"
    echo "$wanted" >"$venv/ready"
fi
if [ "${1:-}" = --write ]; then
    if [ -n "${ORACLE_SEED:-}${ORACLE_SHAPE:-}" ]; then
        echo "scripts/oracle.sh --write: the page is of the usual seed and shape; unset ORACLE_SEED and ORACLE_SHAPE" >&2
        exit 2
    fi
    export ORACLE_WRITE=1
    shift
fi
OMP_NUM_THREADS=1 exec "$venv/bin/python" -m pytest -q -W ignore tests/oracle "$@"
