"""Golden traces: replay stored rollouts through the update of each recipe, and compare the metrics with stored ones.

    python scripts/golden.py [--folder FOLDER] [RECIPE ...]
    python scripts/golden.py COPY --record [OPTION=VALUE ...]

The first form replays five steps of each recipe (default: all recipes). It prints each metric that changed, old -> new,
with the relative change, and writes changed metrics to <folder>/<recipe>.json. Run it after a change that is meant to
change numbers, and check the output. The rollouts, <recipe>.parquet, are generated only if they are missing.

The second form creates the regression test of a copied recipe, such as recipes/my_algo. It records the metrics of five
steps with the options of the command, and writes tests/recipes/test_<copy>.py, which replays them. Repeat it to accept
new numbers. It works for copies of recipes with an `Actor` role and `add_advantages` (grpo, reinforce_pp, multi_turn).

Shape suffixes: `B` responses, `N` all tokens end to end.
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
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from components.batch import Batch
from components.batch.reading import load_batch
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
"""Number of steps, of prompts per step, and of responses per prompt."""
RELATIVE, ABSOLUTE = 1e-4, 1e-6
"""Relative and absolute tolerance of a metric.

Other instruction sets and thread counts sum in another order, and the optimizer steps amplify the difference: by 1e-5
of a metric, or 1e-7, measured with generic kernels on two threads. A changed formula changes metrics by per cents.
"""

EPS = 1e-5
"""Epsilon of Adam. It is large, because Adam would otherwise amplify gradients that are only rounding errors."""

SUPERVISED = "data.path=task:sort train.zero_stage=0"
"""Options of the recipes without rollouts."""

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
    """Roles of a recipe in this process, one rank each, as in local mode."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def role(self, cls: type[Any], config: Any, name: str = "") -> Exports:
        """Start a role and return its remote methods by name. `name` is the role, by default the name of the class."""
        identity = Identity("golden", "0", 0.0, Role(name or cls.__name__), 0, 1)
        context = WorkloadContext(identity, config, Directory(), LocalTransport(), print, self.folder)
        self.enter_context(entered(context))
        role = cls(None, config)
        role.setup()
        calls = {name: call for name, (_, call) in exports_of(role).items()}
        # A role may hold shared memory and processes, which would outlive the replay.
        if "end_job" in calls:
            self.callback(calls["end_job"])
        return calls


def play_role_groups(recipe: str, options: str, stage: Stage, model: str, steps: list[Batch]) -> list[Metrics]:
    """Replay a recipe whose trainer calls actor and reference through role groups, with additional `options`."""
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
    # Loaded with the number of steps, because the learning-rate schedule depends on it.
    actor["load"](model, STEPS)
    reference["load"](model)
    metrics = []
    for number, samples in enumerate(steps, 1):
        tokens = samples.only("tokens")
        views = [actor["logprobs"](tokens, temperature=1.0).per_token, reference["logprobs"](tokens).per_token]
        experience = add_advantages(samples.with_tokens(**views[0], **views[1]), config)
        metrics.append(summary(experience) | actor["update"](experience, number))
    return metrics


def play_openrlhf_ppo(stage: Stage, model: str, steps: list[Batch]) -> list[Metrics]:
    """Replay openrlhf_ppo: PPO with a critic and a KL in the reward."""
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
    metrics = []
    for number, samples in enumerate(steps, 1):
        experience = samples
        for forward in forwards:
            experience = experience.with_tokens(**forward(samples.only("tokens")).per_token)
        experience = add_advantages(experience, config, config.algorithm.kl_coef)
        actor["append_experience"](experience)
        critic["append_experience"](experience)
        critic_metrics = {f"critic_{name}": value for name, value in critic["critic_update"](number).items()}
        metrics.append(summary(experience) | critic_metrics | actor["actor_update"](number, config.algorithm.kl_coef))
    return metrics


def play_verl_ppo(stage: Stage, model: str, steps: list[Batch]) -> list[Metrics]:
    """Replay verl_ppo: PPO with a critic, a KL in the loss, and the correction of the engine's log-probabilities."""
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
    policy = stage.role(ActorRolloutRefWorker, config, "actor_ref")
    critic = stage.role(CriticWorker, config)
    policy["init_model"](model, STEPS)
    critic["init_model"](model, STEPS)
    forwards = (
        partial(policy["compute_log_prob"], temperature=1.0),
        policy["compute_ref_log_prob"],
        critic["compute_values"],
    )
    metrics = []
    for number, samples in enumerate(steps, 1):
        views = [forward(samples.only("tokens")).per_token for forward in forwards]
        columns = {name: column for view in views for name, column in view.items()}
        experience = add_advantages(samples.with_tokens(**columns), config, 0.0)
        updated = critic["update_critic"](experience, number)
        critic_metrics = {f"critic_{name}": value for name, value in updated.items()}
        metrics.append(summary(experience) | critic_metrics | policy["update_actor"](experience, number))
    return metrics


