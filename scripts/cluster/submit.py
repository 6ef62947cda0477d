"""Run a recipe on a cluster: on an existing Ray cluster, or on nodes that Slurm allocates.

    python scripts/cluster/submit.py ray recipes/grpo --address http://HEAD:8265 -- run_dir=/shared/runs/one seed=2
    python scripts/cluster/submit.py slurm recipes/grpo --nodes 2 --gpus_per_node 8 -- placement.nodes=2

The options of the recipe follow `--`. They are checked on this machine before anything is submitted. `--dry_run` prints
the script that would run, from the template beside this file (ray_job.sh, slurm.sbatch). See docs/cluster.md.

Exit code: `ray` returns that of the run (0 finished, 1 failed, 2 invalid input, 130 stopped); `slurm` returns 0 once
the job is queued.
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
"""Seconds from a stop request until the job is killed: the 10 minutes that core allows for a step, plus a margin."""
WAIT_S = 300
"""Timeout in seconds for the nodes to join."""
LIMIT_MB = 500
"""Maximum size of the uploaded project. Ray sends at most 512 MiB in one message."""
CHECK_S = 120
"""Timeout in seconds of the dry run."""
POLL_S = 2.0


class Refused(Exception):
    """Raised for a submission that cannot work. The message names what to set."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line. Arguments after `--` become `options`, for the recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind, text in (("ray", "an existing Ray cluster"), ("slurm", "nodes allocated by Slurm")):
        sub = kinds.add_parser(kind, help=text)
        sub.add_argument("recipe", type=Path, help="folder of the recipe")
        sub.add_argument("--name", help="name of the job (default: the recipe)")
        sub.add_argument("--dry_run", action="store_true", help="print the script that would run, and run nothing")
        if kind == "ray":
            sub.add_argument("--address", required=True, help="address of Ray's job server: http://HEAD:8265")
            sub.add_argument(
                "--python", default="python", help="Python of the cluster with the packages (default: python)"
            )
            sub.add_argument("--gpus_per_node", type=int, help="GPUs per node (default: those of the head)")
            continue
        sub.add_argument("--nodes", type=int, required=True, help="number of nodes")
        sub.add_argument("--gpus_per_node", type=int, default=0, help="GPUs per node (default: 0)")
        sub.add_argument("--cpus_per_node", type=int, help="cores per node (default: those that Slurm allocates)")
        sub.add_argument("--python", default=sys.executable, help="Python on the nodes (default: this one)")
        for name in ("time", "partition", "account", "qos"):
            sub.add_argument(f"--{name}", help=f"as sbatch --{name}")
    end = [*arguments, "--"].index("--")
    known = parser.parse_args(arguments[:end])
    known.recipe_options = arguments[end + 1 :]
    known.recipe = known.recipe.expanduser().resolve()
    known.name = known.name or known.recipe.name
    return known


def check(options: argparse.Namespace) -> dict[str, Any]:
    """Return the plan of the run, from the recipe's --dry_run with the number of GPUs of the nodes.

    Raises:
        Refused: there is no such recipe, or it rejects its options.
    """
    run_sh = options.recipe / "run.sh"
    if not run_sh.is_file():
        raise Refused(f"{options.recipe} is not the folder of a recipe: it has no run.sh")
    if not re.fullmatch(r"[\w.-]+", options.name):
        raise Refused(f"--name {options.name!r}: use letters, digits, '-', '_' and '.'")
    refuse_keys(options)
    counts = {name: getattr(options, name, None) for name in ("nodes", "gpus_per_node", "cpus_per_node")}
    for name, count in counts.items():
        if count is not None and count < (name != "gpus_per_node"):
            raise Refused(f"--{name} {count}: set it to at least {int(name != 'gpus_per_node')}")
    # With RAY_ADDRESS the plan is for the nodes of a cluster, not for this machine.
    env = os.environ | {"TROUPE_PYTHON": sys.executable, "TROUPE_HOME": str(ROOT), "RAY_ADDRESS": "auto"}
    if options.gpus_per_node is not None:
        env["CUDA_VISIBLE_DEVICES"] = devices(options.gpus_per_node)
    command = ["bash", str(run_sh), *options.recipe_options, "--dry_run"]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=CHECK_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise Refused(f"{run_sh} --dry_run has not ended within {CHECK_S} s") from error
    if done.returncode:
        raise Refused((done.stderr or done.stdout).strip() or f"{run_sh} --dry_run failed")
    return json.loads(done.stdout)


