"""Run a recipe on a cluster: on a Ray that is there, or on nodes that Slurm gives.

    python scripts/cluster/submit.py ray recipes/grpo --address http://HEAD:8265 -- run_dir=/shared/runs/one seed=2
    python scripts/cluster/submit.py slurm recipes/grpo --nodes 2 --gpus_per_node 8 -- placement.nodes=2

What follows `--` are the recipe's own options; they are checked here before anything is sent. `--dry_run` prints the
script that would run, which is made from the template beside this file (ray_job.sh, slurm.sbatch). docs/cluster.md has
the rest.

Exit code: of `ray` that of the run (0 finished, 1 failed, 2 bad input, 130 stopped); of `slurm` 0 once it is queued.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from string import Template
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT)]

from reexec_in_venv import reexec_in_venv  # noqa: E402

STOP_S = 660
"""Seconds from a stop to the end by force: the 10 minutes that core gives a step, and some."""
WAIT_S = 300
"""Seconds for the nodes to join."""
LIMIT_MB = 500
"""What Ray ships in one message is up to 512 MiB."""
CHECK_S = 120
POLL_S = 2.0


class Refused(Exception):
    """What is asked for cannot be; the message says what to set."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; what follows `--` is kept for the recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind, text in (("ray", "a Ray cluster that is there"), ("slurm", "nodes that Slurm gives")):
        sub = kinds.add_parser(kind, help=text)
        sub.add_argument("recipe", type=Path, help="folder of the recipe")
        sub.add_argument("--name", help="of the job (default: the recipe)")
        sub.add_argument("--dry_run", action="store_true", help="print the script that would run, and run nothing")
        if kind == "ray":
            sub.add_argument("--address", required=True, help="of Ray's job server: http://HEAD:8265")
            sub.add_argument("--python", default="python", help="of the cluster, with the packages (default: python)")
            sub.add_argument("--gpus_per_node", type=int, help="default: as many as the head shows")
            continue
        sub.add_argument("--nodes", type=int, required=True)
        sub.add_argument("--gpus_per_node", type=int, default=0)
        sub.add_argument("--cpus_per_node", type=int, help="default: what Slurm gives")
        sub.add_argument("--python", default=sys.executable, help="on the nodes (default: this one)")
        for name in ("time", "partition", "account", "qos"):
            sub.add_argument(f"--{name}", help=f"as sbatch --{name}")
    at = arguments.index("--") if "--" in arguments else len(arguments)
    known = parser.parse_args(arguments[:at])
    known.options = arguments[at + 1 :]
    known.recipe = known.recipe.expanduser().resolve()
    known.name = known.name or known.recipe.name
    return known


def check(asked: argparse.Namespace) -> dict[str, Any]:
    """The plan of the run, as the recipe's own --dry_run makes it for machines with so many GPUs.

    Raises:
        Refused: there is no such recipe, or it refuses its options.
    """
    run_sh = asked.recipe / "run.sh"
    if not run_sh.is_file():
        raise Refused(f"{asked.recipe} is no folder of a recipe: it has no run.sh")
    if not re.fullmatch(r"[\w.-]+", asked.name):
        raise Refused(f"--name {asked.name!r}: use letters, digits, '-', '_' and '.'")
    refuse_keys(asked)
    counts = {name: getattr(asked, name, None) for name in ("nodes", "gpus_per_node", "cpus_per_node")}
    for name, count in counts.items():
        if count is not None and count < (name != "gpus_per_node"):
            raise Refused(f"--{name} {count}: set it to at least {int(name != 'gpus_per_node')}")
    # RAY_ADDRESS: the machines are a cluster's, not this one.
    env = os.environ | {"TROUPE_PYTHON": sys.executable, "TROUPE_HOME": str(ROOT), "RAY_ADDRESS": "auto"}
    if asked.gpus_per_node is not None:
        env["CUDA_VISIBLE_DEVICES"] = devices(asked.gpus_per_node)
    command = ["bash", str(run_sh), *asked.options, "--dry_run"]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=CHECK_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise Refused(f"{run_sh} --dry_run has not ended within {CHECK_S} s") from error
    if done.returncode:
        raise Refused((done.stderr or done.stdout).strip() or f"{run_sh} --dry_run failed")
    return json.loads(done.stdout)


