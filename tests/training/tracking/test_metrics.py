"""The registry of metrics: contents, names of other systems, and the generated page."""

import runpy
from pathlib import Path

import pytest

from plugins.alarms.alarms import ALARMS
from training.remote_call import engine_metrics
from training.tracking.metrics import GROUPS, METRICS, canonical_name, metric_of

ROOT = Path(__file__).parents[3]


def test_each_metric_has_one_entry_with_a_meaning() -> None:
    names = [metric.name for metric in METRICS]
    assert sorted(names) == sorted(set(names))
    for metric in METRICS:
        assert metric.meaning.endswith("."), metric.name
        assert metric_of(metric.name) is metric


def test_metrics_are_listed_in_the_group_of_their_prefix() -> None:
    for start, metrics in GROUPS.items():
        others = tuple(other for other in GROUPS if other and other != start)
        for metric in metrics:
            assert metric.name.startswith(start) and not metric.name.startswith(others)


def test_alarms_and_metrics_name_each_other() -> None:
    watched = {(name, metric.name) for metric in METRICS if metric.alarm for name in metric.alarm.split(", ")}
    assert watched == {(alarm.name, alarm.watches) for alarm in ALARMS}


def test_metric_names_of_other_systems_map_to_native_names() -> None:
    renamed = [metric for metric in METRICS if metric.same_as]
    for metric in renamed:
        house = metric_of(metric.same_as)
        assert house is not None and house.name == metric.same_as and not house.same_as
        assert (metric.unit, metric.row) == (house.unit, house.row), metric.name
    assert canonical_name("actor/ppo_kl") == "actor/approx_kl"
    assert canonical_name("actor/approx_kl") == "actor/approx_kl"
    assert canonical_name("mine/own") == "mine/own"


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("reward/score", "reward/score"),
        ("reward/format", "reward/<name>"),
        ("eval/sort_score", "eval/<source>_score"),
        ("eval/pass4", "eval/pass<n>"),
        ("eval/sort_pass4", "eval/<source>_pass<n>"),
        ("eval/openai/gsm8k_pass16", "eval/<source>_pass<n>"),
        ("eval/sort_truncated_rate", "eval/<source>_truncated_rate"),
        ("eval/sort_right_1", "eval/<source>_<name>"),
        ("val-core/openai/gsm8k/acc/mean@1", "val-core/<source>/<variable>/<metric>"),
        ("val-aux/num_turns/max", "val-aux/num_turns/max"),
        ("perf/update_actor_share", "perf/update_actor_share"),
    ],
)
def test_a_name_has_its_own_entry_or_that_of_the_first_matching_family(name: str, family: str) -> None:
    metric = metric_of(name)
    assert metric is not None and metric.name == family


def test_an_unknown_name_has_no_metric_entry() -> None:
    for name in ("score", "actor/approx_kl2", "eval/", "reward/", "perf/tokens"):
        assert metric_of(name) is None


def test_the_page_of_metrics_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    assert runpy.run_path(str(ROOT / "scripts" / "metrics_page.py"))["main"](["--check"]) == 0


def test_engine_metrics_are_the_maximum_over_engines_and_have_a_meaning() -> None:
    each = [
        {"gpu_memory_gb": 3.0, "gpu_memory_reserved_gb": 4.5},
        # Only this engine was checked.
        {"gpu_memory_gb": 1.0, "gpu_memory_reserved_gb": 5.0, "check_gap_mean": 1e-6},
    ]
    metrics = engine_metrics(each)
    memory = {"rollout/gpu_memory_gb": 3.0, "rollout/gpu_memory_reserved_gb": 5.0}
    assert metrics == memory | {"rollout/check_gap_mean": 1e-6}
    assert all(metric_of(name) for name in metrics)
    assert engine_metrics([{}, {}]) == {}  # on CPUs
