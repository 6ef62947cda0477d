"""OpenRLHF's original commands are accepted in full with local models, data and code files, and run."""

import contextlib
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from local_runs import run_here
from recipe_runs import ROOT
from tiny_models import write_policy, write_reward_model

from plugins.openrlhf.adapter import train_ppo
from recipes.openrlhf_ppo.main import main
from tests.messages import says

pytestmark = pytest.mark.full

UPSTREAM = Path(__file__).parent / "upstream"
FLAGS: dict[str, list[Any]] = json.loads((UPSTREAM / "openrlhf_flags.json").read_text())

OLDER = {
    "actor.num_nodes": "actor_num_nodes",
    "actor.num_gpus_per_node": "actor_num_gpus_per_node",
    "critic.num_nodes": "critic_num_nodes",
    "critic.num_gpus_per_node": "critic_num_gpus_per_node",
    "ref.num_nodes": "ref_num_nodes",
    "ref.num_gpus_per_node": "ref_num_gpus_per_node",
    "reward.num_nodes": "reward_num_nodes",
    "reward.num_gpus_per_node": "reward_num_gpus_per_node",
    "train.colocate_all": "colocate_all_models",
    "vllm.enable_sleep": "vllm_enable_sleep",
    "ds.enable_sleep": "deepspeed_enable_sleep",
    "train.partial_rollout_enable": "partial_rollout",
    "algo.dynamic_filtering_enable": "dynamic_filtering",
    "algo.dynamic_filtering_range": "dynamic_filtering_reward_range",
    "train.dynamic_batch_enable": "use_dynamic_batch",
    "actor.eps_clip_low_high": "eps_clip_low_high",
    "algo.advantage.is_correction_enable": "enable_vllm_is_correction",
    "algo.advantage.is_correction_type": "vllm_is_correction_type",
    "algo.advantage.is_correction_threshold": "vllm_is_truncated_threshold",
    "train.agent_func_path": "agent_func_path",
    "reward.remote_url": "remote_rm_url",
    "reward.model_name_or_path": "reward_pretrain",
    "data.max_len": "max_len",
    "logger.wandb.key": "use_wandb",
    "logger.tensorboard_dir": "use_tensorboard",
    "train.micro_batch_size": "micro_train_batch_size",
    "ds.param_dtype": "param_dtype",
    "vllm.sync_backend": "vllm_sync_backend",
    "logger.logging_steps": "logging_steps",
    "ckpt.save_hf": "save_hf_ckpt",
    "ckpt.load_enable": "load_checkpoint",
    "ds.ring_attn_size": "ring_attn_size",
    "ds.ring_attn_head_stride": "ring_head_stride",
}
"""Names since 0.10.2 -> earlier names, for names that stand for several options."""


@dataclass(frozen=True)
class Command:
    """One command of OpenRLHF's scripts or guides."""

    name: str
    tags: tuple[str, ...]
    words: tuple[str, ...]

    def flags(self) -> dict[str, list[str]]:
        """Each flag with its values."""
        values_by_flag: dict[str, list[str]] = {}
        for word in self.words:
            if word.startswith("--"):
                values_by_flag[word.removeprefix("--")] = []
            else:
                values_by_flag[list(values_by_flag)[-1]].append(word)
        return values_by_flag


def older_name(name: str) -> str:
    """Return the name of a flag before 0.10.2."""
    options = train_ppo().options
    if "." not in name or name in OLDER:
        return OLDER.get(name, name)
    target = options[name].name if name in options else name
    flat = [other for other, known in options.items() if known.name == target and "." not in other]
    # Return the name that OpenRLHF had, if there are several.
    return next((other for other in flat if other in FLAGS), name.rpartition(".")[2])


def older(command: Command) -> Command:
    """The same command with the names of 0.8 to 0.10.1."""
    words = [f"--{older_name(word[2:])}" if word.startswith("--") else word for word in command.words]
    return Command(f"{command.name} (older names)", command.tags, tuple(words))


def commands() -> list[Command]:
    """Return every PPO command with its own names and, if these are new, with the earlier names."""
    lines = map(json.loads, (UPSTREAM / "openrlhf.jsonl").read_text().splitlines())
    read = [Command(line["script"], tuple(line["tags"]), tuple(line["argv"])) for line in lines]
    return [*read, *(older(command) for command in read if any("." in name for name in command.flags()))]


