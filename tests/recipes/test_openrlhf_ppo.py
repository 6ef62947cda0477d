"""recipes/openrlhf_ppo in complete runs with real Ray, real DeepSpeed and real files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from local_runs import run_here
from recipe_runs import Run

from tests.messages import says

SMALL = [
    "prompt_data=task:sort",
    "reward.source=sort",
    "eval_dataset=task:sort",
    "evaluation.greedy=true",
    "evaluation.max_samples=32",
    "max_samples=32",
    "rollout_batch_size=16",
    "n_samples_per_prompt=4",
    "train_batch_size=32",
    "use_dynamic_batch=true",
    "generate_max_len=8",
    "actor_learning_rate=3e-4",
    "critic_learning_rate=1e-3",
    "lr_scheduler=constant",
    "lr_warmup_ratio=0",
    "zero_stage=1",
    "init_kl_coef=0",
]
"""Two steps of 16 prompts x 4 responses, two optimizer steps each."""


@pytest.fixture(scope="module")
def one_rank(ray_address: str, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that several tests read."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    return Run("openrlhf_ppo", ray_address, run_dir, f"pretrain={policy}", *SMALL).wait()


def test_a_run_finishes_and_its_summary_matches_its_metrics(one_rank: Run) -> None:
    assert one_rank.code == 0, one_rank.err
    summary = one_rank.summary
    assert (summary["status"], summary["steps"], summary["seed"], summary["error"]) == ("finished", 2, 42, None)
    assert summary["score"]["examples"] == 32
    assert [entry["step"] for entry in one_rank.metrics] == [1, 2]
    assert summary["peak_memory_bytes"] > 500 * 2**20
    assert 0 < summary["seconds"]["setup"] < summary["seconds"]["to_first_step"]
    assert re.search(says("score", 32, round(summary["score"]["end"], 2)), one_rank.out)


def test_the_run_folder_contains_all_files_of_a_run(one_rank: Run) -> None:
    import pyarrow.parquet

    folder = one_rank.run_dir
    for name in ("config.yaml", "environment.json", "plan.json", "logs/actor-0.log", "checkpoints/latest"):
        assert (folder / name).is_file(), name
    table = pyarrow.parquet.read_table(folder / "rollouts" / "step_000002.parquet")
    assert table.num_rows == 64
    assert {"tokens", "action_mask", "logprob", "rollout_logprob", "advantage", "reward"} <= set(table.column_names)


def test_the_local_backend_equals_the_ray_backend_bit_for_bit(one_rank: Run, policy: Path, tmp_path: Path) -> None:
    run = run_here("openrlhf_ppo", tmp_path / "run", f"pretrain={policy}", *SMALL)
    assert run.code == 0, run.err
    assert run.learnt() == one_rank.learnt()
    for file in ("hf/model.safetensors", "state/critic/rank_0.safetensors"):
        kept = [r.run_dir / "checkpoints/step_2" / file for r in (run, one_rank)]
        assert kept[0].read_bytes() == kept[1].read_bytes(), file
    assert run.summary["score"] == one_rank.summary["score"]
    assert run.starts() == {}


def test_a_run_folder_is_never_overwritten(one_rank: Run, capsys: pytest.CaptureFixture[str]) -> None:
    from recipes.openrlhf_ppo.main import main

    before = (one_rank.run_dir / "metrics.jsonl").read_bytes()
    assert main([f"run_dir={one_rank.run_dir}", "resume=none"]) == 2
    assert re.search(says("resume", one_rank.run_dir), capsys.readouterr().err)
    assert (one_rank.run_dir / "metrics.jsonl").read_bytes() == before


def test_the_first_update_of_each_batch_starts_at_ratio_one(one_rank: Run) -> None:
    for entry in one_rank.metrics:
        assert entry["actor/first_ratio_mean"] == pytest.approx(1.0, abs=1e-5)


def test_engine_and_trainer_agree_on_log_probabilities(one_rank: Run) -> None:
    for entry in one_rank.metrics:
        assert entry["rollout/logprob_gap_max"] < 1e-4


def test_the_exported_policy_loads_and_repeats_the_greedy_score(one_rank: Run) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from plugins.demo.tasks import get_task

    folder = one_rank.run_dir / "checkpoints" / "step_2" / "hf"
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    task = get_task("sort")
    rows = task.rows("heldout", 32, 0)
    prompts = tokenizer([row["input"] for row in rows], return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**prompts, max_new_tokens=8, do_sample=False)
    responses = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    score = sum(task.score(response, row["label"]) for response, row in zip(responses, rows, strict=True)) / 32
    assert score == one_rank.summary["score"]["end_greedy"]


@pytest.mark.nightly
def test_losses_do_not_depend_on_ranks_engines_or_micro_batches(
    one_rank: Run, ray_address: str, policy: Path, tmp_path: Path
) -> None:
    ranks = ["actor_num_gpus_per_node=2", "critic_num_gpus_per_node=2", "vllm_num_engines=2"]
    # Micro-batches limited by responses instead of tokens.
    cut = ["use_dynamic_batch=false", "micro_train_batch_size=5", "micro_rollout_batch_size=16"]
    two = Run("openrlhf_ppo", ray_address, tmp_path / "run", f"pretrain={policy}", *SMALL, *ranks, *cut).wait()
    assert two.code == 0, two.err
    for one_step, two_step in zip(one_rank.metrics, two.metrics, strict=True):
        for name in ("actor/loss", "critic/loss", "actor/grad_norm", "reward/score", "actor/entropy"):
            assert two_step[name] == pytest.approx(one_step[name], rel=1e-4, abs=1e-6), name


REWARD_FILE = """
def reward_func(queries, prompts, labels, **kwargs):
    assert all(query.startswith(prompt) for query, prompt in zip(queries, prompts))
    return {"rewards": [float(len(label)) for label in labels], "extra_logs": {"seven": 7.0}}
