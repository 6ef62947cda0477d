"""Reward code in child processes: arguments, failures, and the end of all processes."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from components.rewards.base import RewardOutput, RewardSettings
from components.rewards.errors import RewardError
from components.rewards.opening import open_reward
from components.rewards.scorers import register_scorer
from components.rewards.workers import WorkerReward
from tests.messages import says
from tests.processes import is_alive, wait_until_gone

PROJECT = Path(__file__).resolve().parents[3]
GUARD_S = 120
"""Timeout of a test that hangs, in seconds."""


def reward_file(folder: Path, body: str, *, imports: str = "") -> str:
    """Write a reward file whose function is `body`."""
    indented = "".join(f"    {line}\n" for line in body.splitlines())
    path = folder / "reward.py"
    path.write_text(f"import os, time\n{imports}\ndef reward_func(queries, prompts, labels, **kwargs):\n{indented}")
    return str(path)


def rewarded(spec: str, count: int, **settings: float) -> RewardOutput:
    """Return the rewards of the responses "0", "1", ... to the prompts "p0", "p1", ..."""
    with WorkerReward(spec, RewardSettings(**settings)) as reward:  # pyright: ignore[reportArgumentType]
        return ask(reward, count)


def ask(reward: WorkerReward, count: int) -> RewardOutput:
    prompts = [f"p{place}" for place in range(count)]
    responses = [str(place) for place in range(count)]
    return reward([f"{p}{a}" for p, a in zip(prompts, responses)], prompts, responses)


def pids_in(file: Path, count: int) -> list[int]:
    """Wait until a reward function has written this number of process ids, and return them."""
    deadline = time.monotonic() + GUARD_S
    while not file.is_file() or len(file.read_text().split()) < count:
        assert time.monotonic() < deadline, "the reward function did not start"
        time.sleep(0.01)
    return [int(word) for word in file.read_text().split()]


def write_pid(file: Path) -> str:
    return f"with open({str(file)!r}, 'a') as f: f.write(f'{{os.getpid()}} ')\n"


def stated_length(response: str, label: str) -> float:
    return float(label) - len(response)


def test_a_task_logs_the_format_of_each_response_and_other_scorers_do_not() -> None:
    responses = ["#### 9", "7+5=12 12-3=9 #### 9", "9"]
    with WorkerReward("word", RewardSettings()) as reward:
        output = reward([f"p{response}" for response in responses], ["p"] * 3, ["7+5=12 12-3=9 #### 9"] * 3)
    assert output.score_B.tolist() == [1.0, 1.0, 0.0]
    assert {name: value_B.tolist() for name, value_B in output.logs.items()} == {
        "marks": [1.0, 1.0, 0.0],
        "reasons": [0.0, 1.0, 0.0],
        "in_form": [0.0, 1.0, 0.0],
        "right_in_form": [0.0, 1.0, 0.0],
    }
    assert rewarded("exact_match", 2).logs == {}


def test_a_function_runs_in_another_process_and_gets_responses_in_chunks(tmp_path: Path) -> None:
    body = (
        "n = len(queries)\nassert queries == [p + r for p, r in zip(prompts, kwargs['responses'])]\n"
        "return {'rewards': [int(label) for label in labels], 'scores': [[0.5]] * n,"
        " 'extra_logs': {'chunk': n, 'pid': [os.getpid()] * n}}"
    )
    output = rewarded(reward_file(tmp_path, body), 10)
    assert output.reward_B.tolist() == [float(place) for place in range(10)]
    assert output.score_B.tolist() == [0.5] * 10
    # One worker and four requested chunks: 10 / 4 rounded up is 3, and 1 response remains.
    assert output.logs["chunk"].tolist() == [3.0] * 9 + [1.0]
    assert len(set(output.logs["pid"].tolist())) == 1
    assert float(os.getpid()) not in output.logs["pid"].tolist()


@pytest.mark.parametrize(("count", "workers", "chunk"), [(3, 1, 1), (1000, 1, 64), (64, 2, 8)])
def test_rewards_do_not_depend_on_the_chunk_size(tmp_path: Path, count: int, workers: int, chunk: int) -> None:
    body = "return {'rewards': [int(label) for label in labels], 'extra_logs': {'chunk': len(labels)}}"
    output = rewarded(reward_file(tmp_path, body), count, workers=workers)
    assert output.reward_B.tolist() == [float(place) for place in range(count)]
    assert output.logs["chunk"].max() == chunk


def test_workers_run_in_parallel(tmp_path: Path) -> None:
    # Each of the first two chunks waits until the other one has started.
    body = (
        f"folder = {str(tmp_path)!r}\nopen(f'{{folder}}/{{os.getpid()}}.here', 'w').close()\n"
        "while sum(name.endswith('.here') for name in os.listdir(folder)) < 2: time.sleep(0.01)\n"
        "return {'rewards': [1.0] * len(queries)}"
    )
    assert rewarded(reward_file(tmp_path, body), 8, workers=2).reward_B.sum() == 8


def test_torch_and_numpy_are_loaded_only_by_the_reward_file(tmp_path: Path) -> None:
    body = "return {'rewards': torch.ones(len(queries), 1), 'scores': [np.float32(0.5)] * len(queries)}"
    output = rewarded(reward_file(tmp_path, body, imports="import torch, numpy as np"), 2)
    assert (output.reward_B.tolist(), output.score_B.tolist()) == ([1.0, 1.0], [0.5, 0.5])
    body = "import sys\nreturn {'rewards': [('torch' in sys.modules) + 0.0] * len(queries)}"
    assert rewarded(reward_file(tmp_path, body), 2).reward_B.tolist() == [0.0, 0.0]


def test_a_function_without_kwargs_gets_only_its_parameters(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': [1] * len(queries)}\n")
    assert rewarded(str(path), 2).reward_B.tolist() == [1.0, 1.0]
    path.write_text("def reward_func(queries, prompts, labels, responses):\n    return {'rewards': [7]}\n")
    assert rewarded(str(path), 2).reward_B.tolist() == [7.0, 7.0]


def test_output_of_a_function_is_shown_and_does_not_affect_rewards(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = "print('hello from the reward')\nos.write(1, b'raw\\n')\nreturn {'rewards': [1.0] * len(queries)}"
    assert rewarded(reward_file(tmp_path, body), 1).reward_B.tolist() == [1.0]
    out, err = capfd.readouterr()
    assert (out, err) == ("", "hello from the reward\nraw\n")


def test_a_scorer_runs_in_a_child_process_and_one_that_cannot_be_sent_is_refused() -> None:
    register_scorer("stated_length", stated_length)
    with open_reward("stated_length") as reward:
        assert reward(["pabc"], ["p"], [5]).reward_B.tolist() == [2.0]
    register_scorer("nowhere", lambda response, label: 0.0)
    with pytest.raises(ValueError, match=says("'nowhere'", "lambda", "module")):
        open_reward("nowhere")


def test_an_endless_calculation_is_stopped_at_the_deadline_and_counted() -> None:
    with open_reward("math", RewardSettings(timeout_s=1, max_failed_share=1.0)) as reward:
        output = reward([""], [""], ["1/2"], responses=["\\boxed{9^{9^{9^9}}}"])
    assert output.reward_B.tolist() == [0.0]
    assert re.search(says("1 s", "response 0"), output.failures[0])


def test_two_files_with_the_same_name_are_loaded_separately(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        reward_file(tmp_path / name, f"return {{'rewards': [{ord(name)}] * len(queries)}}")
    first, second = (open_reward(str(tmp_path / name / "reward.py")) for name in "ab")
    with first, second:
        assert isinstance(first, WorkerReward)
        assert isinstance(second, WorkerReward)
        assert (ask(first, 1).reward_B.item(), ask(second, 1).reward_B.item()) == (97.0, 98.0)


def test_a_file_that_cannot_be_loaded_is_refused_with_its_traceback(tmp_path: Path) -> None:
    path = reward_file(tmp_path, "return {}", imports="import no_such_module")
    with pytest.raises(ValueError, match=says(path, "ModuleNotFoundError", "no_such_module")) as caught:
        open_reward(path, RewardSettings(workers=2))
    assert "reward.py" in caught.value.__notes__[0]
    assert caught.value.__notes__[0].endswith("No module named 'no_such_module'")
    for line, reason in (
        ("raise SystemExit('no key')", "SystemExit: no key"),
        ("os._exit(3)", "exit code 3"),
    ):
        with pytest.raises(ValueError, match=says(path, reason)):
            open_reward(reward_file(tmp_path, "return {}", imports=line))
    (tmp_path / "reward.py").write_text("reward_func = 3\n")
    with pytest.raises(ValueError, match=says(path, "reward_func", "int")):
        open_reward(path)


@pytest.mark.parametrize(
    ("misdeed", "facts"),
    [
        ("raise KeyError('no such\\nthing')", [r"KeyError: 'no such\nthing'"]),
        ("raise SystemExit", ["SystemExit:"]),
        ("raise EOFError('early')", ["EOFError: early"]),
        ("return 'well done'", ["str", "'rewards'"]),
        ("os._exit(3)", ["exit code 3"]),
        ("os.kill(os.getpid(), 11)", ["SIGSEGV"]),
    ],
)
def test_only_the_responses_that_crash_fail_and_they_are_named(tmp_path: Path, misdeed: str, facts: list[str]) -> None:
    body = (
        f"if '7' in labels:\n    {misdeed}\n"
        "return {'rewards': [1.0] * len(labels), 'extra_logs': {'x': [2.0] * len(labels)}}"
    )
    output = rewarded(reward_file(tmp_path, body), 20, workers=2)
    expected = [0.0 if place == 7 else 1.0 for place in range(20)]
    assert output.reward_B.tolist() == output.score_B.tolist() == expected
    assert output.logs["x"].isnan().tolist() == [place == 7 for place in range(20)]
    assert list(output.failures) == [7]
    assert "\n" not in output.failures[7]
    assert re.search(says(*facts, "response 7", "'p7'"), output.failures[7])


def test_a_response_that_hangs_fails_at_its_deadline_and_its_process_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    # The regular expression takes exponential time and holds the interpreter lock.
    body = write_pid(pids) + "re.match('(a+)+$', 'a' * 60 + 'b')"
    with WorkerReward(
        reward_file(tmp_path, body, imports="import re"), RewardSettings(timeout_s=0.5, max_failed_share=1.0)
    ) as reward:
        failures = ask(reward, 1).failures
        wait_until_gone(*pids_in(pids, 1), timeout_s=GUARD_S)
    assert re.search(says("0.5 s", "response 0", "'p0'"), failures[0])


def test_two_failures_in_a_small_batch_are_allowed_and_a_third_stops_the_run(tmp_path: Path) -> None:
    body = "if int(labels[0]) < {}: raise KeyError(labels[0])\nreturn {{'rewards': [1.0] * len(labels)}}"
    assert list(rewarded(reward_file(tmp_path, body.format(2)), 8).failures) == [0, 1]
    with pytest.raises(RewardError, match=says("3 of 8", 0.1)):
        rewarded(reward_file(tmp_path, body.format(3)), 8)
    # No response was rewarded, or no failure is allowed.
    with pytest.raises(RewardError, match="1 of 2"):
        rewarded(reward_file(tmp_path, body.format(2)), 2)
    with pytest.raises(RewardError, match="1 of 8"):
        rewarded(reward_file(tmp_path, body.format(1)), 8, max_failed_share=0)


def test_one_failure_above_the_allowed_number_stops_the_run(tmp_path: Path) -> None:
    # 29 failures of 100 are 0.29, although 0.29 * 100 is slightly less than 29.
    body = "if int(labels[0]) < {}: raise KeyError(labels[0])\nreturn {{'rewards': [1.0] * len(labels)}}"
    output = rewarded(reward_file(tmp_path, body.format(29)), 100, max_failed_share=0.29)
    assert list(output.failures) == list(range(29))
    assert output.reward_B.tolist() == [0.0] * 29 + [1.0] * 71
    path = reward_file(tmp_path, body.format(30))
    facts = ("30 of 100", 0.29, "KeyError: '0'", "response 0", "'p0'")
    with pytest.raises(RewardError, match=says(path, *facts)) as caught:
        rewarded(path, 100, max_failed_share=0.29)
    assert "in reward_func" in caught.value.__notes__[0]


def test_a_function_that_always_fails_ends_the_batch_early(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    path = reward_file(tmp_path, write_pid(calls) + "raise OSError('disk full')")
    with pytest.raises(RewardError, match="101 of 1000"):
        rewarded(path, 1000)
    # Two chunks of 64. Their responses are repeated one by one until the 101st has failed.
    assert len(calls.read_text().split()) == 2 + 101


def test_after_an_abandoned_batch_the_next_one_is_rewarded(tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    # Response 12 fails, which ends the batch, while the other worker hangs at response 11.
    body = (
        f"if '11' in labels:\n    open({str(hangs)!r}, 'w').close()\n    time.sleep(600)\n"
        f"if '12' in labels:\n    while not os.path.exists({str(hangs)!r}): time.sleep(0.01)\n    raise KeyError(12)\n"
        "return {'rewards': [1.0] * len(labels)}"
    )
    settings = RewardSettings(workers=2, timeout_s=600, max_failed_share=0)
    with WorkerReward(reward_file(tmp_path, body), settings) as reward:
        with pytest.raises(RewardError, match=says("1 of 20", "response 12")):
            ask(reward, 20)
        for _ in range(3):
            assert ask(reward, 10).reward_B.sum() == 10


def test_a_child_that_died_while_idle_is_replaced_without_a_failed_response(tmp_path: Path) -> None:
    body = "return {'rewards': [1.0] * len(labels), 'extra_logs': {'pid': os.getpid()}}"
    with WorkerReward(reward_file(tmp_path, body), RewardSettings(max_failed_share=0)) as reward:
        first = int(ask(reward, 4).logs["pid"][0])
        os.kill(first, signal.SIGKILL)
        wait_until_gone(first, timeout_s=GUARD_S)
        output = ask(reward, 4)
    assert output.failures == {}
    assert int(output.logs["pid"][0]) != first


def test_a_replacement_that_cannot_be_loaded_ends_the_batch_with_the_reason(tmp_path: Path) -> None:
    once = tmp_path / "once"
    path = reward_file(tmp_path, "os._exit(1)", imports=f"open({str(once)!r}, 'x')")
    with WorkerReward(path, RewardSettings()) as reward:
        with pytest.raises(RewardError, match="1 of 1"):
            ask(reward, 1)
        for _ in range(2):
            with pytest.raises(ValueError, match="FileExistsError"):
                ask(reward, 1)


def test_large_batches_and_labels_of_any_kind_are_passed_completely(tmp_path: Path) -> None:
    body = "return {'rewards': [label['n'] * len(q) for q, label in zip(queries, labels)]}"
    with WorkerReward(reward_file(tmp_path, body), RewardSettings()) as reward:
        output = reward(["x" * 1_000_000] * 8, ["x"] * 8, [{"n": place} for place in range(8)])
    assert output.reward_B.tolist() == [place * 1e6 for place in range(8)]


def test_closing_ends_every_process_and_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    body = write_pid(pids) + "return {'rewards': [1.0] * len(labels)}"
    sleeper = (
        f"import subprocess\np = subprocess.Popen(['sleep', '600'])\nopen({str(pids)!r}, 'a').write(f'{{p.pid}} ')"
    )
    threads = set(threading.enumerate())
    with WorkerReward(reward_file(tmp_path, body, imports=sleeper), RewardSettings(workers=2)) as reward:
        ask(reward, 16)
        actual = set(pids_in(pids, 4))
        assert all(map(is_alive, actual))
    wait_until_gone(*actual, timeout_s=GUARD_S)
    assert set(threading.enumerate()) <= threads
    with pytest.raises(RuntimeError, match=says("reward.py")):
        ask(reward, 1)
    reward.close()


def test_closing_from_another_thread_ends_a_hanging_call(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    reward = WorkerReward(reward_file(tmp_path, write_pid(pids) + "time.sleep(600)"), RewardSettings())
    closer = threading.Thread(target=lambda: (pids_in(pids, 1), reward.close()))
    closer.start()
    with pytest.raises(RuntimeError, match=says("reward.py")):
        ask(reward, 1)
    closer.join()
    wait_until_gone(*pids_in(pids, 1), timeout_s=GUARD_S)


# Program of a calling process. It prints nothing and hangs in the reward function.
CALLER = """
import sys
from components.rewards.base import RewardSettings
from components.rewards.opening import open_reward
if __name__ == "__main__":
    open_reward(sys.argv[1], RewardSettings(workers=2))(["a"] * 8, ["a"] * 8, [""] * 8)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, -2)])
