"""The agents of docs/agents.md run episodes, and the recipes accept its commands."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from agents.options import AgentOptions
from agents.runner import open_runner
from components.batch import Batch
from components.data.text import load_tokenizer
from components.generate.config import HFRolloutConfig, SamplingConfig
from components.rewards.opening import open_reward
from plugins.demo.tiny_model import learnt_tokenizer, tiny_model

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
FILES = {match[1]: match[0] for match in re.findall(r"```python\n(# (\S+\.py)\n.*?)```", PAGE, re.DOTALL)}
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files of the page to a folder."""
    folder = tmp_path_factory.mktemp("page")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a tiny untrained model with a chat template."""
    tokenizer = learnt_tokenizer(["how much do two apples cost? [user] [assistant] [system] [tool]"] * 8, 300)
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("policy")
    # In this tokenizer each byte is a token, and tool descriptions are long.
    tiny_model(tokenizer, seed=0, hidden=32, layers=1, max_positions=4096).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_page_has_a_file_for_each_kind_of_agent() -> None:
    assert list(FILES) == ["my_reward.py", "my_agent.py", "my_tools.py", "my_client.py"]
    assert len(COMMANDS) >= 12


@pytest.mark.parametrize("name", ["my_agent.py", "my_tools.py", "my_client.py"])
def test_the_agents_of_the_page_run_episodes(name: str, folder: Path, policy: Path) -> None:
    agent = AgentOptions(func_path=str(folder / name), max_turns=3)
    runner = open_runner(str(policy), HFRolloutConfig(), agent, lambda: load_tokenizer(policy))
    tokens = load_tokenizer(policy)("how much do two apples cost?")["input_ids"]
    ids = {"prompt_id": torch.tensor([0, 0, 1]), "sample_id": torch.tensor([0, 1, 0])}
    texts = {"prompt": ["how much do two apples cost?"] * 3, "label": ["1.0"] * 3}
    prompts = Batch.from_rows({"tokens": [tokens] * 3}, per_sequence=ids, objects=texts)
    batch = runner.generate(prompts, SamplingConfig(max_new_tokens=8, seed=1))
    runner.close()
    assert batch["error"] == ["", "", ""]
    assert set(batch["status"]) <= {"finished", "truncated"}
    turns = {"my_tools.py": 1}.get(name, 3)
    if "client" in name:
        turns = 2
    assert batch["num_turns"].tolist() == [turns] * 3


def test_the_reward_function_of_the_page_gives_rewards(folder: Path) -> None:
    with open_reward(str(folder / "my_reward.py")) as reward:
        output = reward(["ab> ab", "ab> c"], ["ab>", "ab>"], ["ab", "ab"])
    assert output.reward_B.tolist() == [1, 0]


def write_rows(folder: Path, path: str, options: dict[str, str]) -> None:
    """Write the data file that a command names, with the columns that it names."""
    if not path.endswith(".jsonl"):
        return
    row = {options.get("data.prompt_key", "input"): "1 + 1?", options.get("data.label_key", "label"): "#### 2"}
    (folder / path).parent.mkdir(exist_ok=True)
    (folder / path).write_text(f"{json.dumps(row)}\n" * 256)


@pytest.mark.parametrize("line", COMMANDS)
def test_the_recipes_accept_the_commands_of_the_page(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    words = shlex.split(line)
    if "test.sh" in words[1]:
        assert (Path(__file__).parents[2] / words[2]).is_dir()
        return
    recipe = words[1].split("/")[1]
    named = dict(word.split("=", 1) for word in words[2:] if "=" in word)
    write_rows(folder, named.get("data.path", ""), named)
    code = importlib.import_module(f"recipes.{recipe}.main").main(["--dry_run", *words[2:]])
    assert code == 0, capsys.readouterr().err