def play_distill(stage: Stage, model: str, steps: list[Batch]) -> list[Metrics]:
    """Replay distill with the sum over the teacher's candidates. The teacher is another untrained model."""
    from recipes.distill.algorithm import add_advantages
    from recipes.distill.main import read_config
    from recipes.distill.roles.actor import Actor
    from recipes.distill.roles.teacher import Teacher

    path = f"{stage.folder}/teacher"
    tiny_model(task_tokenizer(get_task("sort")), 1, hidden=32, layers=1, intermediate=64).save_pretrained(path)
    options = f"""run_dir={stage.folder} model.path={model} teacher.path={path} data.path=task:sort
        prompts_per_step={PROMPTS} samples_per_prompt={SAMPLES} train.mini_batch_size={PROMPTS * SAMPLES // 2}
        rollout.max_new_tokens=8 train.learning_rate=1e-2 train.eps={EPS} algorithm.loss=divergence algorithm.top_k=5
        algorithm.divergence=jsd algorithm.correction=tis"""
    config = read_config(options.split())
    actor = stage.role(Actor, config)
    teacher = stage.role(Teacher, config)
    actor["load"](model, STEPS)
    teacher["load"](path)
    metrics = []
    for number, samples in enumerate(steps, 1):
        tokens = samples.only("tokens")
        scores = teacher["logprobs"](tokens).per_token
        student = actor["logprobs"](tokens, temperature=1.0).per_token
        experience = add_advantages(samples.with_tokens(**scores, **student), config)
        metrics.append(summary(experience) | actor["update"](experience, number))
    return metrics


def play_sft(stage: Stage, model: str, steps: list[Batch]) -> list[Metrics]:
    """Replay sft: one optimizer step per stored mini-batch."""
    from recipes.sft.main import read_config
    from recipes.sft.roles.actor import Actor

    options = f"{SUPERVISED} train.learning_rate=1e-2 model.path={model} run_dir={stage.folder}"
    actor = stage.role(Actor, read_config(options.split()).resolved(0))
    actor["load"](model, STEPS)
    return [actor["train_step"](demonstrations) for demonstrations in steps]


def play_reward_model(stage: Stage, model: str, steps: list[Batch]) -> list[Metrics]:
    """Replay reward_model: one optimizer step per stored mini-batch of pairs with margins."""
    from recipes.reward_model.main import read_config
    from recipes.reward_model.roles.reward import Reward

    # With 1e-2 the scores oscillate, and rounding differences between instruction sets grow to 1e-4 of a margin.
    options = (
        f"{SUPERVISED} train.learning_rate=3e-3 model.path={model} run_dir={stage.folder} algorithm.margin_loss=true"
    )
    reward = stage.role(Reward, read_config(options.split()).resolved(0))
    reward["load"](model, STEPS)
    return [reward["train_step"](pairs) for pairs in steps]


def play_dpo(stage: Stage, model: str, steps: list[Batch]) -> list[Metrics]:
    """Replay dpo: one optimizer step per stored mini-batch of pairs, with all terms of the loss."""
    from recipes.dpo.main import read_config
    from recipes.dpo.roles.actor import Actor

    options = f"""{SUPERVISED} train.learning_rate=1e-2 model.path={model} run_dir={stage.folder} algorithm.beta=0.5
        algorithm.label_smoothing=0.1 algorithm.nll_loss_coef=0.2"""
    actor = stage.role(Actor, read_config(options.split()).resolved(0))
    actor["load"](model, STEPS)
    # The reference differs from the starting policy. If both were equal, all pairs would be ties that rounding decides.
    before = [actor["logprobs"](pairs.only("tokens", "loss_mask"))["logprob"] for pairs in steps]
    references = [logprob_B + torch.arange(len(logprob_B)).cos() for logprob_B in before]
    return [
        actor["train_step"](pairs.with_sequences(reference_logprob=logprob_B))
        for pairs, logprob_B in zip(steps, references, strict=True)
    ]


Play = Callable[[Stage, str, list[Batch]], list[Metrics]]

