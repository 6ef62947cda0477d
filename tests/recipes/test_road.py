"""The files that a batch passes through in one step of grpo: a trace, compared with the list in docs/architecture.md.

A file is on the list if one of its functions is called with prompts, rollouts or experience (a Batch), or with
published weights (a WeightHandle), between the first prompt of a step and its `end_step`.
"""

import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from local_runs import run_here
from recipe_runs import ROOT

from components.batch import Batch
from components.weights.publisher import WeightHandle
from training.run.policy_run import PolicyRun

pytestmark = pytest.mark.full

PAGE = ROOT / "docs" / "architecture.md"
LAYERS = ("core", "components", "agents", "training", "recipes")
"""Plug-ins are left out, as the values of options choose them."""
MOST_FILES = 30
MOST_ENTRIES = 3
"""Maximum number of methods of a file in training/run that the recipe calls in a step, without `OPENING`."""
OPENING = {"queue", "generating", "__iter__"}
OPTIONS = (
    "data.path=task:sort",
    "data.max_samples=24",
    "prompts_per_step=8",
    "samples_per_prompt=4",
    "rollout.max_new_tokens=8",
    "train.mini_batch_size=32",
    "train.learning_rate=3e-4",
    "evaluation.at_start=false",
    "checkpoint.every=-1",
)


def carries(value: Any, depth: int = 0) -> bool:
    """True if an argument is a batch or published weights, or holds one."""
    if isinstance(value, Batch | WeightHandle):
        return True
    items: Iterable[Any] = ()
    if isinstance(value, list | tuple):
        items = value
    elif isinstance(value, dict):
        items = value.values()
    return depth < 3 and any(carries(item, depth + 1) for item in list(items)[:8])


def file_of(frame: FrameType | None) -> str:
    """Path of a frame's file in the project; empty for other files."""
    path = "" if frame is None else frame.f_code.co_filename
    name = path.removeprefix(f"{ROOT}/")
    return name if name != path and name.split("/")[0] in LAYERS else ""


def arguments(frame: FrameType) -> list[Any]:
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
    return [frame.f_locals[name] for name in code.co_varnames[:count] if name in frame.f_locals]


class Trace:
    """Records the calls of one training step."""

    def __init__(self) -> None:
        self.is_on = False
        self.road: dict[str, None] = {}
        """Files that a batch or weights pass through, in the order of the first call."""
        self.files: set[str] = set()
        """All files of the project with a function that was called."""
        self.entries: Counter[tuple[str, str]] = Counter()
        """Calls by the recipe as (file in training/run, method), without properties."""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not self.is_on or not (name := file_of(frame)):
            return
        self.files.add(name)
        if carries(arguments(frame)):
            self.road.setdefault(name)
        caller = file_of(frame.f_back)
        if name.startswith("training/run/") and caller.startswith("recipes/"):
            owner = type(frame.f_locals.get("self"))
            if not isinstance(getattr(owner, frame.f_code.co_name, None), property):
                self.entries[name, frame.f_code.co_name] += 1


@contextmanager
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trace]:
    """Trace the second step of a run, from its first prompt to `end_step`."""
    trace = Trace()
    end_step = PolicyRun.end_step

    def end_traced(self: PolicyRun, *args: Any, **named: Any) -> None:
        trace.is_on = False
        end_step(self, *args, **named)
        trace.is_on = self.step == 1

    monkeypatch.setattr(PolicyRun, "end_step", end_traced)
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        yield trace
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def listed() -> list[str]:
    """The files that the page lists, in order."""
    section = PAGE.read_text(encoding="utf-8").split("## One step, file by file", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.MULTILINE)


def record(folder: Path) -> None:
    """Trace a run in `folder/run`, and write the trace to `folder/trace.json`."""
    with pytest.MonkeyPatch.context() as patch, traced(patch) as trace:
        run = run_here("grpo", folder / "run", *OPTIONS)
    assert run.code == 0, run.err
    entries = [[*place, count] for place, count in trace.entries.items()]
    content = {"road": list(trace.road), "files": sorted(trace.files), "entries": entries}
    (folder / "trace.json").write_text(json.dumps(content), encoding="utf-8")


def test_the_page_lists_the_files_of_a_step_in_order(tmp_path: Path) -> None:
    # In a separate process. With a profile function, Python 3.11 repeats the first instruction of each call forever if
    # an exception was sent to a blocked thread, as tests of hanging environments do.
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    code = f"from pathlib import Path; import test_road; test_road.record(Path({str(tmp_path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    trace = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    road = trace["road"]
    assert listed() == road, "\n".join(f"{i}. `{name}`" for i, name in enumerate(road, 1))
    assert len(road) <= MOST_FILES
    (total,) = re.findall(r"(\d+) files of the project run in such a step", PAGE.read_text(encoding="utf-8"))
    assert len(trace["files"]) <= int(total), trace["files"]
    entries = Counter[str]({"training/run/policy_run.py": 1})  # the trace ends with `end_step`
    for name, method, count in trace["entries"]:
        entries[name] += count * (method not in OPENING)
    assert {name: count for name, count in entries.items() if count > MOST_ENTRIES} == {}, trace["entries"]