def refuse_keys(options: argparse.Namespace) -> None:
    """Raise Refused if an option contains a secret key: submitted options are stored and shown in plain text."""
    from training.tracking import redact  # needs the project's Python

    place = {"slurm": "where sbatch is called", "ray": "where Ray is started"}[options.kind]
    for before, option, redacted in zip(
        ["", *options.recipe_options], options.recipe_options, redact(options.recipe_options), strict=False
    ):
        if option == redacted:
            continue
        name = redacted
        if "=" not in name:
            name = f"{before} {redacted}"
        raise Refused(
            f"the option {name} contains a key, which would be stored and shown; remove it, and set the key "
            f"{place}, as WANDB_API_KEY (then use_wandb=true), HF_TOKEN or the like"
        )


def check_nodes(options: argparse.Namespace, plan: dict[str, Any]) -> None:
    """Raise Refused if the number of nodes is less than the plan needs, or more than it uses."""
    machines = {tuple(bundle["machine"]) for bundle in plan["placement"]["bundles"] if bundle.get("machine")}
    needed = max([index for _, index in machines], default=0) + 1
    if options.nodes < needed:
        raise Refused(f"--nodes {options.nodes}, but the options put a role on {needed} machines; set --nodes {needed}")
    used = max(plan.get("node_num", 1), needed)
    if options.nodes > used:
        raise Refused(
            f"--nodes {options.nodes}, but the options use {used} (placement.nodes={used}); the others would be idle; "
            f"set placement.nodes={options.nodes} after --, or --nodes {used}"
        )
    if options.nodes > needed and options.gpus_per_node == 0:
        log_line(options, f"the options put each role on up to {needed} of {options.nodes} nodes")


