"""If a reward server dies or hangs during a run, the run ends and no rollout is lost."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from local_runs import LocalRun, run_here
from outage import Server, held_port
from recipe_runs import Run, RunFolder

from components.batch.reading import load_batch
from tests.messages import says

pytestmark = pytest.mark.full
PPO = """prompt_data=task:sort max_samples=48 rollout_batch_size=8 n_samples_per_prompt=4 train_batch_size=16
    use_dynamic_batch=true generate_max_len=8 actor_learning_rate=3e-4 critic_learning_rate=1e-3 save_steps=-1"""
JUDGED = """eval_dataset=task:sort reward.heldout_source=sort eval_steps=2 evaluation.max_samples=32
    eval_n_samples_per_prompt=1 best_eval_metric_key=none"""
GRPO = """data.path=task:sort data.max_samples=32 prompts_per_step=8 samples_per_prompt=4 train.mini_batch_size=16
    rollout.max_new_tokens=8 train.learning_rate=3e-4 checkpoint.every=-1"""

SHORT_TIMEOUT = "reward.url_timeout_s=15"
"""Timeout for a hanging server. Three attempts together take no longer than this."""


class Outage(NamedTuple):
    """A failure of a reward server, and the requests that fail."""

    fails: str = "never"
    at: int = 0
    options: tuple[str, ...] = ()
    """Options of the run that uses the failing server."""


def meet(recipe: str, folder: Path, option: str, options: Sequence[str], outages: Sequence[Outage]) -> list[LocalRun]:
    """Run a recipe twice: with a server that always responds, and with one that fails and is restarted several times.

    Args:
        recipe: its name; it runs with backend=local.
        folder: the runs are its `undisturbed` and its `disturbed`.
        option: that the server's URL is given to.
        options: all others.
        outages: of each server of the second run; the last one does not fail.

    Returns:
        Each start of the second run.
    """
    starts: list[LocalRun] = []
    with held_port() as held:
        for name, outage in [("undisturbed", Outage()), *(("disturbed", outage) for outage in outages)]:
            server = Server(held, outage.fails, outage.at)
            try:
                starts.append(run_here(recipe, folder / name, f"{option}={server.url}", *options, *outage.options))
            finally:
                server.close()
    assert starts[0].code == 0, starts[0].err
    return starts[1:]


def same_end(folder: Path) -> None:
    """Check that both runs end with bit-equal metrics and weights."""
    one, other = RunFolder(folder / "undisturbed"), RunFolder(folder / "disturbed")
    assert one.learnt() == other.learnt()
    a, b = ({name: x.numpy().tobytes() for name, x in run.weights().items()} for run in (one, other))
    assert a.keys() == b.keys()
    assert [name for name in a if a[name] != b[name]] == []


def checked_failure(run: LocalRun | Run, reason: str) -> None:
    """Check for exit code 1 and a last line that names the server."""
    assert run.code == 1, run.err
    assert re.search(says("http://127.0.0.1:", reason), run.err.splitlines()[-1])


def state(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / "disturbed" / "checkpoints" / f"step_{step}" / "state" / "trainer.json").read_text())


@pytest.mark.nightly
def test_a_failed_server_ends_the_run_with_one_line_and_the_resumed_run_is_identical(
    policy: Path, tmp_path: Path
) -> None:
    # Requests: two for the trial before each start (data and held-out data), one for the initial evaluation, one per
    # step, and one each for the evaluations after steps 2 and 4.
    outages = [Outage("dies", 7), Outage("hangs", 5, (SHORT_TIMEOUT,)), Outage()]
    options = [*PPO.split(), *JUDGED.split(), f"pretrain={policy}"]
    dead, slow, whole = meet("openrlhf_ppo", tmp_path, "remote_rm_url", options, outages)

    # The server died in step 3 before training, so its responses wait. It was slow after step 4, which is kept.
    checked_failure(dead, "ConnectError")
    (queued,) = state(tmp_path, 2)["stream"]["queue"]
    assert queued["batch"] == {"__batch__": "batch-stream-queue-0-batch.parquet"}
    checked_failure(slow, "ReadTimeout")
    assert "queue" not in state(tmp_path, 4)["stream"]
    assert state(tmp_path, 4)["unrecorded"]["batch"] == {"__batch__": "unrecorded.parquet"}
    assert "reward/reward" in state(tmp_path, 4)["unrecorded"]["metrics"]
    assert whole.code == 0, whole.err
    lines = RunFolder(tmp_path / "disturbed").metrics
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    # Held-out responses are scored by eval_scorer, which returns 0 or 1. The server returns multiples of a fifth.
    for line in (lines[1], lines[3], lines[5]):
        assert (line["eval/sort_score"] * 32).is_integer()
        assert line["eval/sort_reward"] > line["eval/sort_score"]
    same_end(tmp_path)


@pytest.mark.nightly
def test_generation_is_repeated_if_rewards_are_part_of_it(policy: Path, tmp_path: Path) -> None:
    options = [*GRPO.split(), f"model.path={policy}"]
    # The first request belongs to the trial before the start.
    dead, whole = meet("grpo", tmp_path, "reward.source", options, [Outage("dies", 4), Outage()])
    checked_failure(dead, "ConnectError")
    assert state(tmp_path, 2)["stream"] == {"step": 2}
    assert state(tmp_path, 2)["prompts"]["position"] == 16  # of two steps
    assert whole.code == 0, whole.err
    same_end(tmp_path)


@pytest.mark.nightly
def test_queued_batches_wait_for_rewards_in_asynchronous_runs(ray_address: str, policy: Path, tmp_path: Path) -> None:
    arguments = PPO.replace("max_samples=48", "max_samples=32 async_train=true init_kl_coef=0")
    options = [*arguments.split(), f"pretrain={policy}"]
    held = held_port()
    server = Server(held, fails="dies", at=4)  # the first request belongs to the trial
    run = Run("openrlhf_ppo", ray_address, tmp_path / "run", *options, f"remote_rm_url={server.url}").wait()
    server.close()
    checked_failure(run, "ConnectError")
    saved = json.loads((run.run_dir / "checkpoints" / "step_2" / "state" / "trainer.json").read_text())
    assert len(saved["stream"]["queue"]) >= 1

    server = Server(held)
    run = Run("openrlhf_ppo", ray_address, tmp_path / "run", *options, f"remote_rm_url={server.url}").wait()
    server.close()
    held.close()
    assert run.code == 0, run.err
    trained = [prompt for step in range(1, 5) for prompt in prompts_of(run, step)]
    assert len(trained) == len(set(trained)) == 32


def prompts_of(run: Run, step: int) -> set[int]:
    return set(load_batch(run.run_dir / "rollouts" / f"step_{step:06d}.parquet")["prompt_id"].tolist())
