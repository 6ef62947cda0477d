"""Rows, prompts and rewards of recipes/verl_ppo, and the scripts that write its files."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch

from components.batch import Batch
from components.batch.reading import load_batch
from components.rewards.base import RewardSettings
from components.rewards.score_functions import ScoreCode
from components.rewards.workers import WorkerReward
from plugins.math_scorers.scorers import gsm8k
from recipes.verl_ppo.adapter import plain_arguments
from recipes.verl_ppo.config import VerlPPOConfig
from recipes.verl_ppo.data import check_inputs
from recipes.verl_ppo.reward import RewardManager, check_rewards
from tests.gsm8k_rows import gsm8k_rows
from tests.messages import says
from tests.recipes.tiny_models import byte_tokenizer, write_policy, write_reward_model
from training.options.config import load_config
from training.options.schema import ConfigError
from training.run.prompts import read_prompts

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "data_preprocess"


def config_of(*options: str) -> VerlPPOConfig:
    base = ["actor_rollout_ref.model.path=warm_start:sort", "data.train_files=task:sort"]
    base += ["actor_rollout_ref.actor.use_dynamic_bsz=true"]
    return load_config(VerlPPOConfig, plain_arguments([*base, *options]))


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def verl_rows(path: Path, *prompts: Any, source: str = "exact_match") -> Path:
    """Return rows whose labels are their numbers."""
    rewards = ({"style": "rule", "ground_truth": str(i)} for i in range(len(prompts)))
    rows = [
        {"data_source": source, "prompt": prompt, "reward_model": reward} for prompt, reward in zip(prompts, rewards)
    ]
    return write_lines(path, rows)


# --- the scripts


def run_script(name: str, source: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), "--input", str(source), "--local_dir", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd="/")


def written(path: Path) -> list[dict[str, Any]]:
    return pyarrow.parquet.read_table(path).to_pylist()


def test_gsm8k_is_converted_completely_and_every_solution_scores_1(tmp_path: Path) -> None:
    rows_by_split = {split: gsm8k_rows(split) for split in ("train", "test")}
    for split, records in rows_by_split.items():
        write_lines(tmp_path / "in" / f"{split}.jsonl", records)
    done = run_script("gsm8k", tmp_path / "in", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    for split, records in rows_by_split.items():
        assert re.search(says(len(records), f"{tmp_path}/out/{split}.parquet"), done.stdout)
        rows = written(tmp_path / "out" / f"{split}.parquet")
        assert [row["extra_info"]["index"] for row in rows] == list(range(len(records)))
        for row, record in zip(rows, records, strict=True):
            truth = row["reward_model"]["ground_truth"]
            assert gsm8k(record["answer"], truth) == 1.0
            assert "," not in truth
    row = written(tmp_path / "out" / "test.parquet")[0]
    assert (row["data_source"], row["ability"], row["reward_model"]["style"]) == ("openai/gsm8k", "math", "rule")
    assert row["extra_info"]["split"] == "test"
    assert row["extra_info"]["answer"] == rows_by_split["test"][0]["answer"]
    ((role, content),) = ((message["role"], message["content"]) for message in row["prompt"])
    assert role == "user"
    assert content.startswith(rows_by_split["test"][0]["question"])
    assert "####" in content
    config = config_of(
        f"data.train_files={tmp_path}/out/train.parquet", f"data.val_files=[{tmp_path}/out/test.parquet]"
    )
    train, heldout = config.rows(), config.rows(heldout=True)
    assert (len(train), len(heldout)) == (len(rows_by_split["train"]), len(rows_by_split["test"]))
    check_rewards(config, train, heldout)
    batch = config_of("data.max_prompt_length=2000").data.source(train[:50], byte_tokenizer(), 0).take(2)
    assert batch["prompt"][0].startswith("<user>")
    assert batch["extra_info"][0]["split"] == "train"


def test_the_label_of_math_is_the_content_of_the_last_box(tmp_path: Path) -> None:
    solutions = [r"\boxed{1} so \boxed{\frac{1}{2}}.", r"It is $\boxed 3$.", r"\fbox{x}", r"\boxed{\{1, 2\}}"]
    rows = [{"problem": f"P{i}", "solution": text, "level": "Level 1"} for i, text in enumerate(solutions)]
    for split in ("train", "test"):
        write_lines(tmp_path / f"{split}.jsonl", rows)
    assert run_script("math", tmp_path, tmp_path / "out").returncode == 0
    converted = written(tmp_path / "out" / "train.parquet")
    assert [row["reward_model"]["ground_truth"] for row in converted] == [r"\frac{1}{2}", "3", "x", r"\{1, 2\}"]
    assert converted[0]["prompt"][0]["content"].startswith("P0 ")
    assert converted[0]["data_source"] == "DigitalLearningGmbH/MATH-lighteval"
    write_lines(tmp_path / "test.jsonl", [*rows, {"problem": "P", "solution": "none"}])
    done = run_script("math", tmp_path, tmp_path / "out", "--only", "test")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search(says("test, row 4", "problem, solution", "'none'"), done.stderr)


def test_hellaswag_labels_are_the_numbers_of_endings(tmp_path: Path) -> None:
    row = {"activity_label": "Cooking", "ctx": "She cuts", "endings": ["a car.", "an onion."], "label": "1"}
    write_lines(tmp_path / "train.jsonl", [row])
    write_lines(tmp_path / "validation.jsonl", [row | {"label": "0"}])
    out = tmp_path / "out"
    assert run_script("hellaswag", tmp_path, out, "--data_source", "mine").returncode == 0
    (train,), (test,) = written(out / "train.parquet"), written(out / "test.parquet")
    assert (train["reward_model"]["ground_truth"], test["reward_model"]["ground_truth"]) == ("1", "0")
    assert train["data_source"] == "mine"
    assert train["prompt"][0]["content"].startswith("Cooking: She cuts\n")
    assert train["prompt"][0]["content"].endswith("0. a car.\n1. an onion.")
    write_lines(tmp_path / "train.jsonl", [row | {"label": ""}])
    assert re.search(says("train, row 0", "label ''", 0, 1), run_script("hellaswag", tmp_path, out).stderr)


def test_dialogues_become_messages_texts_or_pairs(tmp_path: Path) -> None:
    prompt = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: How?\n\nAssistant:"
    both = {"chosen": " Well.", "rejected": " Bad."}
    # In the layout of Dahoas, and in the layout of Anthropic with a single text.
    rows = [{"prompt": prompt, "response": " Well.", **both}, {key: prompt + text for key, text in both.items()}]
    write_lines(tmp_path / "train.jsonl", rows)
    expected = {
        "sft": {"prompt": prompt, "response": " Well."},
        "rm": {"prompt": prompt, **both},
    }
    for kind in ("rl", "sft", "rm"):
        done = run_script("full_hh_rlhf", tmp_path, tmp_path / "out", "--split", kind, "--only", "train")
        assert done.returncode == 0, done.stderr
        converted = written(tmp_path / "out" / kind / "train.parquet")
        if kind != "rl":
            assert converted == [expected[kind]] * 2
            continue
        turns = [("user", "Hi"), ("assistant", "Hello."), ("user", "How?")]
        for row in converted:
            assert [(message["role"], message["content"]) for message in row["prompt"]] == turns
            assert row["reward_model"] == {"ground_truth": " Well.", "style": "model"}


def test_a_script_names_missing_fields_of_its_input(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [{"text": "x"}])
    done = run_script("gsm8k", tmp_path, tmp_path / "out", "--only", "train")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert re.search(says("train, row 0", "text", "'question'"), done.stderr)
    done = run_script("gsm8k", tmp_path, tmp_path, "--only", "dev")
    assert re.search(says("--only dev", "train, test"), done.stderr)
    done = run_script("gsm8k", tmp_path / "none", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"{tmp_path}/none" in done.stderr


# --- the prompts


def sourced(tmp_path: Path, *options: str) -> tuple[list[str], list[str]]:
    """Return the prompts read from a file of prompts with 2, 5 and 7 letters, and the messages."""
    said: list[str] = []
    path = verl_rows(tmp_path / "rows.jsonl", "ab", "abcde", "abcdefg")
    config = config_of(f"data.train_files={path}", "data.max_prompt_length=4", "data.shuffle=false", *options)
    source = read_prompts(config.data, config.rows(), byte_tokenizer(), config.seed, info=said.append)
    return source.take(len(source))["prompt"], said


@pytest.mark.parametrize(
    ("options", "prompts", "facts"),
    [
        (["data.filter_overlong_prompts=true"], ["ab"], ["2 prompts", "data.max_prompt_tokens=4"]),
        (["data.truncation=left"], ["ab", "bcde", "defg"], ["2 prompts", "data.overlong=left"]),
        (["data.truncation=right"], ["ab", "abcd", "abcd"], ["2 prompts", "data.overlong=right"]),
        (["data.truncation=middle"], ["ab", "abde", "abfg"], ["2 prompts", "data.max_prompt_tokens=4"]),
        (["data.max_prompt_length=7"], ["ab", "abcde", "abcdefg"], []),
    ],
)
def test_long_prompts_are_dropped_or_truncated_with_a_message(
    tmp_path: Path, options: list[str], prompts: list[str], facts: list[str]
) -> None:
    kept, lines = sourced(tmp_path, *options)
    assert kept == prompts
    assert re.search(says(*facts), "".join(lines))
    assert len(lines) == bool(facts)


def test_a_long_prompt_without_truncation_raises_an_error_with_the_option_to_set(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says("2 of 3 prompts", 7, "row 2", "data.overlong", "leave_out", "left")):
        sourced(tmp_path)


def test_messages_are_rendered_with_the_template_and_text_is_unchanged(tmp_path: Path) -> None:
    for prompt, text in (("ab", "ab"), ([{"role": "user", "content": "ab"}], "<user>ab\n<assistant>")):
        path = verl_rows(tmp_path / "rows.jsonl", prompt)
        config = config_of(f"data.train_files={path}", "data.shuffle=false")
        batch = config.data.source(config.rows(), byte_tokenizer(), config.seed).take(1)
        assert batch["prompt"] == [text]
        assert batch["datasource"] == ["exact_match"]


def test_the_seed_selects_and_orders_training_rows_but_not_validation_rows() -> None:
    def prompts(*options: str, heldout: bool = False) -> list[str]:
        limits = ["data.train_max_samples=20", "data.val_max_samples=20", "data.val_files=task:sort"]
        config = config_of(*limits, *options)
        source = config.data.source(config.rows(heldout), byte_tokenizer(), config.seed, shuffle=not heldout)
        return source.take(len(source))["prompt"]

    assert len(set(prompts())) == 20
    assert prompts() == prompts() != prompts("data.seed=1")
    assert prompts("seed=1") == prompts("data.seed=1")
    assert prompts("seed=1", heldout=True) == prompts(heldout=True)
    assert not set(prompts()) & set(prompts(heldout=True))
    config = config_of()
    assert config.rows(heldout=True) == []


def test_a_source_can_be_resumed_within_an_epoch() -> None:
    config = config_of("data.train_max_samples=10", "data.truncation=left", "data.max_prompt_length=3")
    source = config.data.source(config.rows(), byte_tokenizer(), config.seed)
    source.take(13)
    other = config.data.source(config.rows(), byte_tokenizer(), config.seed)
    other.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert other.take(9)["prompt_id"].tolist() == source.take(9)["prompt_id"].tolist()


# --- the checks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a policy, a reward model, and two models that are not reward models."""
    folder = tmp_path_factory.mktemp("models")
    other = byte_tokenizer()
    other.add_tokens(["<more>"])
    write_policy(folder / "policy")
    write_reward_model(folder / "rm", 0)
    write_reward_model(folder / "labels", 0, num_labels=2)
    write_reward_model(folder / "words", 0, other)
    return folder


