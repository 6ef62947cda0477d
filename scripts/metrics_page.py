"""Writes the page that says what every metric means, from the registry in training/tracking.

python scripts/metrics_page.py            write docs/metrics.md
python scripts/metrics_page.py --check    exit 1 if it is not what would be written
"""

import sys
from collections.abc import Sequence

from migration_page import ROOT, current, table  # which makes the project importable

from training.tracking.alarms import ALARMS, NOT_A_NUMBER, advice
from training.tracking.metrics import GROUPS, Metric

PAGE = "docs/metrics.md"
HEAD = """\
# Metrics

<!-- Written by scripts/metrics_page.py from training/tracking/{metrics,alarms}.py: change those, not this page. -->

Every step of a run is a line of `metrics.jsonl`, and step 0 the evaluation before the first; TensorBoard, W&B, the
terminal and the report show the same numbers under the same names. A recipe logs those of the following that there are
in its algorithm. `<word>` stands for any text. A line has `step` and `time` (seconds since the epoch) besides, and
names what was no finite number in `nonfinite`.

Look first at `eval/score` (is it better?), then at `actor/approx_kl`, `actor/entropy` and
`reward/zero_variance_share` (is it healthy?), then at some answers and `rollout/truncated_share` (what does it say?),
and at `perf/` last: the `perf/<phase>_share` that is largest says what to make faster.
"""
ABOUT = {
    "reward/": "What the step's answers earned. The recipe `reward_model` logs what it learns here.",
    "actor/": "What the policy learnt, as means over the optimizer steps of a step and over tokens.",
    "critic/": "What the critic learnt, where there is one.",
    "rollout/": "What the step's answers are like, and how far the engine that drew them is from the trainer.",
    "eval/": "What held-out prompts say, in the steps that are evaluated.",
    "timing_s/": "Where the step's time went. With `async_train` answers are drawn meanwhile, beside the sum.",
    "perf/": "How fast the run is, and what it takes.",
    "": "Logged by `verl_ppo` alone, under the names that verl gives them.",
}
ALARM_HEAD = """\
## Alarms

An alarm sounds once, on the terminal, in `events.jsonl` and in the report. It never stops a run. The limits are in
training/tracking/alarms.py; none of the demonstrations comes near one."""


def meaning(metric: Metric) -> str:
    """What stands in the last column."""
    notes = [f"The same as `{metric.same_as}`."] if metric.same_as else []
    notes += [f"Alarm: {metric.alarm}."] if metric.alarm else []
    return " ".join([metric.meaning, *notes])


def page() -> str:
    """docs/metrics.md."""
    lines = [HEAD]
    for start, metrics in GROUPS.items():
        rows = [(f"`{metric.name}`", metric.unit, metric.better, meaning(metric)) for metric in metrics]
        head = ("metric", "unit", "better", "meaning")
        lines += [f"## {start or 'Of verl'}", "", ABOUT[start], "", *table(head, rows), ""]
    rows = [
        (alarm.name, f"`{alarm.watches}`" if alarm in ALARMS else alarm.watches, alarm.when, advice(alarm))
        for alarm in (*ALARMS, NOT_A_NUMBER)
    ]
    lines += [ALARM_HEAD, "", *table(("alarm", "watches", "sounds", "try"), rows)]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Write the page, or see whether it is up to date."""
    if "--check" not in arguments:
        (ROOT / PAGE).write_text(page(), encoding="utf-8")
    elif current(PAGE) != page():
        print(f"{PAGE}: not up to date; run python scripts/metrics_page.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