"""


def test_a_reference_a_reward_file_and_a_jsonl_of_prompts_work_together(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD_FILE)
    rows = [{"question": f"{letters}>", "answer": "abc"} for letters in ("abcde", "edcba", "fghij", "kblaa")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = f"""pretrain={policy} prompt_data={tmp_path}/prompts.jsonl input_key=question label_key=answer
        remote_rm_url={tmp_path}/reward.py rollout_batch_size=4 n_samples_per_prompt=2 train_batch_size=4
        use_dynamic_batch=true generate_max_len=8 init_kl_coef=0.1 kl_estimator=k3 use_kl_loss=true
        colocate_actor_ref=true actor_learning_rate=1e-2 num_episodes=2 lr_warmup_ratio=0 zero_stage=3
        max_epochs=2""".split()
    run = run_here("openrlhf_ppo", tmp_path / "run", *options)
    assert run.code == 0, run.err
    first, second = run.metrics
    assert first["reward/reward"] == 3.0
    assert first["reward/seven"] == 7.0
    assert first["actor/kl_to_reference"] == pytest.approx(0.0, abs=1e-5)
    assert second["actor/kl_to_reference"] != pytest.approx(0.0, abs=1e-3)
    assert run.summary["score"] is None


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (["--pretrian", "x"], ["pretrian", "pretrain"]),
        (["prompt_data=nowhere.jsonl"], ["nowhere.jsonl"]),
        (["pretrain=./nowhere", "prompt_data=task:sort", "reward.source=sort"], ["pretrain=./nowhere"]),
        (["reward.source=sport"], ["sport"]),
        (["train_batch_size=100"], [64, 8, 512, "train_batch_size=100"]),
        (["rollout_batch_size=10000", "train_batch_size=10000"], ["task:sort", "rollout_batch_size=10000"]),
        (["remote_rm_url=x.py"], ["x.py"]),
        (["actor_learning_rate=-1"], ["learning_rate=-1.0"]),
        (["adam_offload=true"], ["adam_offload", "zero_stage"]),
        (["run_dir=/proc/nowhere"], ["run_dir=/proc/nowhere"]),
        (["temperature=0"], ["temperature=0.0"]),
    ],
)
def test_bad_input_is_reported_in_one_line_with_exit_code_2_before_the_start(
    options: list[str], facts: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    from recipes.openrlhf_ppo.main import main

    assert main(options) == 2
    error = capsys.readouterr().err
    assert re.search(says(*facts), error)
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("gpus", "options", "devices"),
    [
        ("0,1,2,3", [], {"ACTOR": 1, "CRITIC": 1, "ROLLOUT": 1, "REWARD": 0, "REFERENCE": 1}),
        ("0,1,2", ["--colocate_actor_ref"], {"ACTOR": 0.5, "CRITIC": 1, "ROLLOUT": 1, "REWARD": 0, "REFERENCE": 0.5}),
        (
            "0,1,2,3",
            ["--colocate_critic_reward", "reward_pretrain=x"],
            {"ACTOR": 1, "CRITIC": 0.5, "ROLLOUT": 1, "REWARD": 0.5, "REFERENCE": 1},
        ),
        (
            "0",
            ["--colocate_all_models"],
            dict.fromkeys(("ACTOR", "CRITIC", "ROLLOUT", "REFERENCE"), 0.25) | {"REWARD": 0},
        ),
    ],
)
def test_the_plan_for_a_machine_with_gpus_gives_each_role_its_share(
    gpus: str, options: list[str], devices: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    from recipes.openrlhf_ppo.layout import resolved
    from recipes.openrlhf_ppo.main import build_job, read_config

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    placement = build_job(resolved(read_config(["init_kl_coef=0.1", *options]))).placement
    assert placement.devices == devices | {"TRAINER": 0}
    shared = [host.bundle for host in placement.hosts if host.name in ("ACTOR-0", "REFERENCE-0")]
    assert (len(set(shared)) == 1) == (devices["ACTOR"] < 1)


def test_too_few_gpus_are_rejected_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from recipes.openrlhf_ppo.main import main

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert main(["--dry_run"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(says(3, 1, "devices"), error)


def test_every_option_has_a_description_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    from recipes.openrlhf_ppo.main import main

    assert main(["--help", "all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    options = [i for i, line in enumerate(lines) if line.startswith("--")]
    assert len(options) > 50
    assert [lines[i] for i in options if i + 1 == len(lines) or not lines[i + 1].startswith("    ")] == []


def test_print_config_prints_the_configuration_without_secrets_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from recipes.openrlhf_ppo.main import main

    key = "0123456789abcdef0123456789abcdef01234567"
    assert main(["--print_config", "seed=5", f"run_dir={tmp_path}/run", "--use_wandb", key]) == 0
    text = capsys.readouterr().out
    printed = yaml.safe_load(text)
    assert (printed["seed"], printed["model"]["path"], printed["train"]["precision"]) == (5, "warm_start:sort", "auto")
    assert key not in text
    assert not (tmp_path / "run").exists()


def test_dry_run_prints_devices_and_processes_without_ray_or_torch() -> None:
    import resource
    import subprocess
    import sys

    script = (
        "import sys; from recipes.openrlhf_ppo.main import main; code = main(['--dry_run', 'vllm_num_engines=2']);"
        "print('HEAVY', sorted({'ray', 'torch', 'transformers'} & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    assert done.stderr.endswith("\nHEAVY []\n")
    assert re.search(r"rollout +2 x ", done.stderr)
    plan = json.loads(done.stdout)["placement"]
    assert plan["processes"] == {"TRAINER": 1, "ACTOR": 1, "CRITIC": 1, "ROLLOUT": 2, "REWARD": 1}
    assert set(plan["devices"]) == set(plan["processes"])
    # In CPU seconds, because wall time also depends on other processes.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0
