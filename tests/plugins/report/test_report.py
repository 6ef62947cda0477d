"""Data of the report from run folders in any state."""

from __future__ import annotations

import base64
import contextlib
import gzip
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models

from plugins.report import gather, page
from plugins.report.gather import (
    Limits,
    busy_share,
    describe_metrics,
    merge_bars,
    read_curves,
    read_events,
    thin,
)
from plugins.report.samples import Vocabulary, choose_groups, histogram, keep, read_rollouts
from tests.messages import says
from tests.plugins.report.report_runs import EVIL, lines, rollouts, write_run
from training.launch import launch
from training.launch.launch import reporting
from training.launch.programs import start_program

ROOT = Path(__file__).resolve().parents[3]


def run_of(folder: Path, limits: Limits | None = None) -> dict[str, Any]:
    return page.collect([folder], limits or Limits())["runs"][0]


def data_in(html: str) -> dict[str, Any]:
    (packed,) = re.findall(r'<script type="text/plain" id="data">([^<]*)</script>', html)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def sums_of(differences: list[int]) -> list[int]:
    return list(itertools.accumulate(differences))


def curve(packed: dict[str, Any]) -> list[tuple[float, float]]:
    return list(zip(sums_of(packed["x"]), packed["y"]))


def test_the_outcome_is_a_sentence_and_curves_begin_with_the_initial_score(tmp_path: Path) -> None:
    run = run_of(write_run(tmp_path / "one"))
    score = "The held-out score went from 0.250 to 0.750 (2,048 examples)."
    assert run["outcome"] == f"grpo finished 6 steps in 1 min 10 s. {score}"
    assert run_of(write_run(tmp_path / "short", steps=1))["outcome"] == f"grpo finished 1 step in 30 s. {score}"
    assert run["status"] == "finished"
    assert curve(run["curves"]["eval/score"]) == [(0, 0.25), (6, 0.75)]
    assert curve(run["curves"]["reward/score"])[:2] == [(1, 0.16667), (2, 0.33333)]
    assert run["changed"] == [("reward.source", "mine.py"), ("train.learning_rate", "0.1")]
    assert run["alarms"] == [{"alarm": "kl_blow_up", "step": 2, "text": "too far", "advice": "less"}]