def refuse_keys(asked: argparse.Namespace) -> None:
    """Refused for a key among the options: what is submitted is kept in plain text, and shown to others."""
    from training.tracking import redact  # of the project's Python

    for before, given, shown in zip(["", *asked.options], asked.options, redact(asked.options), strict=False):
        if given != shown:
            name = shown if "=" in shown else f"{before} {shown}"
            where = "where sbatch is called" if asked.kind == "slurm" else "where Ray is started"
            raise Refused(
                f"the option {name} has a key, which would be written down and shown; leave it out, and set the key "
                f"{where}, as WANDB_API_KEY (then use_wandb=true), HF_TOKEN or the like"
            )


def check_nodes(asked: argparse.Namespace, plan: dict[str, Any]) -> None:
    """Refused unless Slurm is asked for as many nodes as the plan needs, and no more than it uses."""
    on = {tuple(bundle["machine"]) for bundle in plan["placement"]["bundles"] if bundle.get("machine")}
    needed = max([index for _, index in on], default=0) + 1
    if asked.nodes < needed:
        raise Refused(f"--nodes {asked.nodes}, but the options put a role on {needed} machines; set --nodes {needed}")
    used = max(plan.get("node_num", 1), needed)
    if asked.nodes > used:
        raise Refused(
            f"--nodes {asked.nodes}, but the options use {used} (placement.nodes={used}), so that the others would be "
            f"idle; set placement.nodes={asked.nodes} behind --, or --nodes {used}"
        )
    if asked.nodes > needed and asked.gpus_per_node == 0:
        log_line(asked, f"the options put each role on up to {needed} of {asked.nodes} nodes")


def devices(count: int) -> str:
    """So many GPUs, as CUDA_VISIBLE_DEVICES names them."""
    return ",".join(map(str, range(count)))


def log_line(asked: argparse.Namespace, text: str) -> None:
    """A line for the person, beside the script that --dry_run prints."""
    print(f"{asked.name}: {text}", file=sys.stderr, flush=True)


def rendered(template: str, **values: object) -> str:
    """The text of a script."""
    return Template((HERE / template).read_text(encoding="utf-8")).substitute(values)


# --- Ray


def ray_script(asked: argparse.Namespace, plan: dict[str, Any], identity: str) -> str:
    """The script that ships the project and starts the job.

    Raises:
        Refused: the run's folder would be in the copy that is shipped, and be lost with it.
    """
    run_dir = str(plan["config"]["run_dir"])
    if not Path(run_dir).is_absolute():
        raise Refused(
            f"run_dir={run_dir} is not absolute; on a cluster it must be a path that all nodes see: after --, set "
            "run_dir=/SHARED/FOLDER/NAME"
        )
    is_own = asked.recipe.parent == ROOT / "recipes"
    module = f"recipes.{asked.recipe.name}.main" if is_own else f"{asked.recipe.name}.main"
    # The driver counts the GPUs of a node by what it sees; the head, where it runs, may have none.
    seen = [] if asked.gpus_per_node is None else ["env", f"CUDA_VISIBLE_DEVICES={devices(asked.gpus_per_node)}"]
    # exec: who is told to stop is the run itself.
    command = ["exec", *seen, asked.python, "-m", module, *asked.options]
    return rendered(
        "ray_job.sh",
        recipe=asked.recipe.name,
        id=identity,
        home=shlex.quote(str(ROOT)),
        not_shipped=shlex.quote(str(HERE / "not_shipped.txt")),
        ship_recipe=":" if is_own else shlex.join(["ship", str(asked.recipe.parent), "-h", f"./{asked.recipe.name}"]),
        limit_mb=LIMIT_MB,
        stop_s=STOP_S,
        ray=shlex.quote(program("ray")),
        address=shlex.quote(asked.address),
        command=shlex.join(command),
    )


