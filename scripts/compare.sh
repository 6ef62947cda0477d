#!/usr/bin/env bash
# Find the first step and quantity in which two runs differ, with the options and versions that differ:
#
#   bash scripts/compare.sh runs/a runs/b
#
# Exit code: 0 all common steps are equal; 1 they differ; 2 a folder is not the folder of a run.
set -euo pipefail
exec python3 "$(dirname -- "${BASH_SOURCE[0]}")/compare.py" "$@"