MODELS = {"pretrain", "actor.model_name_or_path"}
REWARD_MODELS = {"reward_pretrain", "reward.model_name_or_path"}
DATA = {"prompt_data", "data.prompt_dataset", "eval_dataset", "eval.dataset"}
CODE = {"remote_rm_url", "reward.remote_url"}
AGENTS = {"agent_func_path", "train.agent_func_path"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models, prompts, reward code and an agent."""
    path = tmp_path_factory.mktemp("upstream")
    write_policy(path / "policy")
    write_reward_model(path / "rm", seed=1, mean=0.0, std=1.0)
    rows = [{"context_messages": f"question {i}", "prompt": f"question {i}", "label": str(i)} for i in range(64)]
    (path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    # About half of all responses are correct, so that few prompts have equal rewards for all responses.
    (path / "reward.py").write_text(
        "def reward_func(queries, prompts, labels, **kwargs):\n"
        "    return {'rewards': [float(sum(map(ord, query)) % 2) for query in queries]}\n"
    )
    return path


def local(command: Command, folder: Path) -> list[str]:
    """Return the arguments with models, data and code files of `folder`, otherwise unchanged."""
    here = {
        **dict.fromkeys(MODELS, folder / "policy"),
        **dict.fromkeys(REWARD_MODELS, folder / "rm"),
        **dict.fromkeys(DATA, folder / "prompts.jsonl"),
        **dict.fromkeys(AGENTS, ROOT / "tests" / "idle_agent.py"),
    }
    arguments: list[str] = []
    for name, values in command.flags().items():
        is_code = name in CODE and values[0].endswith(".py")
        path = folder / "reward.py" if is_code else here.get(name)
        arguments += [f"--{name}", *(values if path is None else [str(path)])]
    return arguments


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    """Yield the text written to stderr in this block, and discard stdout."""
    error = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        yield error


def planned(words: list[str]) -> tuple[int, str]:
    """Return exit code and messages of a plan for four machines with 8 GPUs each, the most that a command needs."""
    with quiet() as error:
        code = main(["--dry_run", "--assume_devices", "8x4", *words])
    return code, error.getvalue()


def test_95_percent_of_the_text_commands_are_accepted_in_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused, total = {}, 0
    for command in commands():
        if "vlm" in command.tags:
            continue
        total += 1
        code, error = planned(local(command, folder))
        if code:
            refused[command.name] = error
    assert total >= 19
    assert len(refused) <= 0.05 * total, refused


def test_a_rejected_command_names_the_reason_and_the_remedy(folder: Path) -> None:
    images = [command for command in commands() if "vlm" in command.tags]
    assert images
    for command in images:
        code, error = planned(local(command, folder))
        assert code == 2
        assert re.search(says("max_images_per_prompt", "text", "leave the images out"), error)


SMALLER = [
    *("placement.rollout_engines=1", "rollout.tensor_parallel=1", "rollout.engine=hf", "backend=local"),
    *("prompts_per_step=8", "train.mini_batch_size=8", "data.max_samples=16", "data.epochs=1"),
    *("data.max_prompt_tokens=32", "rollout.max_new_tokens=8", "agent.max_tokens=40"),
    *("placement.actor_ranks=1", "placement.references=1", "evaluation.max_samples=4", "log.wandb_key=null"),
]
"""Numbers for a laptop: one rank and one engine, two steps of 8 prompts, 8 new tokens."""


@pytest.mark.parametrize(
    ("script", "options", "metrics"),
    [
        ("train_ppo_with_reward_fn.sh", ["placement.critic_ranks=1"], {"critic/loss", "actor/kl_to_reference"}),
        ("train_prorlv2_math_hybrid_engine.sh", ["samples_per_prompt=4"], {"actor/kl_loss"}),
        (
            "guides_ppo.sh",
            ["placement.critic_ranks=1", "placement.rewards=1"],
            {"critic/loss", "actor/kl_to_reference"},
        ),
    ],
)
def test_three_commands_train_two_steps_on_a_cpu(
    script: str, options: list[str], metrics: set[str], folder: Path, tmp_path: Path
) -> None:
    (command,) = [command for command in commands() if command.name == script]
    run_options = [f"checkpoint.path={tmp_path}/ckpt", f"checkpoint.export_path={tmp_path}/model"]
    run = run_here("openrlhf_ppo", tmp_path / "run", *local(command, folder), *SMALLER, *options, *run_options)
    assert run.code == 0, run.err
    assert len(run.metrics) == 2
    for entry in run.metrics:
        assert metrics <= set(entry)
        assert entry["actor/grad_norm"] >= 0
    assert (tmp_path / "model" / "config.json").is_file()