RECIPES: dict[str, Play] = {
    "distill": play_distill,
    "dpo": play_dpo,
    # With all terms of the loss: KL, clip-higher, correction, overlong penalty.
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
    """Return the mean and mean absolute advantage, and the mean shaped reward."""
    advantage_M = experience["advantage"][experience["action_mask"]]
    return {
        "advantage_mean": float(advantage_M.mean()),
        "advantage_size": float(advantage_M.abs().mean()),
        "shaped_reward_mean": float(experience["shaped_reward"].mean()),
    }


def make_rollouts(recipe: str, model: str) -> Batch:
    """Generate the rollouts of all steps. The column `step` [B] has the step of each.

    They are responses of the untrained model to a few prompts. The reward is the share of letters that are later in the
    alphabet than the letter before. For sft they are demonstrations, for reward_model and dpo pairs.
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
    responses = [samples.row(i, "tokens")[int(samples["prompt_length"][i]) :] for i in range(count)]
    shares = [(tokens[1:] > tokens[:-1]).float().sum() / max(len(tokens) - 1, 1) for tokens in responses]
    return samples.with_sequences(reward=torch.stack(shares), step=step_B)


def played(recipe: str, folder: Path, play: Play | None = None) -> list[Metrics]:
    """Replay the stored rollouts of a recipe and return the metrics of each step. Generate the rollouts if missing.

    Args:
        recipe: name of the recipe, and of the files in `folder`.
        folder: holds <recipe>.parquet and <recipe>.json.
        play: function that replays the steps. None: that of `RECIPES`.
    """
    with tempfile.TemporaryDirectory() as scratch, Stage(Path(scratch)) as stage:
        model = f"{scratch}/model"
        tokenizer = task_tokenizer(get_task("sort"))
        with without_progress_bars():
            tiny_model(tokenizer, 0, hidden=32, layers=1, intermediate=64).save_pretrained(model)
        tokenizer.save_pretrained(model)
        stored = folder / f"{recipe}.parquet"
        if not stored.exists():
            # New rollouts would not match the stored metrics.
            if (folder / f"{recipe}.json").exists():
                raise FileNotFoundError(f"{stored} is missing, but its metrics exist; restore it, or remove both")
            make_rollouts(recipe, model).save(stored)
        rollouts = load_batch(stored)
        steps = [rollouts.select((rollouts["step"] == step).nonzero().squeeze(1)) for step in range(STEPS)]
        return (play or RECIPES[recipe])(stage, model, steps)


def replay_copy(recipe: str, options: str, folder: Path) -> list[str]:
    """Replay the recorded steps of a copied recipe. Return one line per changed metric."""
    old = json.loads((folder / f"{recipe}.json").read_text())
    return moved(old, played(recipe, folder, partial(play_role_groups, recipe, options)))


def record_copy(recipe: str, options: list[str], folder: Path, tests: Path) -> Path:
    """Record five steps of a copied recipe and write its regression test.

    Args:
        recipe: folder in recipes/ with `roles/actor.py:Actor` and `algorithm.py:add_advantages`.
        options: options of the copy, added to those of every trace.
        folder: folder for <recipe>.json and <recipe>.parquet.
        tests: folder for test_<recipe>.py.

    Returns:
        The path of the test.

    Raises:
        ValueError: the recipe lacks one of these files.
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
    """Return one line per metric that differs by more than the tolerances, or exists on one side only."""
    lines = []
    for step, (before, after) in enumerate(zip_longest(old, new, fillvalue={}), 1):
        for name in sorted(before | after):
            was = before.get(name, math.nan)
            now = after.get(name, math.nan)
            if math.isclose(was, now, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
                continue
            change = ""
            if was and math.isfinite(was + now):
                change = f" ({(now - was) / abs(was):+.3%})"
            lines.append(f"step {step} {name}: {was:.6g} -> {now:.6g}{change}")
    return lines


def main() -> None:
    """Update the traces of recipes, or record that of a copy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of the traces")
    parser.add_argument("--record", action="store_true", help="record a copied recipe and write its regression test")
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"of {', '.join(RECIPES)}; default: all")
    arguments = parser.parse_intermixed_args()
    # If peft is installed, saving a model imports DeepSpeed, which would print a warning about a missing accelerator.
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
        old = []
        if file.exists():
            old = json.loads(file.read_text())
        new = played(recipe, arguments.folder)
        lines = moved(old, new)
        for line in lines:
            print(f"{recipe}: {line}")
        if lines:
            file.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
