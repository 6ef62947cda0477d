"""The commands and the program of OpenRLHF's agent training guide."""

from __future__ import annotations

import json
import shlex
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

from components.rl.correction import importance_weights
from recipes.openrlhf_ppo.main import read_config
from recipes.reward_model.main import COMMAND as REWARD_MODEL
from recipes.reward_model.serve import ServeConfig
from tests.guides.rows import check_rows, rows_of
from tests.recipe_copies import ROOT, last_metrics, write_untrained
from training.launch.launch import printed
from training.options.config import load_config
from training.options.schema import ConfigError

REWARD_MODEL_COMMAND = """
    --save_path ./checkpoint/llama3-8b-rm --save_steps -1 --logging_steps 1 --eval_steps -1 --train_batch_size 256
    --micro_train_batch_size 4 --pretrain MODEL --bf16 --max_epochs 1 --max_len 8192 --zero_stage 3
    --learning_rate 9e-6 --dataset DATA --apply_chat_template --chosen_key chosen --rejected_key rejected
    --attn_implementation flash_attention_2 --packing_samples --gradient_checkpointing
    --value_head_prefix score --tokenizer_chat_template TEMPLATE
"""
RL_COMMAND = """
    --ref_num_nodes 1 --ref_num_gpus_per_node 8 --reward_num_nodes 1 --reward_num_gpus_per_node 8
    --critic_num_nodes 1 --critic_num_gpus_per_node 8 --actor_num_nodes 1 --actor_num_gpus_per_node 8
    --vllm_num_engines 4 --vllm_tensor_parallel_size 2 --colocate_all_models --vllm_gpu_memory_utilization 0.6
    --pretrain MODEL --reward_pretrain MODEL --save_path ./checkpoint/llama3-8b-rlhf --micro_train_batch_size 16
    --train_batch_size 128 --micro_rollout_batch_size 32 --rollout_batch_size 1024 --max_samples 100000
    --max_epochs 1 --prompt_max_len 1024 --generate_max_len 1024 --zero_stage 3 --bf16 --actor_learning_rate 5e-7
    --critic_learning_rate 9e-6 --init_kl_coef 0.01 --prompt_data DATA --input_key context_messages
    --apply_chat_template --packing_samples --use_dynamic_batch --normalize_reward --adam_offload
    --attn_implementation flash_attention_2 --gradient_checkpointing --vllm_sync_backend nccl
    --vllm_enable_sleep --deepspeed_enable_sleep --assume_devices 8x1x80GB --dry_run
"""
ESTIMATORS = {
    "gae": "gae",
    "reinforce": "reinforce",
    "reinforce_baseline": "reinforce_baseline",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
}
AGENT = """
from typing import Any, Dict
import torch

from agents import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.step_idx = 0

    async def reset(self, states: dict, **kwargs) -> dict:
        self.step_idx = 0
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> Dict[str, Any]:
        assert {"observation_text", "action_text", "label"} <= set(states)
        self.step_idx += 1
        done = self.step_idx >= 3
        reward = torch.tensor(1.0) if done else torch.tensor(0.0)
        environment_feedback = "ab>" if done else "ba>"
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": environment_feedback,
            "done": done,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {"step": self.step_idx},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
REWARD = """
import torch


def reward_func(queries, prompts, labels):
    rewards = torch.tensor([len(query) - len(prompt) for query, prompt in zip(queries, prompts)]).float()
    return {"rewards": rewards, "scores": rewards.clamp(0, 1), "extra_logs": {"length": rewards}}
"""
TINY = """--prompt_data task:sort --rollout_batch_size 4 --train_batch_size 8 --n_samples_per_prompt 2
    --generate_max_len 6 --max_samples 4 --eval_steps -1 --backend local"""


def words(command: str, **places: object) -> list[str]:
    """Return a command with local paths instead of those of the guide."""
    return [str(places.get(word, word)) for word in shlex.split(command)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_untrained(tmp_path_factory.mktemp("model"))


def train(model: Path, run_dir: Path, *options: str) -> dict[str, Any]:
    """Return the last metrics of a short run of the guide's RL command."""
    from recipes.openrlhf_ppo.main import main

    assert main([f"--pretrain={model}", f"run_dir={run_dir}", *shlex.split(TINY), *options]) == 0
    return last_metrics(run_dir)