def test_no_child_process_outlives_its_parent_even_if_it_holds_the_gil(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    pids = tmp_path / "pids"
    # The regular expression takes exponential time, during which no other Python thread runs.
    path = reward_file(tmp_path, write_pid(pids) + "re.match('(a+)+$', 'a' * 60 + 'b')", imports="import re")
    (tmp_path / "random.py").write_text("raise RuntimeError('where the caller stands is not where modules come from')")
    caller = subprocess.Popen(
        [sys.executable, "-P", "-c", CALLER, path],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    try:
        children = pids_in(pids, 2)
        assert all(map(is_alive, children))
    finally:
        caller.send_signal(number)
        assert caller.wait(GUARD_S) == code
    wait_until_gone(*children, timeout_s=GUARD_S)


def test_a_function_that_forks_and_returns_twice_shifts_no_reward(tmp_path: Path) -> None:
    body = "pid = os.fork()\ntime.sleep(0.05 * (pid == 0))\nreturn {'rewards': [float(r) for r in labels]}"
    actual = rewarded(reward_file(tmp_path, body), 32, workers=2, max_failed_share=0.0)
    assert actual.reward_B.tolist() == [float(place) for place in range(32)]


def test_a_function_that_writes_to_the_connection_fails_and_gives_no_reward(tmp_path: Path) -> None:
    imports = "import pickle, struct"
    # Write a frame that looks like a reply, without the request number, to every descriptor.
    body = (
        "reply = pickle.dumps(('ok', {'rewards': [9.0]}))\n"
        "for fd in map(int, os.listdir('/proc/self/fd')):\n"
        "    try:\n"
        "        os.write(fd, struct.pack('!Q', len(reply)) + reply)\n"
        "    except OSError:\n"
        "        continue\n"
        "return {'rewards': [1.0] * len(labels)}"
    )
    with pytest.raises(RewardError, match=says("not the reply", "descriptors")):
        rewarded(reward_file(tmp_path, body, imports=imports), 2, workers=1, max_failed_share=0.0)


def test_processes_that_reward_code_starts_in_a_new_session_end_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    # Forked twice: its parent has ended, so it is not a child of the reward process.
    body = (
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        f"        {write_pid(file)}"
        "        time.sleep(999)\n"
        "    os._exit(0)\n"
        f"while not os.path.exists({str(file)!r}): time.sleep(0.01)\n"
        "return {'rewards': [1.0] * len(labels)}"
    )
    rewarded(reward_file(tmp_path, body), 1, workers=1)
    wait_until_gone(*pids_in(file, 1))
