"""Build a report: the data of runs in an HTML page that loads no other file."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plugins.report import gather
from plugins.report.gather import Events, Limits
from plugins.report.program import RUN_FILES
from plugins.report.samples import read_rollouts
from training.tracking.run_folder import is_written
from training.tracking.serialization import duration, json_object, write_whole

MOST_BYTES = 1_900_000
MAX_DIFFERENCES = 40
ASSETS = Path(__file__).parent / "assets"
STYLES = ("uPlot.min.css", "style.css")
SCRIPTS = ("uPlot.min.js", "data.js", "curves.js", "timeline.js", "bounds.js", "rollouts.js", "page.js")
_ENDINGS = {"finished": "finished", "failed": "failed", "stopped": "was stopped"}
"""Final status of a run -> verb of the sentence about it."""


def write_report(run_dirs: Sequence[Path], out: Path) -> int:
    """Write the report of some runs. Return its size in bytes.

    Raises:
        ValueError: a folder has no run, or `out` is not a regular file. The message names it.
        OSError: a file cannot be read, or the report cannot be written.
    """
    if out.exists() and not out.is_file():
        # The new file replaces the old one, which would destroy a device such as /dev/null.
        raise ValueError(f"{out} is no file; name another one with --out")
    page = build_page(run_dirs)
    write_whole(out, page)
    return len(page.encode())


def build_page(run_dirs: Sequence[Path], limits: Limits | None = None) -> str:
    """Return the report as HTML of at most `MOST_BYTES` bytes. Data that does not fit is thinned out."""
    for run_dir in run_dirs:
        if not any((run_dir / name).is_file() for name in RUN_FILES):
            raise ValueError(f"{run_dir} holds no run (none of {', '.join(RUN_FILES)}); name the folder of a run")
    limits = limits or Limits()
    # Text of user code has no limit, so the size is known only after rendering.
    while True:
        page = _render(collect(run_dirs, limits))
        if len(page.encode()) <= MOST_BYTES or limits.tokens < 1000:
            return page
        limits = limits.divided(2)


def collect(run_dirs: Sequence[Path], limits: Limits) -> dict[str, Any]:
    """Return all data of a page."""
    runs = [_run(run_dir, limits.divided(len(run_dirs))) for run_dir in run_dirs]
    names = list(dict.fromkeys(name for run in runs for name in run["curves"]))
    differs = differences(run_dirs) if len(runs) > 1 else None
    metrics = gather.describe_metrics(names)
    return {"made": time.strftime("%Y-%m-%d %H:%M"), "runs": runs, "metrics": metrics, "differs": differs}


def _run(run_dir: Path, limits: Limits) -> dict[str, Any]:
    summary = json_object(run_dir / "summary.json")
    plan = json_object(run_dir / "plan.json")
    events = gather.read_events(run_dir / "events.jsonl")
    curves = gather.read_curves(run_dir / "metrics.jsonl")
    last = max((int(curve.x[-1]) for curve in curves.values() if curve.x), default=0)
    status = status_of(summary, run_dir)
    changed = sorted(gather.shown_options(plan["changed"]).items()) if "changed" in plan else None
    return {
        "name": run_dir.resolve().name,
        "recipe": str(summary.get("recipe") or ""),
        "status": status,
        "outcome": outcome(summary, status, last, events),
        "error": str(summary.get("error") or ""),
        "facts": facts(summary, last, events),
        "alarms": events.alarms,
        "jobs": [job for job in events.jobs if job["kind"] not in ("start", "stop", "end")][-50:],
        "changed": changed,
        "curves": gather.pack_curves(curves, limits.points),
        "left_out": max(0, len(curves) - gather.MAX_CURVES),
        "timeline": gather.pack_timeline(events, limits.bars),
        "memory": gather.pack_memory(events),
        "rollouts": read_rollouts(run_dir, limits.tokens),
    }


def status_of(summary: Mapping[str, Any], run_dir: Path) -> str:
    """Return the status of a run: finished, failed, stopped, running, or "cut off" if it ended without a summary."""
    status = summary.get("status")
    if status in _ENDINGS:
        return str(status)
    return "running" if is_written(run_dir) else "cut off"


def outcome(summary: Mapping[str, Any], status: str, last: int, events: Events) -> str:
    """Return a few sentences about the status and the result of a run."""
    recipe = summary.get("recipe") or "The run"
    steps = "1 step" if last == 1 else f"{last} steps"
    if events.total and events.total != last:
        steps = f"step {last} of {events.total}"
    verb = _ENDINGS.get(status, "was cut off")
    if status == "running":
        verb = "is running; so far"
    elif status != "finished":
        verb += " after"
    text = f"{recipe} {verb} {steps}"
    if events.end:
        text += f" in {duration(_run_seconds(summary, events))}"
    text += "." + _score_sentence(summary.get("score") or {})
    starts = summary.get("attempts") or 1
    if starts > 1:
        text += f" Its processes were started {starts} times."
    if resumed := summary.get("resumed_from"):
        text += f" It was resumed after step {resumed}."
    return text


def _run_seconds(summary: Mapping[str, Any], events: Events) -> float:
    """Return the seconds since the command was entered, or since the first event if that time is not known."""
    first = summary.get("seconds", {}).get("to_first_step")
    is_resumed = summary.get("resumed_from") or (summary.get("attempts") or 1) > 1
    if first is None or is_resumed or not events.steps or events.steps[0][0] != 1:
        return events.end
    return max(events.end, first + events.end - events.steps[0][1])


def _score_sentence(score: Mapping[str, Any]) -> str:
    """Return a sentence about the held-out score at the start and at the end, or an empty string."""
    sampled = _score_change(score.get("start"), score.get("end"))
    if not sampled:
        return ""
    sentence = f" The held-out score {sampled}"
    if score.get("examples"):
        sentence += f" ({score['examples']:,} examples)"
    if greedy := _score_change(score.get("start_greedy"), score.get("end_greedy")):
        sentence += f"; with greedy decoding it {greedy}"
    return sentence + "."


def _score_change(start: float | None, end: float | None) -> str:
    if end is None:
        return "" if start is None else f"began at {start:.3f}"
    return f"ended at {end:.3f}" if start is None else f"went from {start:.3f} to {end:.3f}"


def facts(summary: Mapping[str, Any], last: int, events: Events) -> list[tuple[str, str]]:
    """Return names and values of the main numbers of a run."""
    pairs = [("steps", f"{last:,}"), ("seed", str(summary.get("seed", "")))]
    for name in ("setup", "warm_start", "to_first_step", "training"):
        seconds = summary.get("seconds", {}).get(name) or 0.0
        if seconds >= 0.5:
            pairs.append((name.replace("_", " "), duration(seconds)))
    if (speed := summary.get("tokens_per_second")) is not None:
        pairs.append(("tokens per second", f"{speed:,.0f}"))
    if memory := summary.get("peak_memory_bytes"):
        pairs.append(("peak memory", f"{memory / 1e9:.2f} GB"))
    pairs.append(("alarms", str(len(events.alarms))))
    return [(name, value) for name, value in pairs if value not in ("", "None")]


def differences(run_dirs: Sequence[Path]) -> dict[str, Any]:
    """Return the options that differ between the config.yaml of runs.

    Returns:
        `rows`: a name and a value for each run, None if the run has no such option. `of`: number of such options.
    """
    import yaml

    configs = []
    for run_dir in run_dirs:
        try:
            configs.append(gather.shown_options(yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))))
        except (OSError, ValueError, yaml.YAMLError):
            configs.append({})
    names = list(dict.fromkeys(name for config in configs for name in config if name != "run_dir"))
    rows = [[n, *(c.get(n) for c in configs)] for n in names if len({c.get(n) for c in configs}) > 1]
    rows.sort(key=lambda row: None in row)  # options that all runs have come first
    return {"rows": rows[:MAX_DIFFERENCES], "of": len(rows)}


def _render(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    # mtime=0 makes equal runs give equal pages.
    packed = gzip.compress(text.encode(), compresslevel=6, mtime=0)
    script = "\n".join(_asset(name) for name in SCRIPTS)
    digest = hashlib.sha256(script.encode()).digest()
    parts = {
        # The hash lets the browser run this script only, even if a run's text contained another one.
        "SCRIPT_HASH": base64.b64encode(digest).decode(),
        "LICENSE": _asset("uPlot.LICENSE"),
        "STYLE": "\n".join(_asset(name) for name in STYLES),
        "SCRIPT": script,
        "DATA": base64.b64encode(packed).decode(),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("report.html"))


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
