"""Recipes with vLLM."""

import re
from pathlib import Path

import pytest
from local_runs import run_apart
from recipe_runs import Run

from components.batch.reading import load_batch
from core import RLJobBuilder
from recipes.grpo.main import read_config
from tests.messages import says
from tests.recipes.tiny_mixtures import FAMILIES, write_imitator

pytestmark = [pytest.mark.vllm, pytest.mark.full]
REWARD = """
def reward_func(queries, prompts, labels, **kwargs):
    # How many different letters: responses differ in it from the start.
    return {"rewards": [len(set(query[len(prompt):])) for query, prompt in zip(queries, prompts)]}
"""
VLLM = ["--rollout_engine", "vllm", "--verify_weight_sync"]


@pytest.mark.nightly
def test_an_engine_out_of_memory_during_generation_is_replaced_and_no_prompt_is_lost(
    ray_cluster: None, policy: Path, tmp_path: Path
) -> None:
    options = ["data.path=task:sort", "rollout.engine=vllm", "rollout.max_new_tokens=90", "data.max_prompt_tokens=16"]
    config = read_config([f"model.path={policy}", f"run_dir={tmp_path}", *options])
    builder = RLJobBuilder().config(config).recovery(max_restarts=1, stall_timeout=600, stop_grace=10)
    builder.trainer("tests.recipes.vllm_job:Disturbed").actor("recipes.grpo.roles.actor:Actor")
    builder.rollout("tests.recipes.vllm_job:Engine").total(2).max_restarts(1)
    result = builder.build().submit("vllm")
    assert result.exit_code == 0, result.error
    undisturbed, disturbed = (load_batch(tmp_path / f"{name}.parquet") for name in ("undisturbed", "disturbed"))
    assert len(disturbed) == 200
    assert disturbed["tokens"].equal(undisturbed["tokens"])
    assert disturbed["rollout_logprob"].equal(undisturbed["rollout_logprob"])


def test_vllm_samples_from_the_current_policy_in_every_step(policy: Path, tmp_path: Path) -> None:
    options = """data.path=task:sort data.max_prompt_tokens=16 data.max_samples=24 prompts_per_step=8
        samples_per_prompt=4 train.mini_batch_size=16 rollout.max_new_tokens=8 train.learning_rate=1e-2
        train.packing=true
    """
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    arguments = [f"model.path={policy}", f"reward.source={reward}", *options.split(), *VLLM]
    adapters = ["train.lora_rank=4", "train.lora_alpha=64"]
    runs = run_apart("grpo", tmp_path, {"weights": arguments, "adapters": [*arguments, *adapters]})
    for run in runs.values():
        assert run.summary["steps"] == 3
        assert all(step["rollout/logprob_gap_max"] < 1e-4 for step in run.metrics)
        assert all(step["actor/grad_norm"] > 0 for step in run.metrics)
        assert all(step["rollout/check_gap_mean"] < step["rollout/check_gap_limit"] for step in run.metrics)
        # One engine generates: the times of its parts are those of the phase, without the call.
        for step in run.metrics:
            parts = sum(step[f"timing_s/generate_{part}"] for part in ("prefill", "decode", "objects"))
            assert 0.5 * step["timing_s/generate"] < parts <= step["timing_s/generate"]


def test_before_the_first_update_the_ratio_is_1_and_the_kl_to_the_reference_is_0(policy: Path, tmp_path: Path) -> None:
    options = """data.path=task:sort data.max_prompt_tokens=16 data.max_samples=4 prompts_per_step=4
        samples_per_prompt=4 train.mini_batch_size=16 rollout.max_new_tokens=8 algorithm.kl_coef=0.1
    """
    arguments = [f"model.path={policy}", *options.split(), *VLLM]
    precisions = {"fp32": 1e-4, "bf16": 0.02, "bf16_autocast": 0.02}
    runs = run_apart("grpo", tmp_path, {name: [*arguments, f"train.precision={name}"] for name in precisions})
    for name, gap in precisions.items():
        [step] = runs[name].metrics
        assert step["actor/first_ratio_mean"] == 1, name
        assert step["actor/kl_loss"] == pytest.approx(0, abs=1e-6), name
        assert step["rollout/logprob_gap_mean"] < gap, name


