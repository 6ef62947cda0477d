"""Write docs/metrics.md, the meaning of every metric, from the registry in training/tracking.

python scripts/metrics_page.py            write docs/metrics.md
python scripts/metrics_page.py --check    exit with 1 if the page is not up to date
"""

import sys
from collections.abc import Sequence

from migration_page import ROOT, current, table  # also makes the project importable

from plugins.alarms.alarms import ALARMS, NOT_A_NUMBER, advice
from training.tracking.metrics import GROUPS, Metric

PAGE = "docs/metrics.md"
HEAD = """\
# Metrics

<!-- Written by scripts/metrics_page.py from training/tracking/metrics.py, plugins/alarms: change those, not this. -->

After this page you know the meaning of each metric, whether it should rise or fall, and which alarm watches it.

Every step of a run is a line of `metrics.jsonl`; step 0 is the evaluation before the first step. TensorBoard, W&B, the
terminal and the report use the same names. A recipe logs the metrics of its algorithm. `<word>` stands for any text. A
line also has `step`, `time` (seconds since the epoch), and `nonfinite` (names of metrics that were not finite).

Read the metrics in this order:

1. `eval/score`: does the policy learn?
2. `actor/approx_kl`, `actor/entropy` and `reward/zero_variance_share`: is the update healthy?
3. Some responses, and `rollout/truncated_share`.
4. `perf/`: make the phase with the largest `perf/<phase>_share` faster.
"""
ABOUT = {
    "reward/": "Rewards of the responses of a step. In the recipe `reward_model`: the training of the reward model.",
    "distill/": "Agreement of student and teacher in on-policy distillation.",
    "actor/": "Update of the policy: means over the optimizer steps of a step, and over tokens.",
    "critic/": "Update of the critic, if the recipe has one.",
    "rollout/": "Rollouts of the step, and the difference between the distributions of engine and trainer.",
    "eval/": "Scores on held-out prompts, in steps with an evaluation.",
    "timing_s/": "Time of the phases of a step. With `async_train` generation runs concurrently and is not in the sum.",
    "perf/": "Throughput and memory.",
    "bound/": "Time that the machine would allow for a phase, from first principles (plugins/light_meter).",
    "": "Logged only by `verl_ppo`, under verl's names.",
}
ALARM_HEAD = """\
## Alarms

An alarm is reported once: on the terminal, in `events.jsonl` and in the report. It never stops a run. The limits are in
plugins/alarms/alarms.py. No demonstration comes near a limit."""


def meaning(metric: Metric) -> str:
    """Return the text of the column `meaning`."""
    sentences = [metric.meaning]
    if metric.same_as:
        sentences.append(f"The same as `{metric.same_as}`.")
    if metric.alarm:
        sentences.append(f"Alarm: {metric.alarm}.")
    return " ".join(sentences)


def page() -> str:
    """Return the text of docs/metrics.md."""
    lines = [HEAD]
    for start, metrics in GROUPS.items():
        rows = [(f"`{metric.name}`", metric.unit, metric.better, meaning(metric)) for metric in metrics]
        head = ("metric", "unit", "better", "meaning")
        lines += [f"## {start or 'Of verl'}", "", ABOUT[start], "", *table(head, rows), ""]
    rows = [(alarm.name, f"`{alarm.watches}`", alarm.when, advice(alarm)) for alarm in ALARMS]
    # NOT_A_NUMBER watches all metrics: its text is a description and not a name.
    rows.append((NOT_A_NUMBER.name, NOT_A_NUMBER.watches, NOT_A_NUMBER.when, advice(NOT_A_NUMBER)))
    lines += [ALARM_HEAD, "", *table(("alarm", "watches", "sounds", "try"), rows)]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Write the page, or with --check compare it with the current registry. Return the exit code."""
    if "--check" not in arguments:
        (ROOT / PAGE).write_text(page(), encoding="utf-8")
    elif current(PAGE) != page():
        print(f"{PAGE}: not up to date; run python scripts/metrics_page.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
