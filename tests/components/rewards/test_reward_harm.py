"""Harmful reward code: the run gets its rewards, or an error that names the responses without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from components.rewards.base import RewardSettings
from components.rewards.errors import RewardError
from components.rewards.opening import open_reward

PROJECT = Path(__file__).resolve().parents[3]
WORTH = "return {'rewards': [float(label) for label in labels]}"


def reward_file(folder: Path, body: str) -> str:
    indented = "".join(f"    {line}\n" for line in body.splitlines())
    path = folder / "reward.py"
    path.write_text(f"import builtins, os, sys, time\ndef reward_func(queries, prompts, labels):\n{indented}")
    return str(path)


def rewarded(spec: str, count: int = 4) -> list[float]:
    texts = [str(place) for place in range(count)]
    with open_reward(spec, RewardSettings(timeout_s=60)) as reward:
        return reward(texts, [""] * count, texts).reward_B.tolist()


@pytest.mark.parametrize(
    "patch",
    [
        "builtins.print = None",
        "builtins.open = None",
        "builtins.len = lambda _: 1",
        "builtins.isinstance = lambda *_: False",
        "builtins.zip = lambda *_, **__: iter(())",
        "builtins.range = lambda *_: iter(())",
        "sys.exit = os._exit = lambda *_: None",
        "time.sleep = time.monotonic = None",
        "sys.stdout.close()",
        "os.close(0)",
        "os.close(2)",
        "os.chdir('/'); os.environ.clear()",
        "sys.setrecursionlimit(60)",
        "import socket; socket.socket.sendall = socket.socket.recv_into = None",
    ],
)
def test_reward_code_that_patches_builtins_gives_correct_rewards_or_none(tmp_path: Path, patch: str) -> None:
    try:
        actual = rewarded(reward_file(tmp_path, f"{patch}\n{WORTH}"))
    except RewardError:
        return
    assert actual == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.nightly
def test_reward_code_with_huge_memory_or_output_does_not_change_other_rewards(tmp_path: Path) -> None:
    large = "held = bytearray(10 * 2**30)\nheld[::4096] = b'x' * len(held[::4096])\ndel held\n"
    lines = "for _ in range(2**10):\n    sys.stdout.write('x' * (2**20 - 1) + '\\n')\n"
    program = f"""
import sys
from components.rewards.opening import open_reward
from components.rewards.base import RewardSettings
with open_reward({reward_file(tmp_path, large + lines + WORTH)!r}, RewardSettings(timeout_s=120)) as reward:
    print(reward(["1", "2"], ["", ""], ["1", "2"]).reward_B.tolist())
"""
    # Its output is shown with the output of the run.
    with (tmp_path / "printed").open("wb") as printed:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONPATH": str(PROJECT)},
            stdout=subprocess.PIPE,
            stderr=printed,
            timeout=300,
        )
    assert done.stdout == b"[1.0, 2.0]\n"
    assert done.returncode == 0
    assert (tmp_path / "printed").stat().st_size >= 2**30