def test_the_duration_of_a_run_includes_its_start_up_if_known(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", steps=2)
    summary = {"recipe": "grpo", "status": "finished", "seconds": {"to_first_step": 50.0}}
    for more, expected in (({}, "1 min 00 s"), ({"resumed_from": 1}, "30 s"), ({"attempts": 2}, "30 s")):
        (run / "summary.json").write_text(json.dumps(summary | more))
        # The first event is at 0 s, step 1 ends at 20 s, the run at 30 s.
        assert run_of(run)["outcome"].startswith(f"grpo finished 2 steps in {expected}.")


def test_time_between_starts_is_left_out_and_idle_shares_cover_the_training(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", steps=2)
    events = (run / "events.jsonl").read_text()
    later = {"event": "job", "kind": "start", "time": 9000.0, "process": "", "text": "attempt 2"}
    call = {"event": "call", "role": "ACTOR", "rank": 0, "method": "update", "began": 9000.0, "seconds": 20.0}
    (run / "events.jsonl").write_text(events + "".join(json.dumps(line) + "\n" for line in (later, call)))
    line = run_of(run)["timeline"]
    # 10 s before the first phase; 2 steps of 10 s; 20 s of the second start, in which only ACTOR works.
    assert (line["training"], line["end"], line["starts"]) == (10, 50, [0, 30])
    # TRAINER 20 of 40 s; ACTOR 12 + 20 of 40; ROLLOUT's ranks 8 and 4 of 40.
    assert line["idle"] == {"TRAINER": 0.5, "ACTOR": 0.2, "ROLLOUT": 0.85}
    assert [(row["role"], row["rank"], row["idle"]) for row in line["rows"]] == [
        ("TRAINER", 0, 0.5), ("ACTOR", 0, 0.2), ("ROLLOUT", 0, 0.8), ("ROLLOUT", 1, 0.9),
    ]  # fmt: skip
    (actor,) = (row for row in line["rows"] if row["role"] == "ACTOR")
    assert (sums_of(actor["b"]), actor["d"]) == ([14000, 24000, 30000], [6000, 6000, 20000])
    assert ["ACTOR", "update", 3, 32, 20, 0] in line["calls"]


def test_memory_is_given_per_role_in_gb(tmp_path: Path) -> None:
    assert run_of(write_run(tmp_path / "one", steps=2))["memory"] == {
        "t": [20, 30],
        "gb": {"ACTOR": [2, 2], "ROLLOUT": [1, 1]},
    }


def test_overlapping_calls_count_once_as_busy() -> None:
    bars = [(0, 4, 0), (1, 2, 0), (3, 3, 0), (8, 5, 0)]
    # Of 10 s: from 0 to 6, and from 8 to 10.
    assert busy_share(bars, 0, 10) == pytest.approx(0.8)


def test_many_calls_are_merged_except_the_first_and_last_and_keep_the_total_time() -> None:
    merged = merge_bars([(2.0 * i, 1.0, int(i % 10 == 0)) for i in range(1000)], 40)
    assert len(merged) == 40
    assert merged[0] == (0, 1, 1, 1) and merged[-1] == (1998, 1, 0, 1)
    assert sum(length * share for _, length, _, share in merged) == pytest.approx(1000)
    assert {kind for _, _, kind, _ in merged[10:30]} == {0}  # the longest calls


def test_a_nonfinite_value_is_a_gap_and_an_incomplete_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines(path, [{"a": 1, "step": 1}, {"a": 20, "step": 2}])
    with path.open("a") as file:
        file.write('{"a": null, "b": "text", "c": true, "nonfinite": ["a"], "step": 4}\n[1]\n\n{"a": 99, "st')
    curves = read_curves(path)
    assert list(curves) == ["a"]
    assert list(curves["a"].x) == [1, 2, 4]
    assert list(curves["a"].y)[:2] == [1, 20] and math.isnan(curves["a"].y[2])


def test_events_of_user_code_are_ignored(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", steps=2)
    known = run_of(run)
    user_events = [
        {"event": "mine", "text": "hello"},
        {"event": "call", "role": "ACTOR", "began": 1020.0, "seconds": None},
        {"event": "step", "text": "without a number", "time": 1020.0},
        {"event": "alarm", "time": "noon"},
    ]
    events = (run / "events.jsonl").read_text()
    first, rest = events.split("\n", 1)
    lines(run / "events.jsonl", user_events)
    odd = (run / "events.jsonl").read_text() + "[" * 100_000 + "\n"
    (run / "events.jsonl").write_text(f"{first}\n{odd}{rest}")
    assert run_of(run) == known


def test_a_report_of_many_steps_marks_some_and_mentions_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "one")
    whole = run_of(run)["timeline"]
    monkeypatch.setattr(gather, "MAX_STEP_MARKS", 2)
    few = run_of(run)["timeline"]
    assert (len(whole["steps"]), whole["thinned"]) == (6, False)
    assert (few["steps"], few["thinned"]) == ([[1, 20], [6, 70]], True)


def test_downsampling_keeps_first_and_last_points_peaks_and_gaps() -> None:
    x = np.arange(100_000.0)
    y = np.zeros(100_000)
    y[77_777] = 9.0
    y[33_333] = -9.0
    y[50_000:60_000] = np.nan
    few_x, few_y = thin(x, y, 500)
    assert len(few_x) <= 501
    assert (few_x[0], few_x[-1]) == (0, 99_999)
    assert {9.0, -9.0} <= set(few_y)
    assert np.isnan(few_y[(few_x > 51_000) & (few_x < 59_000)]).all()


def test_an_unregistered_metric_gets_the_row_of_its_group() -> None:
    described = describe_metrics(["mine/x", "eval/mine_too", "timing_s/<odd>", "rollout/mine_three/x"])
    rows = {name: described[name]["row"] for name in ("mine/x", "rollout/mine_three/x")}
    assert rows == {"mine/x": "healthy", "rollout/mine_three/x": "says"}


def test_rollouts_have_the_text_the_turns_and_the_numbers_of_the_policys_tokens(tmp_path: Path) -> None:
    rollouts = run_of(write_run(tmp_path / "one"))["rollouts"]
    assert [step["step"] for step in rollouts["steps"]] == [1, 2, 3, 4, 5, 6]
    step = rollouts["steps"][0]
    assert (step["of"], step["of_groups"], step["bins"], step["cut"]) == (6, 3, [[0, 0, 3], [1, 1, 3]], 0)
    group = step["groups"][0]
    assert (group["prompt"], group["label"], group["of"]) == ("c>", "b", 2)
    first = group["responses"][0]
    assert first["runs"] == [[0, 2], [1, 2], [0, 1], [1, 1]]
    assert [rollouts["vocabulary"][i][1] for i in first["t"]] == ["c", ">", "b", "c", "\n", "<eos>"]
    assert first["logprob"] == [-0.5, -2.12, -0.25]
    assert first["mismatch"] == [0, -0.12, 0]  # -2.125 - -2.0, in two digits
    assert (first["advantage"], first["reward"], first["bin"]) == (-1, 0, 0)


def test_long_responses_and_surplus_groups_and_steps_are_cut_and_counted(tmp_path: Path) -> None:
    for step in range(1, 61):
        rollouts(tmp_path / f"rollouts/step_{step:06d}.parquet", prompts=20)
    data = read_rollouts(tmp_path, 100_000)
    assert data is not None
    assert (len(data["steps"]), data["of_steps"]) == (40, 60)
    assert (data["steps"][0]["step"], data["steps"][-1]["step"]) == (1, 60)
    assert (len(data["steps"][0]["groups"]), data["steps"][0]["of_groups"]) == (12, 20)
    assert not data["has_text"]
    tight = read_rollouts(tmp_path, 600)
    assert tight is not None
    shown = sum(len(a["t"]) for s in tight["steps"] for g in s["groups"] for a in g["responses"])
    assert 0 < shown <= 600


def test_a_cut_response_keeps_the_prompt_and_both_ends() -> None:
    assert keep(10, 3, 10) == [(0, 10)]
    # 25 characters for the prompt of 1,000, a quarter of them for its end, and 75 for the response.
    assert keep(2000, 1000, 100) == [(0, 19), (994, 1000), (1000, 1057), (1982, 2000)]
    # A short prompt leaves its share to the response.
    assert keep(1000, 4, 100) == [(0, 4), (4, 76), (976, 1000)]


def test_the_best_worst_and_most_spread_groups_come_first() -> None:
    rewards = {1: [0.5, 0.5], 2: [1.0, 1.0], 3: [0.0, 1.0], 4: [0.0, 0.0], 5: [0.4, 0.4]}
    assert choose_groups({group: np.array(r) for group, r in rewards.items()})[:3] == [2, 4, 3]


def test_bins_are_single_values_if_there_are_few_and_ranges_otherwise() -> None:
    assert histogram(np.array([1.0, 0.0, 1.0, np.nan])) == ([[0, 0, 1], [1, 1, 2]], [1, 0, 1, None])
    bins, bin_of = histogram(np.linspace(0, 24, 25))
    assert len(bins) == 12 and bins[0] == [0, 2, 2] and bins[-1] == [22, 24, 3]
    assert sum(count for _, _, count in bins) == len(bin_of) == 25


def test_tokens_of_one_character_are_decoded_together_and_spaces_are_kept(tmp_path: Path) -> None:
    model = models.WordLevel({"▁wo": 0, "rd": 1, "<0xC3>": 2, "<0xA4>": 3}, unk_token="rd")
    tokens = Tokenizer(model)
    tokens.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    vocabulary = Vocabulary(tokens)
    places = vocabulary.indices([1, 0, 2, 3, 1])
    assert [vocabulary.entries[i][1] for i in places] == ["rd", " wo", "", "ä", "rd"]


def test_invalid_bytes_are_decoded_in_linear_time() -> None:
    tokens = Tokenizer(models.WordLevel({"<0xC3>": 0, "a": 1}, unk_token="a"))
    tokens.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    vocabulary = Vocabulary(tokens)
    assert len(vocabulary.indices([0] * 30_000 + [1])) == 30_001
    # Two hundred at a time: the last part has only the letter.
    assert vocabulary.entries == [(0, ""), (1, "a")]


def test_hostile_text_is_escaped(tmp_path: Path) -> None:
    html = page.build_page([write_run(tmp_path / "one", evil=True)])
    assert "window.hacked" not in html
    run = data_in(html)["runs"][0]
    assert EVIL in run["curves"]
    assert run["rollouts"]["steps"][0]["groups"][0]["prompt"] == EVIL


def test_differing_options_are_listed_side_by_side(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, learning_rate=rate) for name, rate in (("a", 0.1), ("b", 0.3))]
    data = page.collect(runs, Limits())
    assert data["differs"] == {"rows": [["train.learning_rate", "0.1", "0.3"]], "of": 1}


@pytest.mark.parametrize("file", ["metrics.jsonl", "events.jsonl", "summary.json", "plan.json"])
def test_a_run_with_one_file_has_a_report(file: str, tmp_path: Path) -> None:
    whole = write_run(tmp_path / "one", steps=2)
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / file).write_bytes((whole / file).read_bytes()[:-20])  # killed in the middle of a line
    assert run_of(tmp_path / "part")["name"] == "part"


