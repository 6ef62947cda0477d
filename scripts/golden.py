"""Golden traces: stored rollouts go through the update of each recipe, and the metrics are compared with stored ones.

    python scripts/golden.py [--folder FOLDER] [RECIPE ...]
    python scripts/golden.py COPY --record [OPTION=VALUE ...]

The first form replays the five steps of each recipe (default: all) and prints each metric that moved, old -> new, with
the relative change. It prints nothing if nothing moved. Metrics that moved are written to <folder>/<recipe>.json: run
it after a change that is meant to move numbers, and read what it prints. The rollouts, <recipe>.parquet, are made only
if they are missing.

The second form makes the regression test of a copied recipe, such as recipes/my_algo: it records the metrics of five
steps with the given options of the copy, and writes tests/recipes/test_<copy>.py, which replays them. Repeat it to
accept new numbers. It works for copies of recipes with an `Actor` role and `add_advantages` (grpo, reinforce_pp,
multi_turn).

`B` answers, `N` all tokens end to end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from components.batch import Batch
from components.data.preferences import PairFormat, encode_pairs, read_pairs
from components.data.supervised import encode_demonstrations
from components.generate.config import HFRolloutConfig, SamplingConfig
from components.generate.hf_engine import HFRolloutEngine
from components.models.loading import without_progress_bars
from core import Identity, Role, WorkloadContext
from core.backends.local import LocalTransport
from core.context import entered
from core.exports import exports_of
from core.members import Directory
from plugins.demo.tasks import get_task
from plugins.demo.tiny_model import task_tokenizer, tiny_model
from training.roles.reference import ReferenceWorker

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "recipes" / "golden"
STEPS, PROMPTS, SAMPLES = 5, 4, 4
"""Steps of so many prompts with so many answers each."""
RELATIVE, ABSOLUTE = 1e-4, 1e-6
"""What may differ. Other instruction sets and thread counts add up in another order, which the steps of the optimizer
carry on: measured with generic kernels on two threads, 1e-5 of a metric or 1e-7. A changed formula moves per cents."""

EPS = 1e-5
"""Of Adam: large, so that what is only rounding in a gradient is not made as large as the rest of it."""

SUPERVISED = "data.path=task:sort train.zero_stage=0"
"""Options of recipes without rollouts."""

COPY_TEST = '''"""Regression test of recipes/{recipe}: five updates on stored rollouts give the recorded metrics.

Written by `python scripts/golden.py {recipe} --record`. Run that again to accept new numbers.
"""

from typing import Any

from local_runs import kept_environment
from recipe_runs import ROOT

from components.process.child_process import load_file

golden: Any = load_file(ROOT / "scripts" / "golden.py")


def test_five_updates_of_{recipe}_give_the_recorded_metrics() -> None:
    with kept_environment():
        assert golden.replay_copy("{recipe}", "{options}", golden.FOLDER) == []
'''

Metrics = dict[str, float]
Exports = dict[str, Callable[..., Any]]


class Stage(contextlib.ExitStack):
    """Roles of a recipe in this process, one rank each, as local mode has them."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def role(self, cls: type[Any], config: Any, name: str = "") -> Exports:
        """What can be called of a role; `name` is its role's, where that is not its class's."""
        identity = Identity("golden", "0", 0.0, Role(name or cls.__name__), 0, 1)
        context = WorkloadContext(identity, config, Directory(), LocalTransport(), print, self.folder)
        self.enter_context(entered(context))
        role = cls(None, config)
        role.setup()
        calls = {name: call for name, (_, call) in exports_of(role).items()}
        if "end_job" in calls:
            self.callback(calls["end_job"])
        return calls


