"""recipes/verl_ppo in complete runs: their output, the effect of each key, and recovery."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from gates import Gate
from local_runs import run_here, run_locally
from recipe_runs import Run, RunFolder
from safetensors.torch import load_file
from tiny_models import write_reward_model
from verl_runs import APART, KL, LONG, SMALL, batches, same, write_files

from components.batch.grouping import group_by
from tests.messages import says

REFERENCE_WITHIN = "trainer.role_mapping={actor_rollout_ref:global_pool,critic:global_pool}"
POLICY = Path("checkpoints/step_2/hf/model.safetensors")
PAIRS = "algorithm.adv_estimator=grpo data.val_files=null"


@pytest.fixture(scope="module")
def options(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that all runs share."""
    return [*SMALL.split(), "evaluation.greedy=true", *write_files(tmp_path_factory.mktemp("files"), policy)]


@pytest.fixture(scope="module")
def local(options: list[str], policy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFolder]:
    """Several runs of one rank in one process."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("verl_ppo")
    model = write_reward_model(folder / "rm", 0, AutoTokenizer.from_pretrained(policy), initializer_range=0.5)
    agent = folder / "agent.py"
    agent.write_text(AGENT)
    rows = [{"prompt": f"{letters}>", "extra_info": {"first": letters[0]}, **TRUTH} for letters in ("bca", "abcd")]
    (folder / "rows.json").write_text(json.dumps(rows))
    mine = f"data.train_files={folder}/rows.json data.train_batch_size=2 actor_rollout_ref.actor.ppo_mini_batch_size=2"
    runs = {
        "long": LONG,
        "from_a_path": f"{LONG} trainer.resume_mode=resume_path trainer.resume_from_path={folder}/long",
        "apart": KL,
        "within": f"{KL} {REFERENCE_WITHIN}",
        "loss": f"{PAIRS} actor_rollout_ref.actor.use_kl_loss=true trainer.role_mapping.actor_rollout_ref=global_pool "
        "actor_rollout_ref.rollout.verify_weight_sync=true",
        "model": f"{PAIRS} {mine} custom_reward_function.reward_kwargs.bonus=2 reward_model.enable=true "
        f"reward_model.model.path={model} reward_model.function_weight=0.5",
        "agent": f"--agent_func_path={agent}",
        "remax": "algorithm.adv_estimator=remax trainer.val_before_train=false",
        "filtered": f"{PAIRS} algorithm.filter_groups.enable=true data.train_max_samples=30",
        "val_only": f"{LONG} trainer.val_only=true actor_rollout_ref.rollout.val_kwargs.do_sample=true "
        "actor_rollout_ref.rollout.val_kwargs.temperature=1 actor_rollout_ref.rollout.val_kwargs.n=4 "
        f"trainer.resume_mode=resume_path trainer.resume_from_path={folder}/long/checkpoints/step_6",
    }
    # The second resumes from the middle of the first.
    runs["from_a_path"] += "/checkpoints/step_2"
    return {
        **run_locally(
            "verl_ppo",
            folder,
            {name: [*options, *text.split()] for name, text in runs.items()},
        )
    }


AGENT = """
from agents import AgentInstanceBase

class AgentInstance(AgentInstanceBase):
    # The share of letters that come later than the one before, in two turns.
    async def reset(self, states, **kwargs):
        self.turns = 0
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.turns += 1
        text = states["action_text"]
        share = sum(a < b for a, b in zip(text, text[1:])) / 8
        return {"rewards": share, "environment_feedback": "a>", "done": self.turns == 2}