def test_a_damaged_rollout_file_is_skipped_and_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", steps=3)
    (run / "rollouts/step_000002.parquet").write_bytes(b"half")
    rollouts = run_of(run)["rollouts"]
    assert ([step["step"] for step in rollouts["steps"]], rollouts["unread"]) == ([1, 3], 1)


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        ({"recipe": "dpo", "status": "failed", "error": "boom"}, "dpo failed after step 2 of 9 in 30 s."),
        ({"recipe": "dpo", "status": "running", "attempts": 2, "resumed_from": 1},
         "dpo was cut off after step 2 of 9 in 30 s. Its processes were started 2 times. It was resumed after step 1."),
        ({}, "The run was cut off after step 2 of 9 in 30 s."),
    ],
)  # fmt: skip
def test_an_unfinished_run_has_its_status_in_the_report(summary: dict[str, Any], expected: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", steps=2)
    events = (run / "events.jsonl").read_text().replace('"steps": 2', '"steps": 9')
    (run / "events.jsonl").write_text(events)
    (run / "summary.json").write_text(json.dumps(summary))
    assert run_of(run)["outcome"] == expected


def big_run(folder: Path) -> Path:
    """Write a run of 100,000 steps, with two rollout files of 64 responses of 32,768 tokens."""
    names = [f"actor/m{i}" for i in range(4)]
    noise = np.random.default_rng(0)
    table = noise.random((1000, 4)).round(6).tolist()
    bodies = [", ".join(f'"{n}": {v}' for n, v in zip(names, row)) for row in table]
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(f'{{{bodies[s % 1000]}, "step": {s}}}\n' for s in range(1, 100_001))
    with (folder / "events.jsonl").open("w") as file:
        for s in range(100_000):
            call = f'"rank": {s % 64}, "method": "generate", "began": {s}, "seconds": {0.2 + s % 7 / 10}'
            file.write(f'{{"event": "call", "role": "ROLLOUT", {call}}}\n')
    count = 64
    length = 32_768
    offsets = pa.array(np.arange(0, count * length + 1, length))
    columns = {name: noise.standard_normal(count * length, dtype="f4") for name in ("logprob", "advantage")}
    columns["rollout_logprob"] = columns["logprob"] + columns["advantage"]
    tokens = {"tokens": noise.integers(0, 150_000, count * length)}
    lists = {n: pa.LargeListArray.from_arrays(offsets, pa.array(c)) for n, c in (columns | tokens).items()}
    ids = np.arange(count)
    reward = noise.random(count)
    whole = {"lengths": np.full(count, length), "prompt_id": ids // 8, "sample_id": ids % 8, "reward": reward, **lists}
    (folder / "rollouts").mkdir()
    pyarrow.parquet.write_table(pa.table(whole), folder / "rollouts/step_000001.parquet", compression="NONE")
    (folder / "rollouts/step_100000.parquet").symlink_to(folder / "rollouts/step_000001.parquet")
    return folder


def test_a_huge_run_fits_in_two_megabytes_and_lists_omissions(tmp_path: Path) -> None:
    html = page.build_page([big_run(tmp_path / "big")])
    assert len(html.encode()) < 2_000_000
    run = data_in(html)["runs"][0]
    assert run["curves"]["actor/m0"]["of"] == 100_000 > len(run["curves"]["actor/m0"]["y"])
    assert (run["timeline"]["bars"], run["timeline"]["ranks"]["ROLLOUT"], len(run["timeline"]["rows"])) == (
        100_000,
        64,
        48,
    )
    step = run["rollouts"]["steps"][0]
    assert (step["of"], step["of_groups"]) == (64, 8)
    assert step["cut"] == len(step["groups"]) * 8
    left = [-n for response in step["groups"][0]["responses"] for whose, n in response["runs"] if whose < 0]
    assert len(left) == 8


def test_a_page_that_is_too_large_is_downsampled_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "one")
    whole = len(page.build_page([run]).encode())
    monkeypatch.setattr(page, "MOST_BYTES", whole - 1)
    (run / "metrics.jsonl").write_text("".join(f'{{"a": {s * s % 977}, "step": {s}}}\n' for s in range(10_000)))
    few = data_in(page.build_page([run], Limits(points=10_000, tokens=8000)))["runs"][0]["curves"]["a"]
    assert len(few["y"]) < few["of"] == 10_000


def script(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/report.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=540)


def test_the_script_writes_one_file_and_prints_its_path(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, steps=2) for name in "ab"]
    alone = script(runs[0])
    both = script(*runs)
    assert (alone.returncode, both.returncode) == (0, 0), alone.stderr + both.stderr
    assert alone.stdout.startswith(f"report: {runs[0] / 'report.html'} (")
    assert [run["name"] for run in data_in((tmp_path / "report.html").read_text())["runs"]] == ["a", "b"]