def program(name: str) -> str:
    """A program beside this Python, or on PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.is_file() else name


async def follow(asked: argparse.Namespace, identity: str) -> int:
    """Show what the job prints until it ends; a stop is passed on to it. Returns its exit code."""
    from ray.job_submission import JobStatus, JobSubmissionClient

    client = JobSubmissionClient(asked.address)
    loop = asyncio.get_running_loop()
    stopping: asyncio.Task[None] | None = None

    async def ask_to_stop() -> None:
        nonlocal stopping
        try:
            await loop.run_in_executor(None, client.stop_job, identity)
        except (OSError, RuntimeError) as error:
            log_line(asked, f"the job could not be asked to stop ({error}); try it again")
            stopping = None

    def stop() -> None:
        nonlocal stopping
        if stopping is not None:
            log_line(asked, f"still waiting for the job; to leave it alone, end process {os.getpid()} with SIGQUIT")
            return
        log_line(asked, "asking the job to stop; it finishes its step and writes a checkpoint")
        stopping = loop.create_task(ask_to_stop())

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        async for lines in client.tail_job_logs(identity):
            print(lines, end="", flush=True)
    except (OSError, RuntimeError) as error:
        log_line(asked, f"its output can no longer be followed ({error}); waiting for its end")
    info = await loop.run_in_executor(None, client.get_job_info, identity)
    while not info.status.is_terminal():
        await asyncio.sleep(POLL_S)
        info = await loop.run_in_executor(None, client.get_job_info, identity)
    log_line(asked, f"the job {identity} has ended: {info.status}")
    if info.status == JobStatus.FAILED:
        # A driver that died of a signal has a negative code.
        return max(1, info.driver_exit_code or 1)
    return 130 if info.status == JobStatus.STOPPED else 0


def run_on_ray(asked: argparse.Namespace, plan: dict[str, Any]) -> int:
    """Submit and follow; returns the exit code."""
    identity = f"{asked.name}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    script = ray_script(asked, plan, identity)
    if asked.dry_run:
        print(script, end="")
        return 0
    log_line(asked, f"run folder {plan['config']['run_dir']}, which all nodes must see")
    done = subprocess.run(["bash", "-c", script], check=False)
    if done.returncode:
        log_line(
            asked,
            f"nothing was started; is a job server at {asked.address}, and ray[default] installed here and there?",
        )
        return 2
    return asyncio.run(follow(asked, identity))


# --- Slurm


def slurm_script(asked: argparse.Namespace, run_dir: Path) -> str:
    """The script for sbatch.

    Raises:
        Refused: a path that sbatch cannot take.
    """
    if re.search(r"[\s%]", str(run_dir)):
        raise Refused(f"run_dir={run_dir}: Slurm's log is to be there, and takes no blanks or % in its path")
    named = {name: getattr(asked, name) for name in ("time", "partition", "account", "qos")}
    named |= {"cpus-per-task": asked.cpus_per_node, "gpus-per-node": asked.gpus_per_node or None}
    for name, value in named.items():
        if value is not None and not re.fullmatch(r"[\w.,:@+-]+", str(value)):
            raise Refused(f"--{name} {value!r} is nothing that sbatch takes")
    options = [word for word in asked.options if not re.match("(--)?run_dir=", word)]
    gpus = f" --gpus-per-node={asked.gpus_per_node}" if asked.gpus_per_node else ""
    return rendered(
        "slurm.sbatch",
        name=asked.name,
        recipe=asked.recipe.name,
        nodes=asked.nodes,
        directives="\n".join(f"#SBATCH --{name}={value}" for name, value in named.items() if value is not None)
        or "# Time, partition and account are left to Slurm.",
        log_dir=run_dir / "logs",
        run_dir=run_dir,
        grace_s=STOP_S,
        wait_s=WAIT_S,
        cwd=shlex.quote(str(Path.cwd())),
        python=shlex.quote(shutil.which(asked.python) or asked.python),
        home=shlex.quote(str(ROOT)),
        ray=shlex.quote(str(Path(asked.python).with_name("ray"))),
        await_nodes=shlex.quote(str(HERE / "await_nodes.py")),
        resources=f'"--num-cpus=$SLURM_CPUS_ON_NODE" --num-gpus={asked.gpus_per_node}',
        step_options=f'"--cpus-per-task=$SLURM_CPUS_ON_NODE"{gpus}',
        command=shlex.join(["bash", str(asked.recipe / "run.sh"), *options, f"run_dir={run_dir}"]),
    )


def run_on_slurm(asked: argparse.Namespace, plan: dict[str, Any]) -> int:
    """Write the script into the run's folder, and queue it; returns the exit code."""
    check_nodes(asked, plan)
    run_dir = Path(plan["config"]["run_dir"]).expanduser().absolute()
    script = slurm_script(asked, run_dir)
    if asked.dry_run:
        print(script, end="")
        return 0
    if shutil.which("sbatch") is None:
        raise Refused("there is no sbatch here; run this where jobs are submitted, or see the script with --dry_run")
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    file = run_dir / "job.sbatch"
    file.unlink(missing_ok=True)
    file.touch(mode=0o600)  # what it is run with is nobody else's
    file.write_text(script, encoding="utf-8")
    log_line(asked, f"run folder {run_dir}, which all nodes must see; sbatch {file} continues with it later")
    return subprocess.run(["sbatch", str(file)], check=False).returncode


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    asked = parse(arguments)
    try:
        plan = check(asked)
        return run_on_ray(asked, plan) if asked.kind == "ray" else run_on_slurm(asked, plan)
    except (Refused, OSError) as error:
        print(error if str(error).startswith(asked.name) else f"{asked.name}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    reexec_in_venv()
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