def play_role_groups(recipe: str, options: str, stage: Stage, model: str, steps: list[Batch]) -> list[Metrics]:
    """Replay a recipe whose trainer calls actor and reference as role groups, with these further options."""
    config = import_module(f"recipes.{recipe}.main").read_config(
        f"""run_dir={stage.folder} model.path={model} data.path=task:sort prompts_per_step={PROMPTS}
        samples_per_prompt={SAMPLES} train.mini_batch_size={PROMPTS * SAMPLES // 2} rollout.max_new_tokens=8
        train.learning_rate=1e-2 train.eps={EPS}""".split()
        + options.split()
    )
    roles = f"recipes.{recipe}.roles"
    actor = stage.role(import_module(f"{roles}.actor").Actor, config)
    reference = stage.role(ReferenceWorker, config)
    add_advantages = import_module(f"recipes.{recipe}.algorithm").add_advantages
    actor["load"](model, STEPS)
    reference["load"](model)
    found = []
    for number, samples in enumerate(steps, 1):
        tokens = samples.only("tokens")
        views = [actor["logprobs"](tokens, temperature=1.0).per_token, reference["logprobs"](tokens).per_token]
        experience = add_advantages(samples.with_tokens(**views[0], **views[1]), config)
        found.append(summary(experience) | actor["update"](experience, number))
    return found


def play_openrlhf_ppo(stage: Stage, model: str, steps: list[Batch]) -> list[Metrics]:
    """PPO with a critic and a KL in the reward."""
    from recipes.openrlhf_ppo.algorithm import add_advantages
    from recipes.openrlhf_ppo.layout import resolved
    from recipes.openrlhf_ppo.main import read_config
    from recipes.openrlhf_ppo.roles.actor import Actor
    from recipes.openrlhf_ppo.roles.critic import Critic
    from recipes.openrlhf_ppo.roles.reference import Reference

    options = f"""pretrain={model} prompt_data=task:sort run_dir={stage.folder} rollout_batch_size={PROMPTS}
        n_samples_per_prompt={SAMPLES} train_batch_size={PROMPTS * SAMPLES // 2} generate_max_len=8
        actor_learning_rate=1e-2 critic_learning_rate=1e-2 lr_warmup_ratio=0 lr_scheduler=constant init_kl_coef=0.1
        gamma=0.95 lambd=0.9 train.eps={EPS} entropy_loss_coef=0.01"""
    config = resolved(read_config(options.split()))
    actor, critic, reference = (stage.role(cls, config) for cls in (Actor, Critic, Reference))
    actor["actor_init"](model, STEPS)
    critic["critic_init"](model, STEPS)
    reference["reference_init"](model)
    forwards = (
        partial(actor["actor_forward"], temperature=1.0),
        critic["critic_forward"],
        reference["reference_forward"],
    )
    found = []
    for number, samples in enumerate(steps, 1):
        experience = samples
        for forward in forwards:
            experience = experience.with_tokens(**forward(samples.only("tokens")).per_token)
        experience = add_advantages(experience, config, config.algorithm.kl_coef)
        actor["append_experience"](experience)
        critic["append_experience"](experience)
        learnt = {f"critic_{name}": value for name, value in critic["critic_update"](number).items()}
        found.append(summary(experience) | learnt | actor["actor_update"](number, config.algorithm.kl_coef))
    return found


