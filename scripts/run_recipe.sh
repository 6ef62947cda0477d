#!/usr/bin/env bash
# Common part of run.sh of all recipes, which call it after they have found the project:
#
#   run_recipe.sh RECIPE_FOLDER [ARGUMENT ...]
#
# It installs missing dependencies into .venv, and runs main.py of the folder with the arguments. The current directory
# is not changed, so that relative paths in the arguments are valid.
# TROUPE_PYTHON is the path of a Python that is used instead of .venv, for example in a container or on a cluster.
set -euo pipefail

home="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
here="$(cd -- "$1" && pwd)"
shift
name="$(basename -- "$here")"

# Ctrl-C or SIGTERM while the environment is checked: print one line, as the program itself does.
trap 'printf "%s: stopped before the start\n" "$name" >&2; exit 130' INT
trap 'printf "%s: stopped before the start\n" "$name" >&2; exit 143' TERM

refuse() { printf '%s: %s\n' "$name" "$@" >&2; exit 2; }

# The folder is a Python package, so its name must be a Python name.
[[ "$name" =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] ||
    refuse "the folder $here is to be imported, and \"$name\" is no Python name; rename it to letters, digits and _"
[[ -f "$here/main.py" ]] || refuse "$here has no main.py, so there is nothing to run"

python="${TROUPE_PYTHON:-}"
if [[ -z "$python" ]]; then
    extras=(recipes)
    # A recipe with a gpu.yaml generates with vLLM on GPUs.
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
    # The path gets a folder with only a link to the copy. Its real parent may have files like select.py, which would hide
    # modules of the standard library.
    cache="${TROUPE_CACHE:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/troupe}"
    links="$cache/copies/$(printf '%s' "$here" | cksum | tr -d ' ')"
    if [[ ! "$links/$name" -ef "$here" ]] && ! { mkdir -p -- "$links" && ln -sfn -- "$here" "$links/$name"; }; then
        refuse "$links cannot be written, where a link to the recipe is needed; set TROUPE_CACHE to another folder"
    fi
    path="$links:$home"
fi
# A recipe outside of the project with the name of another module would hide that module everywhere.
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
# Signals are blocked until the program has installed handlers for them (scripts/early_stop.py).
hold=(env --block-signal=INT --block-signal=TERM)
"${hold[@]}" true 2>/dev/null || hold=()
# -P: do not search the current directory for modules.
exec "${hold[@]}" "$python" -P "$home/scripts/early_stop.py" "$module.main" "$@"