def test_the_script_reports_errors_in_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", steps=1)
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "device")
    for arguments, code, said in (
        ([tmp_path / "nowhere"], 2, tmp_path / "nowhere"),
        ([tmp_path / "empty"], 2, tmp_path / "empty"),
        ([run, "--out", tmp_path / "no/such/folder/x.html"], 1, tmp_path / "no/such/folder"),
        ([run, "--out", tmp_path / "device"], 2, tmp_path / "device"),
    ):
        result = script(*arguments)
        assert (result.returncode, "Traceback" in result.stderr) == (code, False)
        assert str(said) in result.stderr


def test_a_report_needs_neither_torch_nor_pandas(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", steps=1)
    code = (
        "import sys; from pathlib import Path; from plugins.report.page import write_report\n"
        "write_report([Path(sys.argv[1])], Path(sys.argv[1]) / 'report.html')\n"
        "print(sorted({'torch', 'pandas', 'ray', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(run)], cwd=ROOT, capture_output=True, text=True, timeout=540
    )
    assert result.stdout.strip() == "[]", result.stderr


def test_a_run_writes_its_report_and_prints_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "one", steps=1)
    with reporting(run):
        (run / "summary.json").write_text('{"recipe": "sft", "status": "stopped"}')
    assert capsys.readouterr().out == f"report: {run / 'report.html'}\n"
    assert data_in((run / "report.html").read_text())["runs"][0]["status"] == "stopped"