"""
TRUTH = {"data_source": "mine", "reward_model": {"style": "rule", "ground_truth": "abc"}}


# --- what a run is


def test_ppo_with_the_hybrid_engine_learns_within_six_steps_including_critic_warm_up(
    local: dict[str, RunFolder],
) -> None:
    run = local["long"]
    score = run.summary["score"]
    assert (run.summary["status"], run.summary["steps"], score["examples"]) == ("finished", 6, 32)
    assert score["end"] > score["start"] + 0.15
    assert score["end_greedy"] > score["start_greedy"] + 0.2
    assert run.metrics[-1]["critic/score/mean"] > run.metrics[0]["critic/score/mean"] + 0.1
    first, *others = run.metrics
    assert first["critic/vf_loss"] > 0
    assert "actor/pg_loss" not in first
    assert all("actor/pg_loss" in line for line in others)


VERLS = """
    actor/pg_loss actor/pg_clipfrac actor/pg_clipfrac_lower actor/ppo_kl actor/entropy actor/grad_norm actor/lr
    actor/reward_kl_penalty actor/reward_kl_penalty_coeff
    critic/vf_loss critic/vf_clipfrac critic/vpred_mean critic/grad_norm critic/lr critic/vf_explained_var
    critic/score/mean critic/score/max critic/score/min critic/rewards/mean critic/advantages/mean
    critic/returns/mean critic/values/mean
    response_length/mean response_length/clip_ratio prompt_length/mean global_seqlen/balanced_max
    timing_s/gen timing_s/reward timing_s/old_log_prob timing_s/ref timing_s/values timing_s/adv
    timing_s/update_critic timing_s/update_actor timing_s/update_weights timing_s/testing timing_s/step
    timing_per_token_ms/gen perf/total_num_tokens perf/time_per_step perf/throughput
    val-core/sort/reward/mean@1 val-aux/sort/score/mean@1 val-aux/sort/letters/mean@1
    training/global_step training/epoch training/rollout_probs_diff_max rollout_corr/kl
"""


def test_metrics_have_the_names_of_verl_and_match_the_trained_batches(local: dict[str, RunFolder]) -> None:
    run = local["long"]
    last, batch = run.metrics[-1], batches(run)[-1]
    assert sorted(set(VERLS.split()) - set(last)) == []
    assert (last["training/global_step"], last["training/epoch"]) == (6, 0)
    assert last["critic/score/mean"] == pytest.approx(float(batch["reward"].mean()))
    assert last["critic/rewards/mean"] == pytest.approx(float(batch["shaped_reward"].mean()))
    assert last["critic/advantages/max"] == float(batch["advantage"][batch["action_mask"]].max())
    assert last["perf/total_num_tokens"] == batch.num_tokens
    assert last["perf/throughput"] == pytest.approx(batch.num_tokens / last["timing_s/step"])
    tested = [line["step"] for line in run.metrics if "val-core/sort/reward/mean@1" in line]
    assert tested == [3, 6]


def calls(run: RunFolder) -> list[str]:
    """Return every call to a role, in the order of their start."""
    events = [json.loads(line) for line in (run.run_dir / "events.jsonl").read_text().splitlines()]
    role_calls = [event for event in events if event["event"] == "call" and event["role"] != "TRAINER"]
    return [f"{call['role'].lower()}.{call['method']}" for call in sorted(role_calls, key=lambda call: call["began"])]


def test_the_stages_of_a_step_have_the_order_of_verl(local: dict[str, RunFolder]) -> None:
    began, policy = calls(local["long"]), "actor_rollout"
    # The engines are loaded first, then all other roles together. Held-out prompts are answered twice: as in
    # validation, and greedily. In the first step only the critic is trained.
    loading = [f"{policy}.init_rollout", f"{policy}.init_model", "critic.init_model", "ref.init_model"]
    assert began[:4] == loading
    validation = [f"{policy}.generate_sequences"] * 2
    experience = [
        f"{policy}.generate_sequences",
        f"{policy}.compute_log_prob",
        "ref.compute_ref_log_prob",
        "critic.compute_values",
    ]
    sync = [f"{policy}.{method}_weights" for method in ("announce", "publish", "receive")]
    update = [f"{policy}.update_actor", *sync]
    saved = [f"{policy}.save_state", "critic.save_state", f"{policy}.save"]
    first, second = [*experience, "critic.update_critic"], [*experience, "critic.update_critic", *update]
    assert began[4 : 6 + len(first) + len(second) + len(saved)] == [*validation, *first, *second, *saved]
    assert began[-1] == f"{policy}.end_job"


def test_the_first_update_of_each_step_starts_at_ratio_one_and_the_engine_agrees(local: dict[str, RunFolder]) -> None:
    lines = [line for name in ("long", "within", "loss", "agent", "remax") for line in local[name].metrics]
    trained = [line for line in lines if "actor/pg_loss" in line]
    assert len(trained) == len(lines) - 1
    for line in trained:
        assert line["actor/first_ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    for line in lines:
        assert line["rollout/logprob_gap_max"] < 1e-4


# --- continuing


STOPS = """

score_of = compute_score