def test_the_reward_model_command_is_accepted(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    config = REWARD_MODEL.read(words(REWARD_MODEL_COMMAND, MODEL=model, DATA="task:sort", TEMPLATE=template))
    assert (config.train.batch_size, config.train.micro_batch_size, config.train.learning_rate) == (256, 4, 9e-6)
    assert (config.data.chosen_key, config.data.rejected_key, config.data.max_tokens) == ("chosen", "rejected", 8192)
    assert (config.model.value_head_prefix, config.train.packing, config.train.zero_stage) == ("score", True, 3)
    assert config.checkpoint.export_path == "./checkpoint/llama3-8b-rm"


@pytest.mark.full
def test_transformers_loads_the_reward_model_with_the_prefix_score(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    command = f"--pretrain {model} --dataset task:sort --train_batch_size 4 --max_samples 4 --max_epochs 1"
    command += f" --value_head_prefix score --save_path {tmp_path / 'rm'} --run_dir {tmp_path / 'run'} --backend local"
    command += " evaluation.held_out=0"
    assert REWARD_MODEL.main(shlex.split(command)) == 0
    reward_model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", num_labels=1)
    hidden = reward_model.model(torch.tensor([[3, 4, 5]])).last_hidden_state
    assert reward_model.score(hidden)[:, -1].shape == (1, 1)


def test_the_rl_command_is_accepted(model: Path) -> None:
    config = read_config(words(RL_COMMAND, MODEL=model, DATA="task:sort"))
    assert (config.prompts_per_step, config.mini_batch_size, config.rollout.max_new_tokens) == (1024, 128, 1024)
    assert (config.rollout.tensor_parallel, config.rollout.gpu_memory, config.placement.colocate) == (2, 0.6, True)
    assert (config.placement.engines_sleep, config.placement.learners_sleep) == (True, True)
    assert (config.algorithm.kl_coef, config.reward_model.normalize, config.train.adam_offload) == (0.01, True, True)


@pytest.mark.parametrize(("flag", "estimator"), ESTIMATORS.items())
def test_each_estimator_is_accepted(flag: str, estimator: str, model: Path) -> None:
    options = f"--pretrain {model} --prompt_data task:sort --advantage_estimator {flag} --n_samples_per_prompt 4"
    assert read_config(options.split()).algorithm.estimator == estimator


def test_dynamic_filtering_with_its_range_is_accepted(model: Path) -> None:
    options = f"--pretrain {model} --prompt_data task:sort --n_samples_per_prompt 8 --dynamic_filtering"
    options += " --dynamic_filtering_reward_range 0.01 0.99 --use_dynamic_batch --train_max_tokens_per_gpu 4096"
    options += " --rollout_max_tokens_per_gpu 8192"
    config = read_config(options.split())
    assert config.algorithm.filter_range == (0.01, 0.99)
    assert (config.train.max_tokens, config.train.forward_max_tokens) == (4096, 8192)


def test_importance_sampling_correction_and_icepop_are_accepted(model: Path) -> None:
    options = f"--pretrain {model} --prompt_data task:sort --enable_vllm_is_correction"
    options += " --vllm_is_truncated_threshold 0.5 5.0"
    tis = read_config([*options.split(), "run_dir=runs/x"])
    assert (tis.algorithm.correction, tis.algorithm.correction_range, tis.run_dir) == ("tis", (0.5, 5.0), "runs/x")
    assert read_config([*options.split(), "--use_icepop"]).algorithm.correction == "icepop"


def test_icepop_is_zero_outside_of_the_interval_and_truncation_clips() -> None:
    ratio_N = torch.tensor([0.1, 1.0, 10.0])
    mask_N = torch.ones(3, dtype=torch.bool)
    weigh = partial(importance_weights, ratio_N.log(), torch.zeros(3), mask_N, torch.tensor([3]), level="token")
    assert weigh(low=0.5, high=5.0, outside="zero").tolist() == pytest.approx([0.0, 1.0, 0.0])
    assert weigh(low=0.5, high=5.0, outside="clamp").tolist() == pytest.approx([0.5, 1.0, 5.0])


@pytest.mark.full
def test_a_local_reward_file_gives_rewards(model: Path, tmp_path: Path) -> None:
    (tmp_path / "reward_func.py").write_text(REWARD)
    options = f"--remote_rm_url {tmp_path / 'reward_func.py'} --advantage_estimator reinforce"
    metrics = train(model, tmp_path / "run", *options.split())
    assert metrics["reward/reward"] > 0
    assert "reward/length" in metrics


@pytest.fixture(scope="module")
def episodes(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return metrics and rollouts of one step with the agent of the guide."""
    folder = tmp_path_factory.mktemp("agent")
    (folder / "agent_func.py").write_text(AGENT)
    options = f"--agent_func_path {folder / 'agent_func.py'} --advantage_estimator reinforce"
    metrics = train(model, folder / "run", *options.split())
    return metrics, pq.read_table(folder / "run" / "rollouts" / "step_000001.parquet").to_pylist()


@pytest.mark.full
def test_the_agent_of_the_guide_plays_three_turns(episodes: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    metrics, _ = episodes
    assert metrics["reward/reward"] == pytest.approx(1.0)
    assert metrics["rollout/turns_mean"] == pytest.approx(3.0)
    assert metrics["reward/step"] == pytest.approx(3.0)


@pytest.mark.full
def test_the_tokens_of_an_episode_are_the_sampled_ones(
    episodes: tuple[dict[str, Any], list[dict[str, Any]]], model: Path
) -> None:
    feedback = AutoTokenizer.from_pretrained(model)("ba>")["input_ids"]
    for row in episodes[1]:
        sampled = [token for token, acted in zip(row["tokens"], row["action_mask"], strict=True) if acted]
        observed = [token for token, acted in zip(row["tokens"], row["action_mask"], strict=True) if not acted]
        assert observed[row["prompt_length"] :][: len(feedback)] == feedback
        assert len(sampled) <= 3 * 6


@pytest.mark.nightly
def test_the_agent_trains_asynchronously(model: Path, tmp_path: Path, ray_cluster: None) -> None:
    (tmp_path / "agent_func.py").write_text(AGENT)
    options = f"--agent_func_path {tmp_path / 'agent_func.py'} --advantage_estimator reinforce --async_train"
    metrics = train(model, tmp_path / "run", *options.split(), "--async_queue_size", "2", "--backend", "ray")
    assert metrics["reward/reward"] == pytest.approx(1.0)


@pytest.mark.parametrize("flag", ESTIMATORS)
def test_every_estimator_trains_on_episodes_of_an_agent(flag: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "agent_func.py").write_text(AGENT)
    options = f"--pretrain {model} --prompt_data task:sort --agent_func_path {tmp_path / 'agent_func.py'}"
    config = read_config([*options.split(), "--advantage_estimator", flag, "--n_samples_per_prompt", "2"])
    assert (config.algorithm.estimator, bool(config.agent.func_path)) == (ESTIMATORS[flag], True)


class Lengths(BaseHTTPRequestHandler):
    """A reward server: the reward of a query is its length."""

    def do_POST(self) -> None:
        queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["query"]
        rewards = [float(len(query)) for query in queries]
        body = json.dumps({"rewards": rewards, "scores": rewards, "extra_logs": {}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.mark.full
def test_a_reward_server_gives_rewards(model: Path, tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Lengths)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/get_reward"
    metrics = train(model, tmp_path / "run", "--remote_rm_url", url, "--advantage_estimator", "reinforce")
    server.shutdown()
    assert metrics["reward/reward"] >= 6


def test_the_command_of_the_reward_server_is_accepted(model: Path) -> None:
    command = f"--reward_pretrain {model} --port 5000 --bf16 --attn_implementation flash_attention_2"
    command += " --normalize_reward --max_len 8192 --batch_size 16"
    config = load_config(ServeConfig, command.split())
    assert (config.port, config.normalize, config.max_text_tokens, config.batch_size) == (5000, True, 8192, 16)


def test_a_wandb_token_is_accepted_and_not_written_to_any_file(model: Path) -> None:
    token = "0123456789abcdef0123456789abcdef01234567"
    config = read_config([*f"--pretrain {model} --prompt_data task:sort --use_wandb {token}".split()])
    assert config.log.wandb_key == token
    assert token not in printed(config, [])
    rm = REWARD_MODEL.read([*f"--pretrain {model} --dataset task:sort --use_wandb {token}".split()])
    assert rm.log.wandb_key == token
    assert token not in printed(rm, [])


def test_ray_job_submit_is_on_the_cluster_page() -> None:
    page = (ROOT / "docs" / "cluster.md").read_text()
    assert "ray job submit" in page
    assert "recipes.openrlhf_ppo.main" in page


def test_asynchronous_training_and_the_hybrid_engine_exclude_each_other(model: Path) -> None:
    options = f"--pretrain {model} --prompt_data task:sort --async_train --colocate_all_models --vllm_enable_sleep"
    with pytest.raises(ConfigError, match="hybrid engine"):
        read_config([*options.split()])
    # OpenRLHF 0.11 also accepts both options without sleep, and notes that the engines have separate GPUs.
    assert not read_config([*options.removesuffix("--vllm_enable_sleep").split()]).placement.colocate


def test_each_row_of_the_guide_has_a_test() -> None:
    check_rows(Path(__file__))
    assert len(rows_of(Path(__file__))) > 80
