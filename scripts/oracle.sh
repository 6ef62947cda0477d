#!/usr/bin/env bash
# Compare the recipes with the real packages (TRL, OpenRLHF, verl), which are installed in a separate environment.
#
#   bash scripts/oracle.sh [--write] [ARGUMENT OF PYTEST ...]
#
# --write     write the measured differences to docs/differences.md
#
# Two variables compare other inputs than those of the page:
# ORACLE_SEED=11       seed of the responses, rewards and masks
# ORACLE_SHAPE=4x4x8   prompts per step (even) x responses per prompt (their product a multiple of 8) x maximum tokens
#
# The environment is in ORACLE_VENV (default .oracle_venv), with the packages of tests/oracle/constraints.txt. Creating it
# takes 3 GB and some minutes; the comparisons take a minute. No tier of scripts/test.sh includes them: run them nightly,
# and after a change of a formula or an adapter.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${ORACLE_VENV:-.oracle_venv}
requirements=$(cat tests/oracle/upstream.txt tests/oracle/constraints.txt)
if [ "$requirements" != "$(cat "$venv/ready" 2>/dev/null)" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet "$(grep '^torch==' constraints.txt)"
    # Without dependencies, because the limits of verl exclude versions that the recipes need.
    "$venv/bin/pip" install --quiet --no-deps -r tests/oracle/upstream.txt
    "$venv/bin/pip" install --quiet -r tests/oracle/constraints.txt
    # Without dependencies, because hydra-core requires an older omegaconf than the recipes.
    "$venv/bin/pip" install --quiet --no-deps "$(grep '^omegaconf==' constraints.txt)"
    echo "$requirements" >"$venv/ready"
fi
if [ "${1:-}" = --write ]; then
    if [ -n "${ORACLE_SEED:-}${ORACLE_SHAPE:-}" ]; then
        echo "scripts/oracle.sh --write: the page has the default seed and shape; unset ORACLE_SEED and ORACLE_SHAPE" >&2
        exit 2
    fi
    export ORACLE_WRITE=1
    shift
fi
OMP_NUM_THREADS=1 exec "$venv/bin/python" -m pytest -q -W ignore tests/oracle "$@"