def play_verl_ppo(stage: Stage, model: str, steps: list[Batch]) -> list[Metrics]:
    """PPO with a critic, a KL in the loss, and a correction for the engine."""
    from recipes.verl_ppo.algorithm import add_advantages
    from recipes.verl_ppo.main import read_config
    from recipes.verl_ppo.roles.actor_rollout_ref import ActorRolloutRefWorker
    from recipes.verl_ppo.roles.critic import CriticWorker

    options = f"""actor_rollout_ref.model.path={model} data.train_files=task:sort run_dir={stage.folder}
        data.train_batch_size={PROMPTS} actor_rollout_ref.rollout.n={SAMPLES} data.max_response_length=8
        actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2} actor_rollout_ref.actor.use_dynamic_bsz=true
        actor_rollout_ref.actor.optim.lr=1e-2 critic.optim.lr=1e-2 actor_rollout_ref.actor.entropy_coeff=0.01
        actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_coef=0.1
        algorithm.adv_estimator=gae algorithm.gamma=0.95 algorithm.lam=0.9 train.eps={EPS} critic.eps={EPS}
        algorithm.rollout_correction.rollout_is=token"""
    config = read_config(options.split())
    policy, critic = stage.role(ActorRolloutRefWorker, config, "actor_ref"), stage.role(CriticWorker, config)
    policy["init_model"](model, STEPS)
    critic["init_model"](model, STEPS)
    forwards = (
        partial(policy["compute_log_prob"], temperature=1.0),
        policy["compute_ref_log_prob"],
        critic["compute_values"],
    )
    found = []
    for number, samples in enumerate(steps, 1):
        views = [forward(samples.only("tokens")).per_token for forward in forwards]
        seen = samples.with_tokens(**{name: column for view in views for name, column in view.items()})
        experience = add_advantages(seen, config, 0.0)
        learnt = {f"critic_{name}": value for name, value in critic["update_critic"](experience, number).items()}
        found.append(summary(experience) | learnt | policy["update_actor"](experience, number))
    return found


def play_sft(stage: Stage, model: str, steps: list[Batch]) -> list[Metrics]:
    """An optimizer step per stored minibatch."""
    from recipes.sft.main import read_config
    from recipes.sft.roles.actor import Actor

    options = f"{SUPERVISED} train.learning_rate=1e-2 model.path={model} run_dir={stage.folder}"
    actor = stage.role(Actor, read_config(options.split()).resolved(0))
    actor["load"](model, STEPS)
    return [actor["train_step"](demonstrations) for demonstrations in steps]


def play_reward_model(stage: Stage, model: str, steps: list[Batch]) -> list[Metrics]:
    """An optimizer step per stored minibatch of pairs, which say by how much the one is better."""
    from recipes.reward_model.main import read_config
    from recipes.reward_model.roles.reward import Reward

    # At 1e-2 the scores swing, and rounding grows to 1e-4 of a margin: so much other instruction sets are apart.
    options = (
        f"{SUPERVISED} train.learning_rate=3e-3 model.path={model} run_dir={stage.folder} algorithm.margin_loss=true"
    )
    reward = stage.role(Reward, read_config(options.split()).resolved(0))
    reward["load"](model, STEPS)
    return [reward["train_step"](pairs) for pairs in steps]


def play_dpo(stage: Stage, model: str, steps: list[Batch]) -> list[Metrics]:
    """An optimizer step per stored minibatch of pairs, with all that the loss knows."""
    from recipes.dpo.main import read_config
    from recipes.dpo.roles.actor import Actor

    options = f"""{SUPERVISED} train.learning_rate=1e-2 model.path={model} run_dir={stage.folder} algorithm.beta=0.5
        algorithm.label_smoothing=0.1 algorithm.nll_loss_coef=0.2"""
    actor = stage.role(Actor, read_config(options.split()).resolved(0))
    actor["load"](model, STEPS)
    # The reference is near the policy before its first step, not the same: ties would be decided by rounding.
    before = [actor["logprobs"](pairs.only("tokens", "loss_mask"))["logprob"] for pairs in steps]
    near = [logprob_B + torch.arange(len(logprob_B)).cos() for logprob_B in before]
    return [
        actor["train_step"](pairs.with_sequences(reference_logprob=logprob_B))
        for pairs, logprob_B in zip(steps, near, strict=True)
    ]


Play = Callable[[Stage, str, list[Batch]], list[Metrics]]

