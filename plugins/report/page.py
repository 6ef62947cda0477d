"""A report: runs as plain data, put into a page that needs nothing beside itself."""

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
SCRIPTS = ("uPlot.min.js", "data.js", "curves.js", "timeline.js", "rollouts.js", "page.js")
SAID = {"finished": "finished", "failed": "failed", "stopped": "was stopped"}


def write_report(run_dirs: Sequence[Path], out: Path) -> int:
    """Write the report of some runs; returns its size in bytes.

    Raises:
        ValueError: a folder holds no run, or `out` is something else than a file; the message names it.
        OSError: a file cannot be read, or the report not be written.
    """
    if out.exists() and not out.is_file():
        # The new file takes the old one's place, which would be the end of a device such as /dev/null.
        raise ValueError(f"{out} is no file; name another one with --out")
    page = build_page(run_dirs)
    write_whole(out, page)
    return len(page.encode())


def build_page(run_dirs: Sequence[Path], limits: Limits | None = None) -> str:
    """The report as HTML, of at most `MOST_BYTES`: what does not fit is thinned out."""
    for run_dir in run_dirs:
        if not any((run_dir / name).is_file() for name in RUN_FILES):
            raise ValueError(f"{run_dir} holds no run (none of {', '.join(RUN_FILES)}); name the folder of a run")
    limits = limits or Limits()
    while True:
        page = _render(collect(run_dirs, limits))
        if len(page.encode()) <= MOST_BYTES or limits.tokens < 1000:
            return page
        limits = limits.over(2)


def collect(run_dirs: Sequence[Path], limits: Limits) -> dict[str, Any]:
    """All that a page shows: plain data."""
    runs = [_run(run_dir, limits.over(len(run_dirs))) for run_dir in run_dirs]
    names = list(dict.fromkeys(name for run in runs for name in run["curves"]))
    return {
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "runs": runs,
        "metrics": gather.describe_metrics(names),
        "differs": differences(run_dirs) if len(runs) > 1 else None,
    }


def _run(run_dir: Path, limits: Limits) -> dict[str, Any]:
    summary, plan = json_object(run_dir / "summary.json"), json_object(run_dir / "plan.json")
    events, curves = gather.read_events(run_dir / "events.jsonl"), gather.read_curves(run_dir / "metrics.jsonl")
    last = max((int(curve.x[-1]) for curve in curves.values() if curve.x), default=0)
    status = status_of(summary, run_dir)
    return {
        "name": run_dir.resolve().name,
        "recipe": str(summary.get("recipe") or ""),
        "status": status,
        "outcome": outcome(summary, status, last, events),
        "error": str(summary.get("error") or ""),
        "facts": facts(summary, last, events),
        "alarms": events.alarms,
        "jobs": [job for job in events.jobs if job["kind"] not in ("start", "stop", "end")][-50:],
        "changed": sorted(gather.shown_options(plan["changed"]).items()) if "changed" in plan else None,
        "curves": gather.pack_curves(curves, limits.points),
        "left_out": max(0, len(curves) - gather.MAX_CURVES),
        "timeline": gather.pack_timeline(events, limits.bars),
        "memory": gather.pack_memory(events),
        "rollouts": read_rollouts(run_dir, limits.tokens),
    }


def status_of(summary: Mapping[str, Any], run_dir: Path) -> str:
    """How a run ended: "finished", "failed", "stopped"; "running"; "cut off" where nobody is left to say it."""
    status = summary.get("status")
    if status in SAID:
        return str(status)
    return "running" if is_written(run_dir) else "cut off"


def outcome(summary: Mapping[str, Any], status: str, last: int, events: Events) -> str:
    """What became of a run, in a few sentences."""
    recipe = summary.get("recipe") or "The run"
    steps = f"{last} step{'s' * (last != 1)}"
    if events.total and events.total != last:
        steps = f"step {last} of {events.total}"
    became = "is running; so far" if status == "running" else SAID.get(status, "was cut off")
    text = f"{recipe} {became} {'' if status in ('finished', 'running') else 'after '}{steps}"
    text += f" in {duration(_took(summary, events))}." if events.end else "."
    text += _gain(summary.get("score") or {})
    starts, resumed = summary.get("attempts") or 1, summary.get("resumed_from")
    if starts > 1:
        text += f" Its processes were started {starts} times."
    if resumed:
        text += f" It was resumed after step {resumed}."
    return text


def _took(summary: Mapping[str, Any], events: Events) -> float:
    """Seconds since the command, where the run began with it and tells when; else since its first event."""
    first = summary.get("seconds", {}).get("to_first_step")
    again = summary.get("resumed_from") or (summary.get("attempts") or 1) > 1
    if first is None or again or not events.steps or events.steps[0][0] != 1:
        return events.end
    return max(events.end, first + events.end - events.steps[0][1])


def _gain(score: Mapping[str, Any]) -> str:
    def went(start: str, end: str) -> str:
        a, b = score.get(start), score.get(end)
        if b is None:
            return "" if a is None else f"began at {a:.3f}"
        return f"ended at {b:.3f}" if a is None else f"went from {a:.3f} to {b:.3f}"

    sampled, greedy = went("start", "end"), went("start_greedy", "end_greedy")
    on = f" ({score['examples']:,} examples)" if score.get("examples") else ""
    text = f" The held-out score {sampled}{on}" if sampled else ""
    return text + (f"; greedily it {greedy}" if text and greedy else "") + ("." if text else "")


def facts(summary: Mapping[str, Any], last: int, events: Events) -> list[tuple[str, str]]:
    """Numbers of a run that stand beside the sentence: names and values."""
    found = [("steps", f"{last:,}"), ("seed", str(summary.get("seed", "")))]
    for name in ("setup", "warm_start", "to_first_step", "training"):
        took = summary.get("seconds", {}).get(name) or 0.0
        found += [(name.replace("_", " "), duration(took))] if took >= 0.5 else []
    speed, memory = summary.get("tokens_per_second"), summary.get("peak_memory_bytes")
    found += [("tokens per second", f"{speed:,.0f}")] if speed is not None else []
    found += [("peak memory", f"{memory / 1e9:.2f} GB")] if memory else []
    found += [("alarms", str(len(events.alarms)))]
    return [(name, value) for name, value in found if value not in ("", "None")]


def differences(run_dirs: Sequence[Path]) -> dict[str, Any]:
    """Options in which the config.yaml of runs differ: `rows` of a name and a value for each; None: it has none."""
    import yaml

    configs = []
    for run_dir in run_dirs:
        try:
            configs.append(gather.shown_options(yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))))
        except (OSError, ValueError, yaml.YAMLError):
            configs.append({})
    names = list(dict.fromkeys(name for config in configs for name in config if name != "run_dir"))
    rows = [[n, *(c.get(n) for c in configs)] for n in names if len({c.get(n) for c in configs}) > 1]
    rows.sort(key=lambda row: None in row)  # what all have is worth more than what is another recipe's
    return {"rows": rows[:MAX_DIFFERENCES], "of": len(rows)}


def _render(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    packed = gzip.compress(text.encode(), compresslevel=6, mtime=0)
    script = "\n".join(_asset(name) for name in SCRIPTS)
    digest = hashlib.sha256(script.encode()).digest()
    parts = {
        # Nothing but this script may run, whatever else might find its way into the page.
        "SCRIPT_HASH": base64.b64encode(digest).decode(),
        "LICENSE": _asset("uPlot.LICENSE"),
        "STYLE": "\n".join(_asset(name) for name in STYLES),
        "SCRIPT": script,
        "DATA": base64.b64encode(packed).decode(),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("report.html"))


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
