#!/usr/bin/env bash
# What run.sh of every recipe does once it has found the project:
#
#   run_recipe.sh RECIPE_FOLDER [ARGUMENT ...]
#
# Sets the environment up when it is not ready, and runs main.py of the folder with the arguments. The current
# folder stays what it is, so relative paths in the arguments mean what they say.
# TROUPE_PYTHON names a Python to use as it is, in place of .venv (a container, a cluster's environment).
set -euo pipefail

home="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
here="$(cd -- "$1" && pwd)"
shift
name="$(basename -- "$here")"

# Ctrl-C or SIGTERM while the environment is looked at: one line, as from the program itself.
trap 'printf "%s: stopped before the start\n" "$name" >&2; exit 130' INT
trap 'printf "%s: stopped before the start\n" "$name" >&2; exit 143' TERM

refuse() { printf '%s: %s\n' "$name" "$@" >&2; exit 2; }

# Python imports the folder by its name.
[[ "$name" =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] ||
    refuse "the folder $here is to be imported, and \"$name\" is no Python name; rename it to letters, digits and _"
[[ -f "$here/main.py" ]] || refuse "$here has no main.py, so there is nothing to run"

python="${TROUPE_PYTHON:-}"
if [[ -z "$python" ]]; then
    extras=(recipes)
    # Its gpu.yaml is for runs on GPUs, where vLLM generates.
    if [[ -f "$here/gpu.yaml" ]] && timeout 30 nvidia-smi >/dev/null 2>&1; then
        extras+=(vllm)
    fi
    if ! bash "$home/scripts/setup.sh" --quiet "${extras[@]}" >&2; then
        ((${#extras[@]} > 1)) || exit 1
        bash "$home/scripts/setup.sh" --quiet recipes >&2
        printf '%s: vLLM could not be installed, so transformers generates, which is slower\n' "$name" >&2
    fi
    python="$home/.venv/bin/python"
elif ! command -v -- "$python" >/dev/null; then
    refuse "TROUPE_PYTHON=$python cannot be run; name a Python 3.11 or 3.12, or unset it"
fi

path="$home"
module="$name"
if [[ "$(dirname -- "$here")" -ef "$home/recipes" ]]; then
    module="recipes.$name"
else
    # A folder with a link to the copy alone: what lies beside it, perhaps a select.py, is not to be imported.
    cache="${TROUPE_CACHE:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/troupe}"
    links="$cache/copies/$(printf '%s' "$here" | cksum | tr -d ' ')"
    if [[ ! "$links/$name" -ef "$here" ]] && ! { mkdir -p -- "$links" && ln -sfn -- "$here" "$links/$name"; }; then
        refuse "$links cannot be written, where a link to the recipe is needed; set TROUPE_CACHE to another folder"
    fi
    path="$links:$home"
fi
# A recipe elsewhere that is called as a module of Python's or of a package would be taken for it, everywhere.
env -u PYTHONPATH TROUPE_HOME="$home" "$python" -P - "$module" "$here" <<'PY' || refuse "rename the folder $here"
import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)
import importlib.util
import keyword
import os
import sys

module, here = sys.argv[1:]
if keyword.iskeyword(module.rpartition(".")[2]):
    sys.exit(f"{module} is a word of the Python language")
if "." not in module:
    sys.path.append(os.environ["TROUPE_HOME"])
    spec = importlib.util.find_spec(module)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if spec and not any(os.path.isdir(folder) and os.path.samefile(folder, here) for folder in folders):
        sys.exit(f"{module} is also the name of a module of Python's, of ours or of a package: {spec.origin}")
PY

export TROUPE_HOME="$home"
export PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}"
# Signals wait until the program has a handler for them (scripts/early_stop.py).
hold=(env --block-signal=INT --block-signal=TERM)
"${hold[@]}" true 2>/dev/null || hold=()
# -P: the current folder is not searched for modules.
exec "${hold[@]}" "$python" -P "$home/scripts/early_stop.py" "$module.main" "$@"
