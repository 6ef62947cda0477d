"""The headings of docs/troubleshooting.md are messages that the project prints, and a dozen of them are
provoked here.
"""

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.grpo import main as grpo
from tests.docs_pages import ROOT, text_of

PAGE = "docs/troubleshooting.md"
HEADINGS: list[str] = re.findall(r"^### `(.*)`$", text_of(PAGE), re.MULTILINE)
HOLE = "\0"


@functools.cache
def printed() -> str:
    """Return every text of the project's Python code and shell scripts, with a placeholder for each inserted value."""
    texts = []
    for folder in ("core", "components", "agents", "training", "plugins", "recipes", "scripts"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    texts.append("".join(str(v.value) if isinstance(v, ast.Constant) else HOLE for v in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
        for file in sorted((ROOT / folder).rglob("*.sh")):
            text = re.sub(r'" \\\n\s*"', " ", file.read_text(encoding="utf-8"))
            texts += re.sub(r"\$\(.*?\)\"|\$\{[^}]*\}|\$\w+|\\\"", HOLE, text).splitlines()
    return "\n".join(texts)


@pytest.mark.parametrize("heading", HEADINGS)
def test_every_heading_is_a_message_of_the_code(heading: str) -> None:
    # Some messages are composed of several texts, so each part is searched separately.
    parts = [part.strip() for part in heading.split("...")]
    assert max(map(len, parts)) >= 10, "too little to be told from other messages"
    gone = [part for part in parts if part not in printed()]
    assert not gone, f"no text of the code has {gone}; see what became of the message"


def explained(message: str) -> list[str]:
    """Headings for the most common problems."""
    return [h for h in HEADINGS if re.search(".*?".join(map(re.escape, h.split("..."))), message, re.DOTALL)]


HUGE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 65536,
    "intermediate_size": 262144,
    "num_hidden_layers": 500,
    "num_attention_heads": 512,
    "num_key_value_heads": 512,
    "vocab_size": 128000,
    "max_position_embeddings": 8192,
}
"""A model that is too large for any machine."""
BROUGHT_ABOUT = {
    "train.lr=1e-6": "unknown option",
    "seed = 7": "cannot read",
    "train.mini_batch_size=7": "train.mini_batch_size=...",
    "asynchronous.enabled=true": "asynchronous.enabled, but",
    "model.path=./empty data.path=task:sort": "there is no model",
    "model.path=nobody/nothing data.path=task:sort": "it is no folder here",
    "data.path=nobody/nothing reward.source=sort": "there is no file or folder",
    "data.path=rows.jsonl reward.source=sort": "the column",
    "data.path=rows.jsonl": "data.path=... names no task",
    "data.max_samples=3": "... gives ... prompts",
    "reward.source=reward.py": "reward file ... does not define",
    "reward.source=reward.py:score": "...: called with the first row",
    "model.path=./huge data.path=task:sort": "it cannot fit",
    "rollout.engine=vllm rollout.temperature=3": "the rollout engine ... cannot be used",
    "run_dir=taken": "... is writing to run_dir=",
    "run_dir=old resume=none": "run_dir=... already holds a run",
    "run_dir=new resume=./nowhere": "resume=...: there is no checkpoint",
}
"""Options of grpo, and the beginning of the heading that explains the resulting message."""


@pytest.mark.parametrize("options", BROUGHT_ABOUT)
def test_a_wrong_option_ends_with_a_message_that_the_page_explains(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "taken", "old"):
        (tmp_path / folder).mkdir()
    (tmp_path / "huge").mkdir()
    (tmp_path / "huge/config.json").write_text(json.dumps(HUGE))
    (tmp_path / "old/metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "rows.jsonl").write_text('{"question": "ba>", "answer": "ab"}\n' * 100)
    (tmp_path / "reward.py").write_text("def score(answer, label): ...\ndef other(): ...\n")
    code = "import sys; from training.tracking import open_run_folder; open_run_folder(sys.argv[1])"
    command = [sys.executable, "-c", f"{code}; print(flush=True); sys.stdin.read()", str(tmp_path / "taken")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline()
        assert grpo.main([f"run_dir={tmp_path}/run", *options.split()]) == 2
        holder.communicate()
    said = capsys.readouterr().err
    (heading_of,) = explained(said)
    assert heading_of.startswith(BROUGHT_ABOUT[options]), said


def test_the_page_explains_the_refusals_of_run_sh(tmp_path: Path) -> None:
    (tmp_path / "my-algo").mkdir()
    folder, at_home = tmp_path / "my-algo", {"TROUPE_HOME": str(ROOT)}
    for file in ("run.sh", "main.py"):
        shutil.copy(ROOT / "recipes/grpo" / file, folder)
    expected = {
        "the folder ... is to be imported": at_home,
        "no troupe project at": {"TROUPE_HOME": str(tmp_path)},
    }
    shutil.copytree(folder, tmp_path / "my_algo")
    for beginning, env in expected.items():
        done = refused(folder, env)
        (heading_of,) = explained(done)
        assert heading_of.startswith(beginning), done
    (heading_of,) = explained(refused(tmp_path / "my_algo", at_home | {"TROUPE_PYTHON": "/nowhere/python"}))
    assert heading_of.startswith("TROUPE_PYTHON=...")


def refused(folder: Path, env: dict[str, str]) -> str:
    """Return the message of run.sh in a folder in which it does not start."""
    done = subprocess.run(
        ["bash", str(folder / "run.sh")], env=os.environ | env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 2, done.stderr
    return done.stderr