RECIPES: dict[str, Play] = {
    "dpo": play_dpo,
    # With all that the loss knows: a KL, clip-higher, a correction, a penalty on length.
    "grpo": partial(
        play_role_groups,
        "grpo",
        "algorithm.kl_coef=0.05 algorithm.clip_high=0.28 algorithm.correction=tis algorithm.overlong_buffer=3",
    ),
    "openrlhf_ppo": play_openrlhf_ppo,
    # REINFORCE++-baseline with a KL in the reward.
    "reinforce_pp": partial(
        play_role_groups,
        "reinforce_pp",
        "algorithm.kl_coef=0.1 algorithm.baseline=group_mean algorithm.gamma=0.9",
    ),
    "reward_model": play_reward_model,
    "sft": play_sft,
    "verl_ppo": play_verl_ppo,
}


def summary(experience: Batch) -> Metrics:
    """What the advantages come to."""
    advantage_N, mask_N = experience["advantage"], experience["action_mask"]
    found = {"advantage_mean": advantage_N[mask_N].mean(), "advantage_size": advantage_N[mask_N].abs().mean()}
    return {name: float(value) for name, value in found.items()} | {
        "shaped_reward_mean": float(experience["shaped_reward"].mean())
    }


def make_rollouts(recipe: str, model: str) -> Batch:
    """Answers of the untrained model to a few prompts, and what each is worth: the share of its letters that come
    later than the one before. For sft, demonstrations; for reward_model and dpo, pairs. All steps end to end, told
    apart by `step`.
    """
    task = get_task("sort")
    tokenizer = task_tokenizer(task)
    count = STEPS * PROMPTS * SAMPLES
    step_B = torch.arange(count) // (PROMPTS * SAMPLES)
    if recipe == "sft":
        return encode_demonstrations(task.demonstrations(count, 0), tokenizer).batch.with_sequences(step=step_B)
    if recipe in ("reward_model", "dpo"):
        pairs = [row | {"margin": i % 3 / 4} for i, row in enumerate(task.pairs(count // 2, 0))]
        read = read_pairs(pairs, PairFormat(prompt_key="prompt"), tokenizer)
        return encode_pairs(read, tokenizer, with_mask=recipe == "dpo").batch.with_sequences(step=step_B)
    rows = [tokenizer(row["input"])["input_ids"] for row in task.rows("train", STEPS * PROMPTS, 0)]
    ids = {"prompt_id": torch.arange(len(rows)).repeat_interleave(SAMPLES)}
    ids["sample_id"] = torch.arange(SAMPLES).repeat(len(rows))
    prompts = Batch.from_rows({"tokens": [row for row in rows for _ in range(SAMPLES)]}, per_sequence=ids)
    samples = HFRolloutEngine(model, HFRolloutConfig()).generate(prompts, SamplingConfig(max_new_tokens=8, seed=1))
    answers = [samples.row(i, "tokens")[int(samples["prompt_length"][i]) :] for i in range(count)]
    later = [(answer[1:] > answer[:-1]).float().sum() / max(len(answer) - 1, 1) for answer in answers]
    return samples.with_sequences(reward=torch.stack(later), step=step_B)


def played(recipe: str, folder: Path, play: Play | None = None) -> list[Metrics]:
    """Replay the stored rollouts of a recipe and return the metrics of each step; make the rollouts if missing.

    Args:
        recipe: name of the recipe, and of the files in `folder`.
        folder: holds <recipe>.parquet and <recipe>.json.
        play: the function that replays the steps; None: the one of `RECIPES`.
    """
    with tempfile.TemporaryDirectory() as scratch, Stage(Path(scratch)) as stage:
        model, tokenizer = f"{scratch}/model", task_tokenizer(get_task("sort"))
        with without_progress_bars():
            tiny_model(tokenizer, 0, hidden=32, layers=1, intermediate=64).save_pretrained(model)
        tokenizer.save_pretrained(model)
        stored = folder / f"{recipe}.parquet"
        if not stored.exists():
            if (folder / f"{recipe}.json").exists():
                raise FileNotFoundError(f"{stored} is missing, and its metrics are here; take it back, or remove both")
            make_rollouts(recipe, model).save(stored)
        rollouts = Batch.load(stored)
        steps = [rollouts.select((rollouts["step"] == step).nonzero().squeeze(1)) for step in range(STEPS)]
        return (play or RECIPES[recipe])(stage, model, steps)


def replay_copy(recipe: str, options: str, folder: Path) -> list[str]:
    """Replay the recorded steps of a copied recipe; return one line for each metric that moved."""
    old = json.loads((folder / f"{recipe}.json").read_text())
    return moved(old, played(recipe, folder, partial(play_role_groups, recipe, options)))


def record_copy(recipe: str, options: list[str], folder: Path, tests: Path) -> Path:
    """Record five steps of a copied recipe and write its regression test.

    Args:
        recipe: folder in recipes/ with `roles/actor.py:Actor` and `algorithm.py:add_advantages`.
        options: of the copy, on top of those that every trace is recorded with.
        folder: for <recipe>.json and <recipe>.parquet.
        tests: for test_<recipe>.py.

    Returns:
        The path of the test.
    """
    if not all((ROOT / "recipes" / recipe / name).is_file() for name in ("main.py", "algorithm.py", "roles/actor.py")):
        raise ValueError(
            f"recipes/{recipe} is not a copy of grpo, reinforce_pp or multi_turn: main.py, algorithm.py and "
            "roles/actor.py are needed; for other recipes write the test by hand, as tests/recipes/ has them"
        )
    metrics = played(recipe, folder, partial(play_role_groups, recipe, " ".join(options)))
    (folder / f"{recipe}.json").write_text(json.dumps(metrics, indent=1, sort_keys=True) + "\n")
    test = tests / f"test_{recipe}.py"
    test.write_text(COPY_TEST.format(recipe=recipe, options=" ".join(options)))
    return test


def moved(old: list[Metrics], new: list[Metrics]) -> list[str]:
    """One line for each metric that is not where it was."""
    lines = []
    for step in range(max(len(old), len(new))):
        before, after = ((trace[step] if step < len(trace) else {}) for trace in (old, new))
        for name in sorted(before | after):
            was, now = before.get(name, math.nan), after.get(name, math.nan)
            if not math.isclose(was, now, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
                change = f" ({(now - was) / abs(was):+.3%})" if was and math.isfinite(was + now) else ""
                lines.append(f"step {step + 1} {name}: {was:.6g} -> {now:.6g}{change}")
    return lines


def main() -> None:
    """Refresh the traces of recipes, or record that of a copy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of the traces")
    parser.add_argument("--record", action="store_true", help="record a copied recipe and write its regression test")
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"of {', '.join(RECIPES)}; default: all")
    arguments = parser.parse_intermixed_args()
    # Saving a model imports DeepSpeed where peft is installed, which would say that it has no accelerator.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if arguments.record:
        names = [name for name in arguments.recipes if "=" not in name]
        if len(names) != 1 or names[0] in RECIPES:
            parser.error("--record takes the name of one copied recipe, such as my_algo, and options of it")
        try:
            test = record_copy(names[0], [o for o in arguments.recipes if "=" in o], arguments.folder, FOLDER.parent)
        except ValueError as error:
            parser.error(str(error))
        print(f"{names[0]}: recorded; {test.relative_to(ROOT)} replays it")
        return
    unknown = sorted(set(arguments.recipes) - set(RECIPES))
    if unknown:
        parser.error(
            f"there is no golden trace of {', '.join(unknown)}; choose from {', '.join(RECIPES)}, or record that of a "
            "copied recipe with --record"
        )
    for recipe in arguments.recipes or RECIPES:
        file = arguments.folder / f"{recipe}.json"
        old = json.loads(file.read_text()) if file.exists() else []
        new = played(recipe, arguments.folder)
        lines = moved(old, new)
        for line in lines:
            print(f"{recipe}: {line}")
        if lines:
            file.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
