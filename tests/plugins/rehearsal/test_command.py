"""Each planted fault of a cluster's command is found by a rehearsal before a process of the run starts, and named."""

import re
from pathlib import Path
from typing import Any

import pytest

from plugins.rehearsal.command import cluster, new_folder
from recipes.grpo.config import GRPOConfig
from recipes.grpo.main import main
from recipes.openrlhf_ppo.main import main as openrlhf_main
from tests.plugins.rehearsal.commands import REWARD, TEMPLATE, rows, words, write_inputs
from tests.recipes.tiny_models import byte_tokenizer, write_policy
from training.launch.machines import assumed
from training.options.config import CommandLine

Captured = pytest.CaptureFixture[str]


Parts = dict[str, tuple[str, str]]


def rehearsed(capsys: Captured, options: dict[str, str], run: Any = main) -> tuple[int, Parts, str]:
    """Rehearse a command. Return the exit code, (verdict, text) by part, and stderr."""
    code = run(words(options))
    out, err = capsys.readouterr()
    parts: Parts = {}
    name = ""
    for line in out.splitlines():
        if match := re.match(r"(\S.{14}) (ok|look|FAIL|-) +(.*)", line):
            name = match[1].strip()
            parts[name] = match[2], match[3]
            assert len(line) <= 80, line
        elif name and line.startswith(" " * 20):
            parts[name] = parts[name][0], f"{parts[name][1]} {line.strip()}"
        elif "GO" in line:
            parts["result"] = "", line
    return code, parts, err


def test_a_label_that_is_none_in_row_700_is_found(tmp_path: Path, capsys: Captured) -> None:
    data = rows()
    data[700]["answer"] = None
    code, parts, _ = rehearsed(capsys, write_inputs(tmp_path, data))
    assert code == 1
    verdict, text = parts["inputs"]
    assert verdict == "FAIL"
    assert "row 700: the column 'answer' is null or absent" in text
    assert parts["result"][1].startswith("NO-GO: inputs")
    assert parts["memory"][1].startswith("as planned: ")
    assert not (tmp_path / "run").exists()
    assert [path.name for path in (tmp_path / "run-rehearsal-1").iterdir()] == ["rehearsal.txt"]


def test_template_reward_and_key_are_judged_together(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The template writes the first message only, and so drops the answer.
    dropping = TEMPLATE.replace("messages %}", "messages[:1] %}")
    tokenizer = byte_tokenizer(chat_template=dropping)
    slow = REWARD.replace("    return", "    import time\n    time.sleep(2 * len(queries))\n    return")
    model = write_policy(tmp_path / "odd", tokenizer, num_attention_heads=8, num_key_value_heads=2)
    options = write_inputs(tmp_path, reward=slow, model=str(model)) | {"log.wandb": "true"}
    monkeypatch.setenv("WANDB_API_KEY", "not-a-key")
    code, parts, _ = rehearsed(capsys, options)
    assert code == 1
    assert "the template drops the response: the assistant's text '1' is missing" in parts["template"][1]
    assert "is too slow: 2.0 s a response; 1024 responses take 2,0" in parts["reward"][1]
    assert "the key of W&B has 9 characters" in parts["W&B key"][1]
    assert {parts[name][0] for name in ("template", "reward", "W&B key")} == {"FAIL"}
    assert parts["tokenizer"][0] == "ok"


def test_a_tokenizer_with_another_vocabulary_is_found(tmp_path: Path, capsys: Captured) -> None:
    options = write_inputs(tmp_path)
    other = byte_tokenizer()
    other.add_tokens(["another"])
    other.save_pretrained(tmp_path / "other")
    write_policy(tmp_path / "wide", num_attention_heads=8, num_key_value_heads=2, vocab_size=300)
    options |= {"model.path": f"{tmp_path}/wide", "model.tokenizer_path": f"{tmp_path}/other"}
    code, parts, _ = rehearsed(capsys, options)
    assert code == 1
    assert "has another vocabulary than" in parts["tokenizer"][1]
    assert "260 and 259 tokens" in parts["tokenizer"][1]


def test_a_package_that_reward_workers_lack_is_found(tmp_path: Path, capsys: Captured) -> None:
    reward = REWARD.replace("    return", "    import package_of_the_cluster\n    return")
    code, parts, _ = rehearsed(capsys, write_inputs(tmp_path, reward=reward))
    assert code == 1
    assert "No module named 'package_of_the_cluster'" in parts["inputs"][1]


def test_refused_options_are_refused_as_by_the_run(tmp_path: Path, capsys: Captured) -> None:
    options = write_inputs(tmp_path)
    # 3 does not divide 8 heads; nothing else is wrong with it.
    for change in ({"parallel.tensor": "3", "placement.nodes": "3"}, {"train.learning_rate": "-1"}):
        code, parts, err = rehearsed(capsys, options | change)
        assert (code, parts) == (2, {})
        main([*words(options | change | {"rehearse": "false", "dry_run": "true", "assume_devices": "8x3x80GB"})])
        assert err.strip().splitlines()[-1] in capsys.readouterr().err
    assert not list(tmp_path.glob("run-rehearsal*"))
    code, _, err = rehearsed(capsys, options | {"rehearse": "perhaps"})
    assert code == 2
    assert "rehearse" in err


def test_a_flag_of_openrlhf_without_effect_is_named(tmp_path: Path, capsys: Captured) -> None:
    ours = write_inputs(tmp_path, [{"question": "1?", "answer": None}])
    options = {
        "--pretrain": ours["model.path"],
        "--prompt_data": ours["data.path"],
        "--input_key": "question",
        "--label_key": "answer",
        "--remote_rm_url": ours["reward.source"],
        "--actor_num_nodes": "4",
        "--actor_num_gpus_per_node": "8",
        "--ref_num_nodes": "4",
        "--ref_num_gpus_per_node": "8",
        "--vllm_num_engines": "16",
        "--vllm_tensor_parallel_size": "2",
        "--colocate_all_models": "true",
        "--advantage_estimator": "rloo",
        "--n_samples_per_prompt": "8",
        "--init_kl_coef": "0.001",
        "--skip_node_check": "true",
        "run_dir": ours["run_dir"],
        "rehearse": "true",
    }
    code, parts, err = rehearsed(capsys, options, openrlhf_main)
    assert code == 1, err
    verdict, text = parts["command"]
    assert verdict == "look"
    assert "no effect of" in text
    assert "skip_node_check" in text


@pytest.mark.parametrize(
    ("arguments", "machines"),
    [
        (["placement.nodes=4", "placement.devices_per_node=4"], "4 machines with 4 GPUs of 80 GB each"),
        ([], "as many machines as it asks for, with 8 GPUs of 80 GB each"),
        (["assume_devices=2x3x141GB"], "3 machines with 2 GPUs of 141 GB each"),
    ],
)
def test_the_cluster_is_that_of_the_command(arguments: list[str], machines: str) -> None:
    with cluster(CommandLine(GRPOConfig, arguments)):
        assert str(assumed()) == machines
    assert assumed() is None


def test_each_rehearsal_has_a_folder_of_its_own(tmp_path: Path) -> None:
    names = [new_folder(tmp_path / "runs" / "a").name for _ in range(2)]
    assert names == ["a-rehearsal-1", "a-rehearsal-2"]