RM = "reward_model.enable=true reward_model.model.path="
BUFFER = "reward_model.reward_kwargs.overlong_buffer_cfg"


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ("actor_rollout_ref.model.path=nowhere", ["model.path=nowhere"]),
        ("critic.model.path=nowhere", ["critic.path=nowhere"]),
        (f"{RM}HERE/labels", ["HERE/labels", "2 labels"]),
        (f"{RM}HERE/words", ["HERE/words", "vocabulary"]),
        ("data.train_files=nowhere.parquet", ["nowhere.parquet"]),
        ("data.train_files=HERE/other.jsonl", ["data source 'other'", "reward.source"]),
        (f"{RM}HERE/rm reward_model.function_weight=1 data.train_files=HERE/other.jsonl", ["data source 'other'"]),
        ("data.train_files=HERE/gsm8k.jsonl data.val_files=HERE/x.jsonl", ["'openai/gsm8k'", "'x'"]),
        ("custom_reward_function.path=nowhere.py", ["nowhere.py"]),
        ("custom_reward_function.reward_kwargs.method=loose", ["loose", "method=strict"]),
        ("reward_model.reward_kwargs.max_len=9", ["max_len", "max_resp_len"]),
        (
            f"{BUFFER}.enable=true reward_model.reward_kwargs.max_resp_len=8",
            ["max_resp_len=8", "max_response_length=9"],
        ),
        (f"reward_model.reward_manager=dapo {BUFFER}.enable=true {BUFFER}.len=99", ["len", 99, 1, 9]),
        ("data.train_files=HERE/tools.jsonl", ["row 0", "extra_info.need_tools_kwargs"]),
        ("data.train_files=HERE/agent.jsonl", ["row 0", "agent_name", "'tool_agent'"]),
    ],
)
def test_invalid_or_unsuitable_inputs_are_refused(models: Path, options: str, facts: list[object]) -> None:
    verl_rows(models / "other.jsonl", "a", source="other")
    verl_rows(models / "gsm8k.jsonl", *"abcd", source="openai/gsm8k")
    label = {"reward_model": {"ground_truth": "x"}}
    for name, field in (
        ("tools", {"extra_info": {"need_tools_kwargs": True}}),
        ("agent", {"agent_name": "tool_agent"}),
    ):
        write_lines(models / f"{name}.jsonl", [{"data_source": "sort", "prompt": "a", **label, **field}])
    write_lines(models / "x.jsonl", [{"data_source": "openai/gsm8k", "prompt": "a", **label}])
    arguments = [
        f"actor_rollout_ref.model.path={models}/policy",
        "data.train_batch_size=4",
        "data.max_response_length=9",
    ]
    arguments += ["actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    expected = says(*(str(fact).replace("HERE", str(models)) for fact in facts))
    with pytest.raises(ConfigError, match=expected):
        check_inputs(config_of(*arguments, *options.replace("HERE", str(models)).split()), [])


def test_rows_without_function_or_ground_truth_need_a_reward_model(models: Path) -> None:
    rows = [{"data_source": "other", "prompt": "a", "reward_model": {"style": "model"}}] * 4
    arguments = [f"data.train_files={write_lines(models / 'rows.jsonl', rows)}", "data.train_batch_size=4"]
    arguments += [f"actor_rollout_ref.model.path={models}/policy", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    check_inputs(config_of(*arguments, *f"{RM}{models}/rm".split()), [])
    check_inputs(config_of(*arguments, "data.train_files=task:sort"), [])
    with pytest.raises(ConfigError, match=says("row 0", "reward_model.ground_truth")):
        check_inputs(config_of(*arguments), [])


def test_a_tokenizer_without_a_token_for_padding_pads_with_its_end_token(tmp_path: Path) -> None:
    byte_tokenizer(pad_token=None).save_pretrained(tmp_path)
    tokenizer = config_of(f"actor_rollout_ref.model.tokenizer_path={tmp_path}").model.tokenizer()
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<eos>", "<eos>")


# --- the rewards


def responses(*rows: tuple[str, str, str], **columns: Sequence[float]) -> Batch:
    """Return one response for each (data source, response, label) to the prompt "q", each with an end token."""
    tokenizer = byte_tokenizer()
    prompt = tokenizer.encode("q")
    texts = [[*tokenizer.encode(response), tokenizer.eos_token_id] for _, response, _ in rows]
    acted = [[0] * len(prompt) + [1] * len(text) for text in texts]
    batch = Batch.from_rows({"tokens": [prompt + text for text in texts], "action_mask": acted})
    batch = batch.with_tokens(action_mask=batch["action_mask"].bool())
    numbers = {name: torch.tensor(column) for name, column in columns.items()}
    batch = batch.with_sequences(prompt_length=torch.full([len(rows)], len(prompt)), **numbers)
    sources, _, labels = (list(column) for column in zip(*rows))
    return batch.with_objects(prompt=["q"] * len(rows), datasource=sources, label=labels)


def rewarded(samples: Batch, *options: str) -> tuple[Batch, list[str]]:
    said: list[str] = []
    manager = RewardManager(config_of("data.max_response_length=10", *options), byte_tokenizer(), said.append)
    try:
        return manager(samples), said
    finally:
        manager.close()


def test_each_response_is_rewarded_by_the_function_of_its_data_source() -> None:
    samples = responses(
        ("openai/gsm8k", "#### 7", "7"),
        ("openai/gsm8k", "so 7", "7"),
        ("HuggingFaceH4/MATH-500", r"\boxed{0.5}", r"\frac{1}{2}"),
        ("sort", "abc", "abc"),
        ("apps", "print(3)", '{"inputs": ["", ""], "outputs": ["3", "4"]}'),
    )
    rewards, said = rewarded(samples)
    assert rewards["reward"].tolist() == rewards["score"].tolist() == [1.0, 0.0, 1.0, 1.0, 0.5]
    assert rewards["log_acc"].isnan().tolist() == [True, True, True, True, False]
    assert rewards["reward_failed"].tolist() == [0.0] * 5
    assert said == []
    # As with dynamic sampling: neither batch has all columns of the other's data source.
    assert len(Batch.concat([rewarded(samples.select([i]))[0] for i in (0, 4)])) == 2
    flexible, _ = rewarded(samples.select([0, 1]), "custom_reward_function.reward_kwargs.method=flexible")
    assert flexible["reward"].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="data source 'mine'"):
        rewarded(responses(("mine", "a", "a")))


def test_num_examine_sets_the_number_of_printed_responses_per_source() -> None:
    samples = responses(
        ("sort", "abc", "abc"), ("sort", "b", "abc"), ("sort", "c", "abc"), ("openai/gsm8k", "#### 7", "7")
    )
    _, said = rewarded(samples, "reward_model.num_examine=2")
    assert [line.partition(":")[0] for line in said] == ["sort", "sort", "openai/gsm8k"]
    assert re.search(says("[prompt] q", "[response] abc", "[ground_truth] abc", "[score] 1"), said[0])
    assert rewarded(samples)[1] == []


def test_rows_without_a_required_ground_truth_are_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth=None, **_):\n    return 1.0\n"
    )
    truth = {"reward_model": {"ground_truth": "1"}}
    for rows, refused in (([{}, {}], False), ([truth, truth], False), ([truth, {}], True)):
        write_lines(tmp_path / "a.jsonl", [{"prompt": "q", **row} for row in rows])
        config = config_of(f"data.train_files={tmp_path}/a.jsonl", f"custom_reward_function.path={tmp_path}/own.py")
        with pytest.raises(ValueError, match=says("1 of 2 rows", "ground_truth")) if refused else nullcontext():
            check_rewards(config, config.rows())


SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1):
    if solution_str == "bad":
        raise KeyError(solution_str)
    said = {"pred": solution_str, "why": solution_str, "index": extra_info.get("index", -1)}
    return {"score": scale * len(solution_str), "acc": solution_str == ground_truth, **said}

def of_lists(data_sources, solution_strs, ground_truths, extra_infos):
    return [len(solution_strs)] * len(solution_strs)
"""


def test_a_user_reward_function_is_called_and_its_failures_are_counted(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(SCORE)
    options = [f"custom_reward_function.path={tmp_path}/score.py"]
    samples = responses(("x", "ab", "ab"), ("y", "bad", ""), ("y", "abc", "")).with_objects(
        extra_info=[{"index": 5}, None, None]
    )
    rewards, said = rewarded(samples, *options, "custom_reward_function.reward_kwargs.scale=-2")
    assert rewards["reward"].tolist() == rewards["score"].tolist() == [-4.0, 0.0, -6.0]
    assert rewards["reward_failed"].tolist() == [0.0, 1.0, 0.0]
    assert rewards["log_index"].nan_to_num(9.0).tolist() == [5.0, 9.0, -1.0]
    assert rewards["info_pred"] == ["ab", None, "abc"]
    assert rewards["info"] == [{"why": "ab"}, None, {"why": "abc"}]
    rewards.save(tmp_path / "rollouts.parquet")
    assert load_batch(tmp_path / "rollouts.parquet")["info"] == rewards["info"]
    assert re.search(says("response 1", "no reward", "KeyError: 'bad'"), said[0])
    batch = ["reward_model.reward_manager=batch", "custom_reward_function.name=of_lists"]
    assert rewarded(samples, *options, *batch)[0]["reward"].tolist() == [3.0] * 3


def test_the_deadline_of_a_batch_function_is_the_sum_over_its_responses(tmp_path: Path) -> None:
    body = "    time.sleep(3)\n    return [1.0] * len(data_sources)\n"
    (tmp_path / "slow.py").write_text(f"import time\ndef compute_score(data_sources, **_):\n{body}")
    code = ScoreCode(path=f"{tmp_path}/slow.py", lists=True)
    # Longer than the timeout of one response, and far below that of sixty.
    with WorkerReward(code.reward_code(), RewardSettings(timeout_s=2, max_failed_share=0.0)) as reward:
        assert reward(*[["a"] * 60] * 3).reward_B.tolist() == [1.0] * 60


def test_dapo_reduces_the_reward_of_long_responses_and_not_their_score() -> None:
    # The last 4 of at most 10 tokens are the buffer. With the end token the responses have 4, 8 and 10 tokens.
    samples = responses(*(("exact_match", "a" * count, "a" * count) for count in (3, 7, 9)))
    options = ["reward_model.reward_manager=dapo", f"{BUFFER}.enable=true", f"{BUFFER}.len=4"]
    rewards, _ = rewarded(samples, *options, f"{BUFFER}.penalty_factor=2")
    assert rewards["reward"].tolist() == [1.0, 0.0, -1.0]
    assert rewards["score"].tolist() == [1.0, 1.0, 1.0]
    assert rewards["log_overlong_reward"].tolist() == [0.0, -1.0, -2.0]
    assert rewards["log_overlong"].tolist() == [0.0, 1.0, 1.0]
    rewards, _ = rewarded(samples, "reward_model.reward_manager=dapo")
    assert rewards["reward"].tolist() == [1.0, 1.0, 1.0]


def test_a_reward_model_gives_the_reward_alone_or_with_a_function() -> None:
    rows = [("exact_match", "a", "a"), ("exact_match", "a", "b"), ("chat", "a", "")]
    model = [0.5, -2.0, 3.0]
    options = f"{RM}unused".split()
    rewards, _ = rewarded(responses(*rows, rm_score=model), *options)
    assert rewards["reward"].tolist() == rewards["log_model"].tolist() == model
    # The data source of this prompt has no function, so the model's score is the only one.
    assert rewards["score"].tolist() == [1.0, 0.0, 3.0]
    assert rewards["log_function"].isnan().tolist() == [False, False, True]
    weighted = [*options, "reward_model.function_weight=2"]
    rewards, _ = rewarded(responses(*rows[:2], rm_score=model[:2]), *weighted)
    assert rewards["reward"].tolist() == [2.5, -2.0]
    with pytest.raises(ValueError, match="data source 'chat'"):
        rewarded(responses(*rows, rm_score=model), *weighted)


def test_a_failed_function_next_to_a_model_fails_the_reward_only_if_it_has_weight() -> None:
    rows = [("openai/gsm8k", "#### 1", "1"), ("openai/gsm8k", "#### 1", "one"), ("openai/gsm8k", "#### 1", "1")]
    options = [*f"{RM}unused".split(), "reward_model.max_failed_share=0.5"]
    rewards, said = rewarded(responses(*rows, rm_score=[3.0, 4.0, 5.0]), *options)
    assert (rewards["reward"].tolist(), rewards["score"].tolist()) == ([3.0, 4.0, 5.0], [1.0, 0.0, 1.0])
    assert re.search(says("response 1", "no score", "'one'"), said[0])
    rewards, said = rewarded(responses(*rows, rm_score=[3.0, 4.0, 5.0]), *options, "reward_model.function_weight=1")
    assert (rewards["reward"].tolist(), rewards["score"].tolist()) == ([4.0, 0.0, 6.0], [1.0, 0.0, 1.0])
    assert re.search(says("response 1", "no reward", "'one'"), said[0])


def test_episodes_keep_the_rewards_of_their_environment() -> None:
    episodes = responses(("mine", "a", ""), ("mine", "b", ""), reward=[0.25, 0.0], score=[1.0, 0.0]).with_objects(
        status=["finished", "error"], error=[None, "it broke"]
    )
    rewards, said = rewarded(episodes)
    assert rewards["reward"].tolist() == [0.25, 0.0]
    assert len(said) == 1
    assert re.search(says("response 1", "no reward", "it broke"), said[0])
    with pytest.raises(ValueError, match=says("episodes", "reward", "executor")):
        rewarded(responses(("mine", "a", "")), "agent.func_path=env:guess")
