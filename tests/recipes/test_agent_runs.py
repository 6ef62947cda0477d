"""Every recipe trains on episodes, and generates asynchronously on request."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from gates import Gate, source
from local_runs import LocalRun, run_locally
from recipe_runs import Run, RunFolder

from components.batch import Batch
from components.batch.reading import load_batch
from tests.messages import says

AGENT = """
import asyncio
from agents import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    # The share of letters that come later than the one before, in two turns; the label says which prompt it is.
    async def reset(self, states, **kwargs):
        self.turns = 0
        if states["label"] == "abcde":
            raise RuntimeError("no such environment")
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.turns += 1
        while is_shut(states["label"]):
            await asyncio.sleep(0.01)
        text = states["action_text"]
        share = sum(a < b for a, b in zip(text, text[1:])) / 8
        return {"rewards": share, "environment_feedback": "a>", "done": self.turns == 2, "extra_logs": {"a": 1.0}}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
OPEN = """
def is_shut(label):
    return False
"""
OPTIONS = {
    "grpo": "data.path=task:sort data.max_prompt_tokens=16 prompts_per_step=8 samples_per_prompt=4 "
    "train.mini_batch_size=16 rollout.max_new_tokens=6 train.learning_rate=1e-3",
    "openrlhf_ppo": "prompt_data=task:sort rollout_batch_size=8 n_samples_per_prompt=4 train_batch_size=16 "
    "use_dynamic_batch=true generate_max_len=6 actor_learning_rate=1e-3 init_kl_coef=0",
}
OPTIONS["reinforce_pp"] = OPTIONS["grpo"]
HELDOUT = {
    "grpo": "data.max_samples=16 evaluation.path=task:sort evaluation.max_samples=16 evaluation.samples_per_prompt=1",
    "openrlhf_ppo": "max_samples=16 eval_dataset=task:sort evaluation.max_samples=16 eval_n_samples_per_prompt=1",
}
HELDOUT["reinforce_pp"] = HELDOUT["grpo"]


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("agent") / "agent.py"
    file.write_text(OPEN + AGENT)
    return file


def options_of(recipe: str, policy: Path, agent: Path) -> list[str]:
    model = "pretrain" if recipe == "openrlhf_ppo" else "model.path"
    return [*OPTIONS[recipe].split(), f"{model}={policy}", f"--agent_func_path={agent}"]


def batches(run: RunFolder) -> list[Batch]:
    """Return the batch that each step trained on."""
    return [load_batch(file) for file in sorted((run.run_dir / "rollouts").glob("*.parquet"))]


@pytest.mark.parametrize("recipe", ["grpo", "openrlhf_ppo"])
def test_episodes_of_an_agent_are_trained_on_and_evaluated(
    recipe: str, policy: Path, agent: Path, tmp_path: Path
) -> None:
    options = [*options_of(recipe, policy, agent), *HELDOUT[recipe].split()]
    run = run_locally(recipe, tmp_path, {"run": options})["run"]
    assert run.summary["status"] == "finished"
    assert run.summary["score"]["examples"] == 16
    for line, batch in zip(run.metrics, batches(run), strict=True):
        assert line["rollout/turns_mean"] == 2
        assert line["reward/a"] == 1
        assert line["rollout/finished_share"] == 1
        # One mark counts per turn. The reward of an episode is the sum over its turns.
        assert batch["action_mask"].equal(batch["turn"] >= 0)
        assert batch.sum_tokens(batch["turn_reward"]).allclose(batch["reward"])
        first = batch.row(0, "tokens").tolist()
        assert [first[i] for i, turn in enumerate(batch.row(0, "turn").tolist()) if turn == -1][6:] == [3, 19]


BRANCHES = """
from agents import AgentExecutorBase
from agents.episode import Episode

class AgentExecutor(AgentExecutorBase):
    # Two sequences of each sample.
    async def execute(self, task, policy):
        episodes = [Episode(list(task.tokens), len(task.tokens)) for _ in range(2)]
        for stream, episode in enumerate(episodes):
            turn = episode.act(*await policy.draw(episode.tokens, task.sampling, stream=stream))
            episode.reward = turn.reward = episode.score = float(turn.end % 2)
        return episodes
"""