@pytest.mark.nightly
def test_a_policy_trains_on_responses_of_an_engine_with_fp8_weights(policy: Path, tmp_path: Path) -> None:
    options = """data.path=task:sort data.max_prompt_tokens=16 data.max_samples=24 prompts_per_step=8
        samples_per_prompt=4 train.mini_batch_size=16 rollout.max_new_tokens=8 train.precision=bf16
        rollout.vllm.quantization=fp8_per_channel algorithm.correction=tis
    """
    run = run_apart("grpo", tmp_path, {"fp8": [f"model.path={policy}", *options.split(), *VLLM]})["fp8"]
    assert run.summary["steps"] == 3
    for step in run.metrics:
        # Weights are rounded to 8 bits again at each weight sync.
        assert 1e-4 < step["rollout/check_gap_mean"] < step["rollout/check_gap_limit"] == 0.3
        assert step["rollout/effective_sample_size"] > 0.5


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixture_of_experts_learns_to_sort(family: str, tmp_path: Path) -> None:
    # 20 of the 40 steps of the demonstration.
    write_imitator(family, tmp_path / "model")
    options = f"""--config recipes/grpo/tiny.yaml model.path={tmp_path / "model"} rollout.engine=vllm seed=1
        data.max_samples=1280 evaluation.max_samples=512 evaluation.samples_per_prompt=1
    """
    run = run_apart("grpo", tmp_path, {"run": options.split()})["run"]
    score = run.summary["score"]
    # Measured with seeds 1, 2 and 3: docs/engines.md.
    assert score["start"] < 0.3
    assert score["end"] > 0.8
    assert score["end_greedy"] > 0.9
    # After every weight sync the engine computes the log-probabilities of the trainer.
    assert all(step["rollout/logprob_gap_max"] < 1e-4 for step in run.metrics if "rollout/logprob_gap_max" in step)


@pytest.mark.nightly
def test_vllm_continues_episodes_while_the_policy_trains(ray_address: str, runner: Path, tmp_path: Path) -> None:
    options = """data.path=task:guess data.max_samples=40 evaluation.path=task:guess evaluation.max_samples=8
        agent.func_path=env:guess agent.max_turns=3 agent.max_tokens=64 prompts_per_step=8 samples_per_prompt=4
        train.mini_batch_size=16 rollout.max_new_tokens=4 train.learning_rate=1e-3 placement.colocate=false
        --async_train --partial_rollout asynchronous.in_flight_prompts=12
    """
    run = Run("multi_turn", ray_address, tmp_path / "run", f"model.path={runner}", *VLLM, *options.split()).wait()
    assert run.code == 0, run.err
    assert run.summary["score"]["examples"] == 8
    samples = [load_batch(file) for file in sorted((run.run_dir / "rollouts").glob("*.parquet"))]
    assert sorted(prompt for batch in samples for prompt in set(batch["prompt_id"].tolist())) == list(range(40))
    # Tokens sampled with the weights of the previous step have the policy's log-probabilities, at any position of an
    # episode.
    is_newest = [batch["token_version"] == step for step, batch in enumerate(samples)]
    gaps = [(batch["logprob"] - batch["rollout_logprob"]).abs() for batch in samples]
    assert all(gap[fresh].max() < 1e-4 for gap, fresh in zip(gaps, is_newest, strict=True) if fresh.any())
    assert sum(line["rollout/staleness_mean"] for line in run.metrics) > 0
    assert run.left_behind() == []


@pytest.mark.nightly
def test_ppo_runs_with_vllm_sleep_packing_and_adapters_and_leaves_nothing_behind(
    ray_address: str, policy: Path, tmp_path: Path
) -> None:
    options = """max_samples=16 evaluation.max_samples=8 rollout_batch_size=8 n_samples_per_prompt=2 train_batch_size=8
        freezing_actor_steps=-1 placement.engines_sleep=true --deepspeed_enable_sleep --packing_samples --lora_rank 4
        actor_learning_rate=0.01 --zero_stage 2 --vllm_tensor_parallel_size 2
    """
    preset = "recipes/openrlhf_ppo/tiny.yaml"
    run = Run(
        "openrlhf_ppo", ray_address, tmp_path / "run", "--config", preset, f"pretrain={policy}", *VLLM, *options.split()
    )
    run.wait()
    assert run.code == 0, run.err
    said = run.out.splitlines()
    for facts in (["vllm"], ["actor and critic", "sleep", "CPU"], ["engines", "sleep", "CPU"]):
        assert any(re.search(says(*facts), line) for line in said), facts
    assert all(step["rollout/logprob_gap_max"] < 1e-4 for step in run.metrics)
    assert (run.run_dir / "checkpoints/step_2/hf/model.safetensors").is_file()
    assert run.left_behind() == []
    assert [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"VLLM::" in path.read_bytes()] == []