def compute_score(*given, **named):
    # Ctrl-C, once, in the middle of the second step: this runs in a child of the process that drives the run.
    stop = Path({stop!r})
    if Path({trace!r}).exists() and stop.exists():
        stop.unlink()
        os.kill(os.getppid(), signal.SIGINT)
    return score_of(*given, **named)
"""


def test_a_stopped_run_and_one_resumed_from_a_path_equal_an_undisturbed_run(
    local: dict[str, RunFolder], policy: Path, tmp_path: Path
) -> None:
    undisturbed = local["long"]
    arguments = [*SMALL.split(), "evaluation.greedy=true", *write_files(tmp_path, policy), *LONG.split()]
    stop, trace = tmp_path / "stop", tmp_path / "run/rollouts/step_000001.parquet"
    stop.touch()
    with (tmp_path / "reward.py").open("a") as code:
        code.write("\n\nimport os\nimport signal\nfrom pathlib import Path")
        code.write(STOPS.format(stop=str(stop), trace=str(trace)))
    run = run_here("verl_ppo", tmp_path / "run", *arguments)
    assert (run.code, run.summary["status"]) == (130, "stopped"), run.err
    stopped_at = run.summary["steps"]
    assert 2 <= stopped_at < 6
    assert re.search(says(f"step {stopped_at} of 6", f"run_dir={tmp_path}/run"), run.out)
    again = run_here("verl_ppo", tmp_path / "run", *arguments, "trainer.resume_mode=auto")
    assert again.code == 0, again.err
    assert re.search(says(f"step {stopped_at} of 6"), again.out)
    assert again.summary["resumed_from"] == stopped_at
    same(again, undisturbed)
    prompts = [prompt for batch in batches(again) for prompt in dict.fromkeys(batch["prompt_id"].tolist())]
    assert sorted(prompts) == list(range(96))

    # The other run begins with the third step, in a separate folder.
    other = local["from_a_path"]
    assert other.summary["resumed_from"] == 2
    assert [line["step"] for line in other.metrics] == [3, 4, 5, 6]
    assert other.learnt() == undisturbed.learnt()[3:]
    weights = undisturbed.weights()
    assert [name for name, tensor in other.weights().items() if not tensor.equal(weights[name])] == []


def test_resume_mode_disable_never_overwrites_a_run(
    local: dict[str, RunFolder], options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from recipes.verl_ppo.main import main

    folder = local["long"].run_dir
    for where, facts in (
        ([f"run_dir={folder}"], [folder]),
        ([f"run_dir={tmp_path}/run", f"trainer.default_local_dir={folder}/checkpoints"], ["step_6"]),
    ):
        assert main([*options, *where, "trainer.resume_mode=disable"]) == 2
        assert re.search(says("resume", *facts), capsys.readouterr().err)


# --- what keys do


def test_a_reference_in_the_policys_process_equals_a_separate_one_bit_for_bit(
    local: dict[str, RunFolder],
) -> None:
    same(local["within"], local["apart"])
    assert {call.partition(".")[0] for call in calls(local["within"])} == {"actor_rollout_ref", "critic"}


def test_the_kl_is_subtracted_from_the_reward_and_its_coefficient_adapts_to_the_target(
    local: dict[str, RunFolder],
) -> None:
    first, second = local["within"].metrics
    assert (first["actor/reward_kl_penalty"], first["actor/reward_kl_penalty_coeff"]) == (0, 0.5)
    # Far below the target of 1 nat, after 32 responses with a horizon of 64: multiplied by 1 - 0.2 * 32 / 64.
    assert second["actor/reward_kl_penalty_coeff"] == pytest.approx(0.5 * 0.9)
    batch = batches(local["within"])[1]
    kl_N = (batch["logprob"] - batch["reference_logprob"]) * batch["action_mask"]
    expected = batch["reward"] - 0.45 * batch.sum_tokens(kl_N)
    torch.testing.assert_close(batch["shaped_reward"], expected, rtol=0, atol=1e-5)
    assert not batch["shaped_reward"].allclose(batch["reward"], atol=1e-3)


def test_the_kl_is_added_to_the_loss_and_leaves_rewards_unchanged(local: dict[str, RunFolder]) -> None:
    first, second = local["loss"].metrics
    assert "critic/vf_loss" not in first
    for line in (first, second):
        assert line["actor/kl_loss"] > 0  # from the second optimizer step on
        assert line["actor/loss"] == pytest.approx(line["actor/pg_loss"] + 0.001 * line["actor/kl_loss"], abs=1e-6)
        assert line["critic/rewards/mean"] == line["critic/score/mean"]


def test_the_reward_is_the_sum_of_a_reward_model_and_half_a_user_function(local: dict[str, RunFolder]) -> None:
    (line,) = local["model"].metrics
    (batch,) = batches(local["model"])
    assert len(batch) == 8
    # The function returns 2 for each as a bonus, and 1 if extra_info is wrong.
    assert batch["log_function"].ge(2).all()
    assert batch["log_extra"].tolist() == [0.0 if prompt == "bca>" else 1.0 for prompt in batch["prompt"]]
    torch.testing.assert_close(batch["reward"], batch["rm_score"] + 0.5 * batch["score"])
    assert batch["score"].equal(batch["log_function"])
    assert len(set(batch["rm_score"].tolist())) > 4
    assert line["reward/model"] == pytest.approx(float(batch["rm_score"].mean()))


def test_episodes_of_an_agent_are_trained_on_and_validated(local: dict[str, RunFolder]) -> None:
    run = local["agent"]
    assert run.summary["score"]["examples"] == 32
    for line, batch in zip(run.metrics, batches(run), strict=True):
        assert (line["num_turns/mean"], line["num_turns/max"], line["rollout/finished_share"]) == (2, 2, 1)
        assert batch["action_mask"].equal(batch["turn"] >= 0)
        assert batch.sum_tokens(batch["turn_reward"]).allclose(batch["reward"])
        assert "value" in batch
        assert batch["advantage"][~batch["action_mask"]].eq(0).all()
    assert run.metrics[-1]["val-core/sort/reward/mean@1"] > 0


def test_remax_uses_a_greedy_response_as_baseline_without_a_prior_validation(local: dict[str, RunFolder]) -> None:
    run = local["remax"]
    loading = ["actor_rollout.init_rollout", "actor_rollout.init_model"]
    assert calls(run)[:4] == [*loading, *["actor_rollout.generate_sequences"] * 2]
    for batch in batches(run):
        for group in group_by(batch, "prompt_id").values():
            assert len(set(group["greedy_reward"].tolist())) == 1
        gain_B = batch["reward"] - batch["greedy_reward"]
        for i in range(len(batch)):
            advantage = batch.row(i, "advantage")[batch.row(i, "action_mask")]
            assert advantage.tolist() == pytest.approx([float(gain_B[i])] * len(advantage), abs=1e-6)
    assert len(set(batches(run)[1]["greedy_reward"].tolist())) > 1
    score = run.summary["score"]
    assert (score["start"], score["start_greedy"]) == (None, None)
    assert score["end"] > 0


def test_filtered_groups_are_replaced_and_the_last_step_uses_the_remaining_prompts(local: dict[str, RunFolder]) -> None:
    run = local["filtered"]
    assert sum(line["rollout/filter_prompts_seen"] for line in run.metrics) == 30
    *whole, last = batches(run)
    assert [len(batch) for batch in whole] == [32] * len(whole)
    assert 0 < len(last) < 32
    for batch in (*whole, last):
        means = [float(group["score"].mean()) for group in group_by(batch, "prompt_id").values()]
        assert all(0 < mean < 1 for mean in means)


def test_val_only_validates_a_checkpoint_and_trains_nothing(local: dict[str, RunFolder]) -> None:
    run, trained = local["val_only"], local["long"]
    assert {call.partition(".")[2] for call in calls(run)} == {
        *("init_rollout", "init_model", "load_state", "announce_weights", "publish_weights", "receive_weights"),
        *("generate_sequences", "end_job"),
    }
    (line,) = run.metrics
    assert line["step"] == 6
    # this one is sampled The validation during training was already greedy according to val_kwargs.
    assert 0 < line["eval/score"] != line["eval/score_greedy"]
    # That of the training was greedy already, as val_kwargs have it.
    assert line["eval/score_greedy"] == trained.metrics[-1]["eval/score_greedy"] == trained.metrics[-1]["eval/score"]
    assert run.summary["score"]["end_greedy"] == trained.summary["score"]["end_greedy"]
    names: dict[str, Any] = {name: value for name, value in line.items() if name.startswith("val-core/sort/reward/")}
    assert sorted(name.rpartition("sort/reward/")[2] for name in names) == ["best@4/mean", "best@4/std", "mean@4"]
    assert names["val-core/sort/reward/best@4/mean"] > names["val-core/sort/reward/mean@4"] > 0


# --- several processes


@pytest.mark.full
def test_a_run_on_ray_equals_a_run_in_one_process_bit_for_bit(
    local: dict[str, RunFolder], options: list[str], ray_address: str, tmp_path: Path
) -> None:
    run = Run("verl_ppo", ray_address, tmp_path / "run", *options, *KL.split(), REFERENCE_WITHIN).wait()
    assert run.code == 0, run.err
    same(run, local["within"])
    assert run.starts().keys() == {"trainer-0", "actor_rollout_ref-0", "critic-0"}
    assert run.left_behind() == []


@pytest.mark.nightly
def test_two_ranks_with_colocated_roles_balance_tokens_and_match_one_rank(
    local: dict[str, RunFolder], options: list[str], ray_address: str, tmp_path: Path
) -> None:
    two = ["trainer.n_gpus_per_node=2", "trainer.share_processes=true"]
    run = Run("verl_ppo", ray_address, tmp_path / "run", *options, *KL.split(), *two).wait()
    assert run.code == 0, run.err
    one = local["apart"]
    for ours, theirs in zip(run.learnt()[1:], one.learnt()[1:], strict=True):
        plain = {name: value for name, value in theirs.items() if not name.startswith("global_seqlen")}
        assert {name: ours[name] for name in plain} == pytest.approx(plain, rel=1e-4, abs=1e-4)
        assert 2 * ours["global_seqlen/mean"] == theirs["global_seqlen/mean"]
        spread = ours["global_seqlen/balanced_max"] - ours["global_seqlen/balanced_min"]
        assert spread <= min(ours["global_seqlen/minmax_diff"], 8)
    assert [batch["tokens"].tolist() for batch in batches(run)] == [batch["tokens"].tolist() for batch in batches(one)]
    ours, theirs = load_file(run.run_dir / POLICY), load_file(one.run_dir / POLICY)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-4, msg=name)
    assert run.starts().keys() == {"trainer-0", *(f"actor_rollout-{i}+critic-{i}+ref-{i}" for i in (0, 1))}
    assert run.left_behind() == []


@pytest.mark.nightly
def test_a_killed_asynchronous_run_with_separate_pools_trains_on_every_prompt_once(
    policy: Path, ray_address: str, tmp_path: Path
) -> None:
    # After the second checkpoint no response is rewarded until the run has been killed.
    gate = Gate(tmp_path / "run/checkpoints/step_2", tmp_path / "go")
    arguments = [*SMALL.split(), *write_files(tmp_path, policy, gate), *APART.split(), "--async_train"]
    run = Run("verl_ppo", ray_address, tmp_path / "run", *arguments, "reward_model.timeout_s=600")
    run.wait_until(gate.is_reached)
    os.kill(run.pids()["trainer-0"], signal.SIGKILL)
    run.wait_until(lambda: len(run.starts()["trainer-0"]) == 2)
    gate.open()
    run.wait()
    assert run.code == 0, run.err
    prompts = [prompt for batch in batches(run) for prompt in dict.fromkeys(batch["prompt_id"].tolist())]
    assert sorted(prompts) == list(range(32))
    # The first batch uses the current weights. Each later one is one version behind.
    assert [line["rollout/staleness_max"] for line in run.metrics] == [0, 1, 1, 1]
    for line, batch in zip(run.metrics, batches(run), strict=True):
        weight_N = (batch["logprob"] - batch["rollout_logprob"]).exp().clamp(max=1.5)
        mask_N = batch["action_mask"]
        torch.testing.assert_close(batch["correction"][mask_N], weight_N[mask_N])
        assert line["rollout_corr/rollout_is_mean"] == pytest.approx(float(weight_N[mask_N].mean()))
    assert run.metrics[0]["rollout_corr/rollout_is_std"] < 1e-4
    assert min(line["rollout_corr/rollout_is_std"] for line in run.metrics[1:]) > 0.01
    assert run.starts().keys() == {"trainer-0", "actor-0", "critic-0", "rollout-0"}
    assert run.left_behind() == []