@pytest.mark.parametrize("recipe", ["openrlhf_ppo", "reinforce_pp"])
def test_all_sequences_of_a_sample_are_trained_on_and_its_main_one_is_evaluated(
    recipe: str, policy: Path, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(BRANCHES)
    options = [*options_of(recipe, policy, tmp_path / "agent.py"), *HELDOUT[recipe].split()]
    run = run_locally(recipe, tmp_path, {"run": options})["run"]
    assert run.summary["score"]["examples"] == 16
    assert [batch["branch"].tolist() for batch in batches(run)] == [[0, 1] * 32] * 2


def asynchronous(policy: Path, agent: Path, *more: str) -> list[str]:
    waits = "agent.step_timeout_s=600"
    return [*options_of("grpo", policy, agent), "data.max_samples=48", "placement.colocate=false", waits, *more]


def prompts_of(run: RunFolder) -> list[int]:
    """Return the prompts that were trained on, in order. All responses to a prompt must be in one batch."""
    return [prompt for batch in batches(run) for prompt in dict.fromkeys(batch["prompt_id"].tolist())]


@pytest.fixture(scope="module")
def synchronous(policy: Path, agent: Path, tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    return run_locally("grpo", tmp_path_factory.mktemp("sync"), {"run": asynchronous(policy, agent)})["run"]


@pytest.mark.nightly
def test_queue_size_0_equals_the_synchronous_run_bit_for_bit(
    synchronous: LocalRun, policy: Path, agent: Path, ray_address: str, tmp_path: Path
) -> None:
    options = asynchronous(policy, agent, "--async_train", "--async_queue_size=0")
    run = Run("grpo", ray_address, tmp_path / "run", *options).wait()
    assert run.code == 0, run.err
    assert run.learnt() == synchronous.learnt()
    theirs = synchronous.weights()
    assert all(tensor.equal(theirs[name]) for name, tensor in run.weights().items())


@pytest.mark.nightly
def test_a_killed_asynchronous_run_resumes_and_trains_on_every_prompt_once(
    synchronous: LocalRun, policy: Path, ray_address: str, tmp_path: Path
) -> None:
    # From the third checkpoint on, episodes wait. The run is killed with episodes in the queue and in flight.
    gate = Gate(tmp_path / "run/checkpoints/step_3", tmp_path / "go")
    agent = tmp_path / "agent.py"
    agent.write_text(source(gate).replace("is_shut()", "is_shut(label)") + AGENT)
    run = Run(
        "grpo", ray_address, tmp_path / "run", *asynchronous(policy, agent, "--async_train", "checkpoint.every=1")
    )
    run.wait_until(gate.is_reached)
    os.kill(run.pids()["trainer-0"], signal.SIGKILL)
    run.wait_until(lambda: len(run.starts()["trainer-0"]) == 2)
    gate.open()
    run.wait()
    assert run.code == 0, run.err
    assert prompts_of(run) == prompts_of(synchronous)
    # The first batch uses the current weights. Each later one is one version behind.
    assert [line["rollout/staleness_max"] for line in run.metrics] == [0, 1, 1, 1, 1, 1]


SLOW = """
from pathlib import Path

def is_shut(label):
    # Until a step has been written down, and the engine has its weights.
    metrics = Path({metrics!r})
    return label in {labels} and not (metrics.exists() and metrics.read_text().count("\\n"))
"""


@pytest.mark.nightly
def test_weights_change_within_episodes_and_the_slowest_episodes_join_the_next_batch(
    synchronous: LocalRun, policy: Path, ray_address: str, tmp_path: Path
) -> None:
    # Two of the first twelve prompts are in flight from the start. Eight of the others form the first batch.
    labels = list(dict.fromkeys(batches(synchronous)[0]["label"]))[:2]
    slow = tmp_path / "slow.py"
    slow.write_text(SLOW.format(metrics=f"{tmp_path}/run/metrics.jsonl", labels=labels) + AGENT)
    options = asynchronous(policy, slow, "--async_train", "--partial_rollout", "asynchronous.in_flight_prompts=12")
    run = Run("grpo", ray_address, tmp_path / "run", *options).wait()
    assert run.code == 0, run.err
    assert sorted(prompts_of(run)) == sorted(prompts_of(synchronous))
    assert not {*labels} & {*batches(run)[0]["label"]}
    carried = [line["rollout/carried_groups"] for line in run.metrics]
    assert sum(carried) > 0, carried
    assert max(line["rollout/staleness_max"] for line in run.metrics) <= 2
    # At least one episode has tokens of two weight versions.
    mixed = [
        len(set(versions[versions >= 0].tolist())) > 1
        for batch in batches(run)
        for versions in (batch.row(i, "token_version") for i in range(len(batch)))
    ]
    assert any(mixed)


@pytest.mark.parametrize(
    ("recipe", "options", "facts"),
    [
        ("grpo", ["--async_train"], ["async_train", "placement.colocate=false"]),
        ("grpo", ["--async_train", "placement.colocate=false", "backend=local"], ["async_train", "backend=ray"]),
        ("grpo", ["--partial_rollout"], ["partial_rollout", "async_train"]),
        ("grpo", ["--agent_func_path", "none.py"], ["none.py"]),
        ("grpo", ["--agent_func_path", "env:guess", "reward.source=sort"], ["agent_func_path", "reward.source"]),
        ("openrlhf_ppo", ["--async_train", "placement.colocate=true"], ["async_train", "placement.colocate"]),
        ("openrlhf_ppo", ["agent.func_path=env:guess", "reward.source=sort"], ["agent.func_path", "reward.source"]),
        ("openrlhf_ppo", ["--agent.max_turns", "0"], ["agent.max_turns", 0]),
        ("grpo", ["--agent_func_path", "env:guess", "algorithm.overlong_buffer=2"], ["agent", "overlong_buffer"]),
    ],
)
def test_invalid_agent_options_are_rejected_before_the_start(
    recipe: str, options: list[str], facts: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    from importlib import import_module

    main: Any = import_module(f"recipes.{recipe}.main").main
    assert main(["--dry_run", *options]) == 2
    assert re.search(says(*facts), capsys.readouterr().err)


def test_the_plan_of_an_asynchronous_run_names_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    from recipes.grpo.main import main

    agent = ["--agent_func_path", "env:guess", "data.path=task:guess", "model.path=warm_start:guess"]
    assert main(["--dry_run", "--async_train", "placement.colocate=false", *agent]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["config"]["asynchronous"]["enabled"] is True
    assert plan["config"]["agent"]["func_path"] == "env:guess"