def devices(count: int) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES for a number of GPUs."""
    return ",".join(map(str, range(count)))


def log_line(options: argparse.Namespace, text: str) -> None:
    """Print a line for the user on stderr; stdout has the script of --dry_run."""
    print(f"{options.name}: {text}", file=sys.stderr, flush=True)


def rendered(template: str, **values: object) -> str:
    """Return a template with its values filled in."""
    return Template((HERE / template).read_text(encoding="utf-8")).substitute(values)


# --- Ray


def ray_script(options: argparse.Namespace, plan: dict[str, Any], identity: str) -> str:
    """Return the script that uploads the project and starts the job.

    Raises:
        Refused: run_dir is relative. The run folder would be in the uploaded copy, and be lost with it.
    """
    run_dir = str(plan["config"]["run_dir"])
    if not Path(run_dir).is_absolute():
        raise Refused(
            f"run_dir={run_dir} is not absolute; on a cluster it must be a path that all nodes see: after --, set "
            "run_dir=/SHARED/FOLDER/NAME"
        )
    module = f"{options.recipe.name}.main"
    ship_recipe = shlex.join(["ship", str(options.recipe.parent), "-h", f"./{options.recipe.name}"])
    if options.recipe.parent == ROOT / "recipes":
        module = f"recipes.{module}"
        ship_recipe = ":"  # uploaded with the project
    # The driver takes the number of GPUs per node from its own machine. It runs on the head, which may have none.
    environment = []
    if options.gpus_per_node is not None:
        environment = ["env", f"CUDA_VISIBLE_DEVICES={devices(options.gpus_per_node)}"]
    # exec, so that a stop signal reaches the run itself and not the shell.
    command = ["exec", *environment, options.python, "-m", module, *options.recipe_options]
    return rendered(
        "ray_job.sh",
        recipe=options.recipe.name,
        id=identity,
        home=shlex.quote(str(ROOT)),
        not_shipped=shlex.quote(str(HERE / "not_shipped.txt")),
        ship_recipe=ship_recipe,
        limit_mb=LIMIT_MB,
        stop_s=STOP_S,
        ray=shlex.quote(program("ray")),
        address=shlex.quote(options.address),
        command=shlex.join(command),
    )


def program(name: str) -> str:
    """Return the path of a program beside this Python, or else its name, to be found on PATH."""
    path = Path(sys.executable).with_name(name)
    if not path.is_file():
        return name
    return str(path)


async def follow(options: argparse.Namespace, identity: str) -> int:
    """Print the output of the job until it ends, and forward stop signals to it. Return its exit code."""
    from ray.job_submission import JobStatus, JobSubmissionClient

    client = JobSubmissionClient(options.address)
    loop = asyncio.get_running_loop()
    stopping: asyncio.Task[None] | None = None

    async def ask_to_stop() -> None:
        nonlocal stopping
        try:
            await loop.run_in_executor(None, client.stop_job, identity)
        except (OSError, RuntimeError) as error:
            log_line(options, f"the stop request failed ({error}); try again")
            stopping = None

    def stop() -> None:
        nonlocal stopping
        if stopping is not None:
            log_line(options, f"still waiting for the job; to detach from it, end process {os.getpid()} with SIGQUIT")
            return
        log_line(options, "stop requested; the job finishes its step and writes a checkpoint")
        stopping = loop.create_task(ask_to_stop())

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        async for lines in client.tail_job_logs(identity):
            print(lines, end="", flush=True)
    except (OSError, RuntimeError) as error:
        log_line(options, f"its output can no longer be read ({error}); waiting for its end")
    info = await loop.run_in_executor(None, client.get_job_info, identity)
    while not info.status.is_terminal():
        await asyncio.sleep(POLL_S)
        info = await loop.run_in_executor(None, client.get_job_info, identity)
    log_line(options, f"the job {identity} has ended: {info.status}")
    if info.status == JobStatus.FAILED:
        # A driver that was killed by a signal has a negative code.
        return max(1, info.driver_exit_code or 1)
    if info.status == JobStatus.STOPPED:
        return 130
    return 0


def run_on_ray(options: argparse.Namespace, plan: dict[str, Any]) -> int:
    """Submit the job and follow it. Return the exit code."""
    identity = f"{options.name}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    script = ray_script(options, plan, identity)
    if options.dry_run:
        print(script, end="")
        return 0
    log_line(options, f"run folder {plan['config']['run_dir']}, which all nodes must see")
    done = subprocess.run(["bash", "-c", script], check=False)
    if done.returncode:
        log_line(
            options,
            f"nothing was started; check that a job server is running at {options.address}, and that "
            "ray[default] is installed on both sides",
        )
        return 2
    return asyncio.run(follow(options, identity))


# --- Slurm


def slurm_script(options: argparse.Namespace, run_dir: Path) -> str:
    """Return the script for sbatch.

    Raises:
        Refused: sbatch does not accept a path or a value.
    """
    if re.search(r"[\s%]", str(run_dir)):
        raise Refused(
            f"run_dir={run_dir}: Slurm writes its log there, and accepts no blanks or % in a path; set another run_dir"
        )
    named = {name: getattr(options, name) for name in ("time", "partition", "account", "qos")}
    named |= {"cpus-per-task": options.cpus_per_node, "gpus-per-node": options.gpus_per_node or None}
    for name, value in named.items():
        if value is not None and not re.fullmatch(r"[\w.,:@+-]+", str(value)):
            raise Refused(f"--{name} {value!r} is not a value that sbatch accepts")
    run_options = [option for option in options.recipe_options if not re.match("(--)?run_dir=", option)]
    gpus = ""
    if options.gpus_per_node:
        gpus = f" --gpus-per-node={options.gpus_per_node}"
    return rendered(
        "slurm.sbatch",
        name=options.name,
        recipe=options.recipe.name,
        nodes=options.nodes,
        directives="\n".join(f"#SBATCH --{name}={value}" for name, value in named.items() if value is not None)
        or "# Time, partition and account are left to Slurm.",
        log_dir=run_dir / "logs",
        run_dir=run_dir,
        grace_s=STOP_S,
        wait_s=WAIT_S,
        cwd=shlex.quote(str(Path.cwd())),
        python=shlex.quote(shutil.which(options.python) or options.python),
        home=shlex.quote(str(ROOT)),
        ray=shlex.quote(str(Path(options.python).with_name("ray"))),
        await_nodes=shlex.quote(str(HERE / "await_nodes.py")),
        resources=f'"--num-cpus=$SLURM_CPUS_ON_NODE" --num-gpus={options.gpus_per_node}',
        step_options=f'"--cpus-per-task=$SLURM_CPUS_ON_NODE"{gpus}',
        command=shlex.join(["bash", str(options.recipe / "run.sh"), *run_options, f"run_dir={run_dir}"]),
    )


def run_on_slurm(options: argparse.Namespace, plan: dict[str, Any]) -> int:
    """Write the script into the run folder, and queue it. Return the exit code."""
    check_nodes(options, plan)
    run_dir = Path(plan["config"]["run_dir"]).expanduser().absolute()
    script = slurm_script(options, run_dir)
    if options.dry_run:
        print(script, end="")
        return 0
    if shutil.which("sbatch") is None:
        raise Refused("sbatch is not installed here; run this on a login node, or print the script with --dry_run")
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    file = run_dir / "job.sbatch"
    file.unlink(missing_ok=True)
    file.touch(mode=0o600)  # its options may be confidential
    file.write_text(script, encoding="utf-8")
    log_line(options, f"run folder {run_dir}, which all nodes must see; sbatch {file} resumes it later")
    return subprocess.run(["sbatch", str(file)], check=False).returncode


def main(arguments: list[str]) -> int:
    """Check and submit the job. Return the exit code."""
    options = parse(arguments)
    try:
        plan = check(options)
        submit = {"ray": run_on_ray, "slurm": run_on_slurm}[options.kind]
        return submit(options, plan)
    except (Refused, OSError) as error:
        message = str(error)
        # A message of the recipe begins with its name already.
        if not message.startswith(options.name):
            message = f"{options.name}: {message}"
        print(message, file=sys.stderr)
        return 2


if __name__ == "__main__":
    reexec_in_venv()
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
