"""Measure the reward model's server with 64 clients for a minute. Each sends a request when the last is answered.

    python scripts/bench_serve.py [--clients 64] [--seconds 60] [--model FOLDER]

Every score must equal that of the same text scored alone, to 1e-5. Without --model the model is an untrained one of 0.4
million parameters with widely spread scores. It prints one JSON object. Exit code 1: a score is wrong or missing, or a
request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from components.batch import Batch  # noqa: E402 (may not be installed)
from components.data.preferences import scored_tokens  # noqa: E402
from components.data.text import TextEncoder, load_tokenizer  # noqa: E402
from components.models.reward_model import RewardModel  # noqa: E402
from components.models.value_model import ValueModel  # noqa: E402
from plugins.demo.tasks import get_task  # noqa: E402
from plugins.demo.tiny_model import task_tokenizer, tiny_model  # noqa: E402

TEXTS = 400
"""Number of different texts."""
MOST_TEXTS = 8
"""Maximum number of texts per request."""


def untrained(folder: str) -> str:
    """Write a reward model of the word task with widely spread scores. Return its folder."""
    tokenizer = task_tokenizer(get_task("word"))
    model = ValueModel(tiny_model(tokenizer, seed=0).model)
    # Scores of a new head are so similar that the score of another text could be within the tolerance.
    model.score.weight.data *= 30
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def scored_alone(folder: str) -> dict[str, float]:
    """Return text -> score, for texts of different lengths scored one by one."""
    rows = get_task("word").pairs(TEXTS // 2, seed=1)
    texts = [" ".join([row["prompt"]] * (1 + i % 4)) + row[key] for i, row in enumerate(rows) for key in list(row)[1:]]
    model = RewardModel(folder)
    encoder = TextEncoder(load_tokenizer(folder))
    batches = [Batch.from_rows({"tokens": [scored_tokens(text, encoder)]}) for text in texts]
    return {text: float(model.score(batch)) for text, batch in zip(texts, batches)}


class Tally:
    """Results of all clients."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.texts = 0
        self.errors: list[str] = []
        self.largest_difference = 0.0


async def client(number: int, url: str, expected: dict[str, float], until: float, tally: Tally) -> None:
    """Send requests until the time `until`."""
    draw = random.Random(number)
    texts = list(expected)
    # trust_env=False: a proxy of the environment cannot reach the loopback.
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        while time.monotonic() < until:
            query = draw.choices(texts, k=draw.randint(1, MOST_TEXTS))
            began = time.monotonic()
            try:
                answer = await http.post(url, json={"query": query})
                rewards = answer.raise_for_status().json()["rewards"]
            except httpx.HTTPError as error:
                tally.errors.append(f"{type(error).__name__}: {error}")
                continue
            tally.seconds.append(time.monotonic() - began)
            tally.texts += len(query)
            if len(rewards) != len(query):
                tally.errors.append(f"{len(rewards)} rewards for {len(query)} texts")
            differences = (abs(reward - expected[text]) for reward, text in zip(rewards, query))
            tally.largest_difference = max(tally.largest_difference, *differences)


async def load(clients: int, seconds: float, url: str, expected: dict[str, float]) -> Tally:
    """Run all clients concurrently."""
    tally = Tally()
    until = time.monotonic() + seconds
    await asyncio.gather(*(client(number, url, expected, until, tally) for number in range(clients)))
    return tally


def main() -> int:
    """Start the server, run the clients, stop it, and print the results. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or untrained(scratch)
        expected = scored_alone(folder)
        command = [sys.executable, "-P", "-m", "recipes.reward_model.serve", f"model.path={folder}"]
        flags = ["--port", "0", "--max_text_tokens", "512"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True, env=environment) as server:
            assert server.stdout is not None
            # The address is printed once the model is loaded. With port 0 the system chooses a free port.
            start = server.stdout.readline()
            print(start, end="")
            url = start.split(" at ")[-1].split(",")[0]
            tally = asyncio.run(load(options.clients, options.seconds, url, expected))
            metrics = httpx.get(url.replace("get_reward", "metrics"), trust_env=False).text
            server.terminate()
            server.communicate(timeout=90)
    counted = "troupe_reward_pass_texts_count"
    passes = next(float(metric.split()[1]) for metric in metrics.splitlines() if metric.startswith(counted))
    times = sorted(tally.seconds)
    results = {
        "requests": len(times),
        "errors": len(tally.errors),
        "texts_per_second": round(tally.texts / options.seconds, 1),
        "texts_per_pass": round(tally.texts / passes, 1),
        "p50_ms": round(1e3 * times[len(times) // 2], 1),
        "p99_ms": round(1e3 * times[int(len(times) * 0.99)], 1),
        "largest_difference": tally.largest_difference,
        "server_exit_code": server.returncode,
    }
    print(json.dumps(results), *tally.errors[:3], sep="\n")
    return int(bool(tally.errors) or tally.largest_difference > 1e-5 or server.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