@pytest.mark.nightly
def test_the_report_is_written_during_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", steps=1)
    program = start_program("plugins.report", str(run), "0.02", stdin=subprocess.PIPE)
    ends = time.monotonic() + 300
    while not (run / "report.html").exists() and time.monotonic() < ends:
        time.sleep(0.01)
    written = (run / "report.html").read_text()
    (run / "metrics.jsonl").write_text('{"a": 1, "step": 1}\n')
    while (run / "report.html").read_text() == written and time.monotonic() < ends:
        time.sleep(0.01)
    assert list(data_in((run / "report.html").read_text())["runs"][0]["curves"]) == ["a"]
    # The process that started the report has ended, whatever its outcome.
    (run / "summary.json").write_text('{"status": "failed"}')
    program.communicate(timeout=300)
    assert program.returncode == 0
    assert data_in((run / "report.html").read_text())["runs"][0]["status"] == "failed"
    assert not list(run.glob("*.partial"))


def test_a_failing_report_gives_one_warning_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "one", steps=1)
    os.mkfifo(run / "report.html")
    with reporting(run):
        pass
    (warning,) = caplog.records
    assert re.search(says("report.html", run, "no file"), warning.getMessage())
    assert capsys.readouterr().out == ""


def test_a_closed_output_does_not_fail_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "one", steps=1)
    full = Path("/dev/full").open("w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", full)
    with reporting(run):
        pass
    assert (run / "report.html").exists()
    monkeypatch.undo()
    with contextlib.suppress(OSError):  # an incomplete printed line
        full.close()


def test_a_run_stops_waiting_for_a_hanging_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launch, "REPORT_WITHIN_S", 0.01)
    run = write_run(tmp_path / "one", steps=1)
    os.mkfifo(run / "rollouts/step_000002.parquet")  # no process ever writes to it
    with reporting(run):
        pass
    (warning,) = caplog.records
    assert re.search(says(run / "report.html", "0.01 s"), warning.getMessage())


def test_a_run_without_events_has_no_timeline(tmp_path: Path) -> None:
    assert not read_events(tmp_path / "events.jsonl").bars
