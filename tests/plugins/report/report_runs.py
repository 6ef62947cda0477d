"""Folders of runs for the tests of the report, written without a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models

from components.batch import Batch

EVIL = "<script>window.hacked=1</script><img src=x onerror='window.hacked=1'></script><!-- \u2028 ]]>"
"""Text with which a policy could attack a reader of the page."""

WORDS = ["<eos>", "a", "b", "c", ">", EVIL, "\n"]


def lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<eos>"))
    words.decoder = decoders.Fuse()  # no spaces between words
    words.save(str(folder / "tokenizer.json"))


def rollouts(path: Path, prompts: int = 3, evil: bool = False) -> None:
    """Write two responses to each prompt, with rewards 0 and 1, whose last token belongs to another turn."""
    rows = [[1 + p % 3, 4, 5 if evil else 2, 3 - i, 6, 0] for p in range(prompts) for i in range(2)]
    responses = [r for _ in range(prompts) for r in (0.0, 1.0)]
    batch = Batch.from_rows(
        {
            "tokens": rows,
            "action_mask": [[False, False, True, True, False, True] for _ in rows],
            "rollout_logprob": [[0.0, 0.0, -0.5, -2.0, 0.0, -0.25] for _ in rows],
            "logprob": [[-9.0, -9.0, -0.5, -2.125, -9.0, -0.25] for _ in rows],
            "advantage": [[0.0, 0.0, *[2 * r - 1] * 2, 0.0, 2 * r - 1] for r in responses],
        },
        {
            "prompt_id": [100 + p for p in range(prompts) for _ in range(2)],
            "sample_id": [0, 1] * prompts,
            "reward": responses,
        },
        {
            "prompt": [EVIL if evil else f"{WORDS[1 + p % 3]}>" for p in range(prompts) for _ in range(2)],
            "label": [EVIL if evil else "b" for _ in rows],
            "status": ["finished"] * len(rows),
        },
    )
    batch.save(path)


def events(steps: int) -> list[dict[str, Any]]:
    """Return events of steps of 10 s: 4 s of generation, 6 s of training. Rank 1 of ROLLOUT works half as long as rank
    0.
    """
    records: list[dict[str, Any]] = [{"event": "job", "kind": "start", "time": 1000.0, "process": "", "text": "1"}]
    for step in range(1, steps + 1):
        t = 1000.0 + 10 * step
        records += [
            {"event": "call", "role": "ROLLOUT", "rank": 0, "method": "generate", "began": t, "seconds": 4.0},
            {"event": "call", "role": "ROLLOUT", "rank": 1, "method": "generate", "began": t, "seconds": 2.0},
            {"event": "phase", "phase": "generate", "began": t, "seconds": 4.0},
            {"event": "call", "role": "ACTOR", "rank": 0, "method": "update", "began": t + 4, "seconds": 6.0},
            {"event": "phase", "phase": "train", "began": t + 4, "seconds": 6.0},
            {"event": "step", "step": step, "steps": steps, "time": t + 10},
            {"event": "memory", "time": t + 10, "bytes": {"ACTOR": 2_000_000_000, "ROLLOUT": 1_000_000_000}},
        ]
    return records


def write_run(folder: Path, steps: int = 6, evil: bool = False, learning_rate: float = 0.1) -> Path:
    """Write all files of a run whose reward/score is step / steps."""
    metrics = [
        {"reward/score": s / steps, "actor/entropy": 1 / s, "timing_s/step": 10.0, "step": s, "time": 1000.0 + 10 * s}
        for s in range(1, steps + 1)
    ]
    metrics.insert(0, {"eval/score": 0.25, "step": 0, "time": metrics[0]["time"]})
    metrics[-1] |= {"eval/score": 0.75, EVIL if evil else "mine/own": 1.0}
    lines(folder / "metrics.jsonl", metrics)
    alarm = {
        "alarm": "kl_blow_up",
        "step": 2,
        "time": 1030.0,
        "text": "too far" + EVIL * evil,
        "advice": "less" + EVIL * evil,
    }
    lines(folder / "events.jsonl", [*events(steps), {"event": "alarm", **alarm}])
    score = {"start": 0.25, "end": 0.75, "examples": 2048}
    summary = {
        "recipe": "grpo",
        "status": "finished",
        "seed": 1,
        "score": score,
        "attempts": 1,
        "error": EVIL * evil or None,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    changed = {"train.learning_rate": learning_rate, "reward.source": EVIL if evil else "mine.py"}
    (folder / "plan.json").write_text(json.dumps({"changed": changed}))
    (folder / "config.yaml").write_text(
        json.dumps({"run_dir": str(folder), "train": {"learning_rate": learning_rate}, "seed": 1, "name": EVIL * evil})
    )
    tokenizer(folder / "tokenizer")
    for step in range(1, steps + 1):
        rollouts(folder / f"rollouts/step_{step:06d}.parquet", evil=evil)
    return folder
