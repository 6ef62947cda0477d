"""recipes/openrlhf_ppo with data and rewards of all kinds: real files, models and HTTP servers."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from local_runs import LocalRun, run_here
from tiny_models import byte_tokenizer, write_policy, write_reward_model

from recipes.openrlhf_ppo.layout import resolved
from recipes.openrlhf_ppo.main import main, read_config
from tests.gsm8k_rows import gsm8k_rows
from tests.messages import says

QUICK = [
    "prompt_max_len=64",
    "generate_max_len=6",
    "rollout_batch_size=8",
    "n_samples_per_prompt=2",
    "train_batch_size=16",
    "use_dynamic_batch=true",
    "lr_warmup_ratio=0",
    "zero_stage=0",
    "init_kl_coef=0",
]
"""Steps of 8 prompts x 2 responses, one optimizer step each."""


@pytest.fixture(scope="module")
def bytes_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained policy that reads any text."""
    return write_policy(tmp_path_factory.mktemp("models") / "policy")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write a jsonl file."""
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def questions(path: Path, count: int = 8) -> Path:
    """Prompts of different lengths, labelled by number."""
    return write_rows(path, [{"input": f"question {'x' * i}?", "label": i} for i in range(count)])


def rollouts(run: LocalRun, step: int = 1) -> dict[str, list[Any]]:
    """Return the columns of a step's responses."""
    return pyarrow.parquet.read_table(run.run_dir / "rollouts" / f"step_{step:06d}.parquet").to_pydict()


# --- data


def test_two_ppo_steps_on_gsm8k_through_a_chat_template(bytes_policy: Path, tmp_path: Path) -> None:
    rows = gsm8k_rows("train")
    write_rows(tmp_path / "train.jsonl", rows)
    # The whole file is read; the first 40 questions are used.
    rows = rows[:40]
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant] "
    (tmp_path / "template.jinja").write_text(template)
    rendered = [f"[user] {row['question']}\n[assistant] " for row in rows]
    lengths = [len(text.encode()) for text in rendered]
    limit = sorted(lengths)[23]
    fitting = sum(length <= limit for length in lengths)
    options = [
        *("--prompt_data", f"{tmp_path}/train.jsonl", "--input_key", "question", "--label_key", "answer"),
        *("reward.source=gsm8k", "--apply_chat_template", "--tokenizer_chat_template", f"{tmp_path}/template.jinja"),
        *("--max_samples", "40", "--prompt_max_len", str(limit), "--rollout_batch_size", str(fitting // 2)),
        *("--train_batch_size", str(fitting // 2), "--colocate_all_models"),
    ]
    run = run_here("openrlhf_ppo", tmp_path / "run", f"pretrain={bytes_policy}", *QUICK, *options)
    assert run.code == 0, run.err
    assert 24 <= fitting < 40
    assert re.search(says(f"{40 - fitting} prompts", f"data.max_prompt_tokens={limit}"), run.out)
    assert len(run.metrics) == 2
    # The bytes of "[us" have ids after three special tokens, in the order of the alphabet.
    shown = re.search(r"first prompt \((\d+) characters, (\d+) tokens\): '\[user\] .*ids.*: \[61, 87, 85", run.out)
    assert shown and shown[1] == shown[2]
    assert all("critic/loss" in entry and "actor/loss" in entry for entry in run.metrics)
    responses = rollouts(run)
    assert set(responses["prompt"]) <= set(rendered)
    from transformers import AutoTokenizer

    exported = AutoTokenizer.from_pretrained(run.run_dir / "checkpoints" / "step_2" / "hf")
    assert exported.chat_template == template


def test_evaluation_reports_each_source_of_a_mixture_separately(policy: Path, tmp_path: Path) -> None:
    from plugins.demo.tasks import get_task

    held = get_task("sort").rows("heldout", 12, 0)
    easy = write_rows(tmp_path / "easy.jsonl", [row | {"datasource": "easy"} for row in held[:4]])
    hard = write_rows(tmp_path / "hard.jsonl", [row | {"datasource": "hard"} for row in held[4:]])
    options = f"""pretrain={policy} prompt_data=task:sort reward.source=sort max_samples=32 rollout_batch_size=16
        n_samples_per_prompt=4 train_batch_size=32 generate_max_len=8 use_dynamic_batch=true zero_stage=0
        init_kl_coef=0 lr_warmup_ratio=0 actor_learning_rate=3e-4 label_key=label advantage_estimator=dr_grpo
        entropy_loss_coef=0.01 eval_dataset={easy},{hard} eval_steps=1 eval_n_samples_per_prompt=3
        eval_temperature=1.0 best_eval_metric_key=eval_hard_pass3""".split()
    run = run_here("openrlhf_ppo", tmp_path / "run", *options, "--eps_clip_low_high", "0.2", "0.3")
    assert run.code == 0, run.err
    for entry in run.metrics:
        for source in ("easy", "hard"):
            assert 0 <= entry[f"eval/{source}_score"] <= entry[f"eval/{source}_pass3"] <= 1
        assert entry["eval/num_samples"] == 36
    assert run.metrics[-1]["eval/score"] == run.summary["score"]["end"]
    best = max(run.metrics, key=lambda entry: (entry["eval/hard_pass3"], -entry["step"]))
    folder = run.run_dir / "checkpoints"
    assert (folder / "best").read_text().strip() == f"step_{best['step']}"
    assert (folder / f"step_{best['step']}" / "hf" / "config.json").is_file()
    assert (folder / "latest").read_text().strip() == "step_2"


# --- rewards


def test_reward_models_are_weighted_normalised_and_start_the_critic(bytes_policy: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    paths = [
        write_reward_model(tmp_path / f"rm{i}", seed=i, mean=0.25 * i, std=0.5 * i, initializer_range=0.5)
        for i in (1, 2)
    ]
    options = [
        *(f"--reward_pretrain={paths[0]},{paths[1]}", "--reward_model.weights", "1", "0.5", "--normalize_reward"),
        *(f"prompt_data={questions(tmp_path / 'q.jsonl')}", "--save_value_network", "critic_learning_rate=0"),
    ]
    run = run_here("openrlhf_ppo", tmp_path / "run", f"pretrain={bytes_policy}", *QUICK, *options)
    assert run.code == 0, run.err
    responses = rollouts(run)
    expected: list[list[float]] = []
    for i, path in enumerate(paths, 1):
        model: Any = AutoModelForSequenceClassification.from_pretrained(path)
        with torch.inference_mode():
            logits = [
                model.score(model.model(torch.tensor([row])).last_hidden_state)[0, -1, 0] for row in responses["tokens"]
            ]
        expected.append([(float(x) - 0.25 * i) / (0.5 * i) for x in logits])
    total = [a + 0.5 * b for a, b in zip(*expected, strict=True)]
    assert max(total) - min(total) > 0.1
    assert responses["reward"] == pytest.approx(total, abs=1e-4)
    assert run.metrics[0]["reward/model_2"] == pytest.approx(sum(expected[1]) / 16, abs=1e-4)
    # The critic starts as the first reward model: the value before the last token is the score of the sequence up to
    # there.
    model = AutoModelForSequenceClassification.from_pretrained(paths[0])
    row, value = responses["tokens"][0], responses["value"][0]
    with torch.inference_mode():
        score = float(model.score(model.model(torch.tensor([row[:-1]])).last_hidden_state)[0, -1, 0])
    assert value[-1] == pytest.approx((score - 0.25) / 0.5, abs=1e-4)
    assert (run.run_dir / "checkpoints" / "step_1" / "critic" / "config.json").is_file()


class RewardServer:
    """A reward server with OpenRLHF's protocol. The reward of a response is its label."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.refuse_first = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(request)
                refused = len(outer.requests) <= outer.refuse_first
                rewards = [float(label) for label in request["labels"]]
                response = {"rewards": rewards, "scores": [r / 8 for r in rewards], "extra_logs": {"seen": rewards}}
                body = json.dumps({} if refused else response).encode()
                self.send_response(503 if refused else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing, because the test counts the requests."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/get_reward"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def servers() -> Iterator[list[RewardServer]]:
    """Two servers, the first of which refuses its first request."""
    both = [RewardServer(), RewardServer()]
    both[0].refuse_first = 1
    yield both
    for server in both:
        server.server.shutdown()
        server.server.server_close()


def test_responses_are_divided_among_reward_servers_and_a_refusal_loses_none(
    servers: list[RewardServer], bytes_policy: Path, tmp_path: Path
) -> None:
    urls = ",".join(server.url for server in servers)
    options = [f"prompt_data={questions(tmp_path / 'q.jsonl')}", "label_key=label", "advantage_estimator=reinforce"]
    options += ["--remote_rm_url", urls, "reward.url_batch_size=2"]
    run = run_here("openrlhf_ppo", tmp_path / "run", f"pretrain={bytes_policy}", *QUICK, *options)
    assert run.code == 0, run.err
    assert "critic/loss" not in run.metrics[0]
    responses = rollouts(run)
    assert responses["reward"] == [float(label) for label in responses["label"]]
    assert responses["score"] == [label / 8 for label in responses["label"]]
    assert run.metrics[0]["reward/seen"] == 3.5
    assert all(server.requests for server in servers)
    requests = [request for server in servers for request in server.requests]
    assert all(set(request) == {"query", "prompts", "labels"} and len(request["query"]) == 2 for request in requests)
    # 16 responses in pairs, one trial request per server, and one repeated request.
    assert len(requests) == 11
    for request in requests:
        assert all(query.startswith(prompt) for query, prompt in zip(request["query"], request["prompts"], strict=True))


def test_an_unreachable_server_is_rejected_with_its_url_before_the_start(bytes_policy: Path, tmp_path: Path) -> None:
    options = [f"prompt_data={questions(tmp_path / 'q.jsonl')}", "advantage_estimator=reinforce"]
    options += ["--remote_rm_url", "http://127.0.0.1:9/get_reward"]
    run = run_here("openrlhf_ppo", tmp_path / "run", f"pretrain={bytes_policy}", *QUICK, *options)
    assert run.code == 2
    line = run.err.strip().splitlines()[-1]
    assert re.search(says("reward.source", "http://127.0.0.1:9/get_reward", "ConnectError"), line)
    assert not run.run_dir.exists()


REWARD_FILE = """
def reward_func(queries, prompts, labels, **kwargs):
    if any(label in {bad} for label in labels):
        raise RuntimeError("cannot judge this")
    return {{"rewards": [float(label) for label in labels]}}
"""


def test_reward_code_that_fails_for_too_many_responses_ends_the_run(bytes_policy: Path, tmp_path: Path) -> None:
    # Two responses to each of eight prompts. Two invalid labels make 4 of 16 responses fail, more than a tenth and more
    # than two.
    (tmp_path / "reward.py").write_text(REWARD_FILE.format(bad="(3, 4)"))
    options = [f"prompt_data={questions(tmp_path / 'q.jsonl')}", "label_key=label", "advantage_estimator=rloo"]
    options += [f"remote_rm_url={tmp_path}/reward.py"]
    run = run_here("openrlhf_ppo", tmp_path / "run", f"pretrain={bytes_policy}", *QUICK, *options)
    assert run.code == 1
    (line,) = run.err.strip().splitlines()
    assert re.search(says("cannot judge this", "3 of 16"), line)  # one failed request ends the run


def test_a_response_without_a_reward_is_reported_counted_and_excluded(bytes_policy: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD_FILE.format(bad="(9,)"))
    rows = questions(tmp_path / "q.jsonl", 16)
    options = ["rollout_batch_size=16", "n_samples_per_prompt=1", "label_key=label", f"prompt_data={rows}"]
    options += [f"remote_rm_url={tmp_path}/reward.py", "reward.workers=2", "reward_clip_range=[-100,100]"]
    run = run_here("openrlhf_ppo", tmp_path / "run", f"pretrain={bytes_policy}", *QUICK, *options)
    assert run.code == 0, run.err
    assert run.metrics[0]["reward/failed"] == 1
    assert re.search(r"response \d+ .*cannot judge this", run.out)
    responses = rollouts(run)
    assert responses["reward"] == [float(label) for label in responses["label"]]
    assert len(responses["label"]) == 15
    assert 9 not in responses["label"]
    failed = pyarrow.parquet.read_table(run.run_dir / "failed" / "step_000001-rewards.parquet")
    assert failed["label"].to_pylist() == [9]


# --- what cannot be


def test_a_nan_loss_stops_the_run_and_saves_its_batch(bytes_policy: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD_FILE.format(bad="()"))
    options = [f"prompt_data={questions(tmp_path / 'q.jsonl', 16)}", "label_key=label", "critic_learning_rate=1e38"]
    options += [f"remote_rm_url={tmp_path}/reward.py", "actor_learning_rate=0"]
    run = run_here("openrlhf_ppo", tmp_path / "run", f"pretrain={bytes_policy}", *QUICK, *options)
    assert run.code == 1
    (line,) = run.err.strip().splitlines()
    assert re.search(says("step 2", "loss"), line)
    (kept,) = re.findall(r"/\S+\.parquet", line)
    assert pyarrow.parquet.read_table(kept).num_rows == 16


@pytest.fixture
def file_of_prompts(tmp_path: Path) -> list[str]:
    """Return the options that a run needs besides a model."""
    (tmp_path / "reward.py").write_text(REWARD_FILE.format(bad="()"))
    return [f"prompt_data={questions(tmp_path / 'q.jsonl')}", f"remote_rm_url={tmp_path}/reward.py", *QUICK]


def refused(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line with which a command ends before the start."""
    capsys.readouterr()  # output of saving a model
    assert main([f"run_dir={tmp_path}/run", *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()
    return error


def test_a_tokenizer_needs_an_end_token_which_also_replaces_a_missing_padding_token(
    file_of_prompts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = write_policy(tmp_path / "endless", byte_tokenizer(eos_token=None))
    error = refused([f"pretrain={endless}", *file_of_prompts], tmp_path, capsys)
    assert "end token" in error
    assert str(endless) in error
    unpadded = write_policy(tmp_path / "unpadded", byte_tokenizer(pad_token=None))
    assert main([f"pretrain={unpadded}", *file_of_prompts, "label_key=label", "--dry_run"]) == 0


@pytest.mark.parametrize(
    ("option", "facts"),
    [
        ("label_key=answer", ["q.jsonl", "'answer'"]),
        ("input_key=text", ["q.jsonl", "'text'"]),
        ("prompt_data=nowhere.jsonl", ["nowhere.jsonl"]),
        ("remote_rm_url=nowhere.py", ["nowhere.py"]),
        ("reward.source=gsm8k remote_rm_url=null", ["''", "number"]),
        ("reward.source=math remote_rm_url=null", ["''", "math"]),
        ("remote_rm_url=http:/x", ["http:/x"]),
        ("prompt_data_probs=0.5", ["probs", 0.5, 1]),
        ("eval_dataset=nowhere.csv", ["nowhere.csv"]),
        ("prompt_split=test", ["test"]),
    ],
)
def test_missing_data_and_reward_files_are_rejected(
    option: str,
    facts: list[object],
    file_of_prompts: list[str],
    bytes_policy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = refused([f"pretrain={bytes_policy}", *file_of_prompts, *option.split()], tmp_path, capsys)
    assert re.search(says(*facts), error)


def test_an_empty_prompt_file_is_rejected(
    bytes_policy: Path, file_of_prompts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    options = [f"pretrain={bytes_policy}", *file_of_prompts, f"prompt_data={tmp_path}/empty.jsonl"]
    assert "empty.jsonl" in refused(options, tmp_path, capsys)


@pytest.mark.parametrize("name", ["nobody/has-this-model", "no/such/folder", "nowhere"])
def test_an_unknown_model_is_rejected(
    name: str, file_of_prompts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused([f"pretrain={name}", *file_of_prompts], tmp_path, capsys)
    assert f"pretrain={name}" in error


@pytest.mark.parametrize(
    ("labels", "tokens", "facts"), [(2, {}, ["rm", 2, "labels"]), (1, {"extra": "<more>"}, ["rm", "vocabulary"])]
)
def test_an_incompatible_reward_model_is_rejected(
    labels: int,
    tokens: dict[str, str],
    facts: list[object],
    bytes_policy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(tokens.values()))
    model = write_reward_model(tmp_path / "rm", 1, tokenizer, num_labels=labels)
    options = [f"pretrain={bytes_policy}", f"prompt_data={questions(tmp_path / 'q.jsonl')}", *QUICK]
    error = refused([*options, f"reward_pretrain={model}"], tmp_path, capsys)
    assert re.search(says(*facts), error)


def test_a_reward_model_without_mean_and_std_cannot_be_normalised(
    bytes_policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_reward_model(tmp_path / "rm", 1)
    options = [f"pretrain={bytes_policy}", f"prompt_data={questions(tmp_path / 'q.jsonl')}", *QUICK]
    options += [f"reward_pretrain={model}", "--normalize_reward"]
    assert re.search(says(model, "mean", "std"), refused(options, tmp_path, capsys))


def test_a_model_in_the_home_folder_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    options = ["pretrain=~/policy", "prompt_data=x.jsonl", "reward_pretrain=~/a, ./b", "critic_pretrain=~/c"]
    config = resolved(read_config(options))
    assert (config.model.path, config.critic.path) == ("/home/me/policy", "/home/me/c")
    assert config.reward_model.paths == ["/home/me/a", "./b"]
