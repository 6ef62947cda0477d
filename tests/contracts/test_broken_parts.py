"""Each violation fails its own contract, with a helpful message, and no other contract.

The contracts run as for a user: `pytest tests/contracts --target ...`, in a separate process.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.messages import says

pytestmark = pytest.mark.full

CONTRACTS = Path(__file__).resolve().parent
BROKEN = "tests.contracts.broken_parts"

Failures = dict[str, str]
"""Test name -> message of the failure."""
Facts = dict[str, tuple[object, ...]]
"""Test name -> facts that the message must contain."""
NOT_COMPARED = "nothing can be compared"
"""Part of the message of a contract that cannot be tested because another one is violated."""

ONE = "test_a_batch_of_one_is_rewarded"
BATCH = "test_each_response_of_a_batch_gets_one_finite_reward"
TEXT = "test_unusual_texts_of_a_policy_are_rewarded"
LABEL = "test_an_unusual_label_is_rewarded_or_rejected_with_a_value_error"
ALONE = "test_a_response_has_the_same_reward_alone_and_in_a_batch"
ORDER = "test_the_order_of_a_batch_does_not_matter"
AGAIN = "test_equal_calls_give_equal_rewards_also_in_a_new_process"
ARGUMENTS = "test_the_arguments_are_not_changed"
SCORES = "test_scores_are_from_0_to_1"
LOGS = "test_extra_logs_have_one_number_per_response"
LONG = "test_a_very_long_response_is_rewarded_before_the_deadline"

SCHEMA = "test_reset_and_step_return_valid_dicts"
ENDS = "test_an_episode_ends_within_the_limit_of_turns"
STATES = "test_the_states_argument_is_not_changed"
SAID = "test_unusual_texts_of_a_policy_get_a_response"
SAME = "test_equal_actions_give_equal_episodes"
RESET = "test_reset_restores_the_initial_state"
INSTANCES = "test_two_instances_share_no_state"
AT_ONCE = "test_concurrent_episodes_equal_sequential_ones"

UNSEEN = "[characters that cannot be seen]"
EXPECTED: dict[str, Facts] = {
    "one_for_all": {
        BATCH: ("'rewards'", "(1,)", 8),
        **dict.fromkeys((ALONE, ORDER, AGAIN, LOGS), ("'rewards'", "(1,)")),
    },
    "text_logs": {ONE: ("extra_logs['verdict']", "str")},
    "drawn": {AGAIN: ("again", "--allow-random"), **dict.fromkeys((ALONE, ORDER), (NOT_COMPARED,))},
    "hashed": {AGAIN: ("new process", "--allow-random")},
    "centred": {ALONE: ("alone", "What is 3 + 4?")},
    "sorted_rewards": {ORDER: ("order",), ALONE: ("alone",)},
    "tidying": {ARGUMENTS: ("ChangedArguments", "queries", "['What is")},
    "word_count": {
        TEXT + "[an empty response]": ("ZeroDivisionError: division by zero",),
        TEXT + "[white space only]": ("ZeroDivisionError: division by zero",),
        LOGS: ("ZeroDivisionError",),
    },
    "label_text": {
        LABEL + "[no label (None)]": ("AttributeError: 'NoneType' object has no attribute 'strip'", "ValueError"),
        **{LABEL + f"[{label}]": ("AttributeError", "ValueError") for label in ("a list", "a number", "an object")},
    },
    "percent": {SCORES: (50, "'scores'")},
    "dying": dict.fromkeys((TEXT + UNSEEN, LOGS), ("exit code 3",)),
    # Correct parts in the user's folder.
    "mine.rules:score": {},
    "one_rule.py:score": {},
    "Endless": {ENDS: ("episode 0", 20, "--max-turns")},
    "Unfinished": {SCHEMA: ("step 0", ["done", "rewards"], "environment_feedback")},
    "Raising": {SCHEMA: ('raise KeyError("board")',)},
    "Forgetful": {RESET: ("reset", "reward=1.0", "'turn 1'", "done=False", "and then")},
    "Shared": {INSTANCES: ("self",), AT_ONCE: ("self",)},
    "Writing": {STATES: ("states['sampling_params']", "{'temperature': 1.0, ")},
    "Drawing": {SAME: ("--allow-random",), **dict.fromkeys((RESET, INSTANCES, AT_ONCE), (NOT_COMPARED,))},
    "Crashing": {SAID + UNSEEN: ("exit code 3", "step 0 of episode 0")},
    "Unmade": {SCHEMA: ("Unmade()", "__init__", "async")},
    "Plain": {SCHEMA: ("reset", "dict", "async def reset")},
}
"""Part -> failed contracts with facts of their messages. After a failure of ONE or SCHEMA the rest fails too."""
DEADLINE_S = 8
HANGING: dict[str, Facts] = {
    "hanging": {ONE: (f"{DEADLINE_S} s", "response 0", "What is 3 + 4?", "--deadline")},
    "slow_when_long": {LONG: (f"{DEADLINE_S} s", "--deadline")},
    "Blocking": {SCHEMA: ("reset of episode 0", f"{DEADLINE_S} s", "--deadline")},
}
"""Hanging parts, with a deadline that all other calls meet."""


def target_of(part: str) -> str:
    if ":" in part:
        return part
    return f"{BROKEN}:{part}"


def run_contracts(folder: Path, *arguments: str) -> tuple[dict[str, Failures], str]:
    """Run the contracts from a user's folder. Return the failures of each target, and the output."""
    report = folder / "report.xml"
    # -P: as with the command `pytest`, only the contracts themselves add the folder to the path.
    command = [sys.executable, "-P", "-m", "pytest", str(CONTRACTS), "-p", "no:cacheprovider", f"--junitxml={report}"]
    result = subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    failures: dict[str, Failures] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        test, _, case_id = case.attrib["name"].removesuffix("]").partition("[")
        target, _, parameter = case_id.partition("-")
        if parameter:
            test = f"{test}[{parameter}]"
        of_target = failures.setdefault(target, {})
        for kind in ("failure", "error", "skipped"):
            for failure in case.findall(kind):
                of_target[test] = failure.text or ""
    return failures, result.stdout


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Failures]:
    """Run the contracts of all broken parts in one process, because importing torch takes most of the time."""
    folder = tmp_path_factory.mktemp("users")
    (folder / "mine").mkdir()
    for name in ("mine/rules.py", "one_rule.py"):
        (folder / name).write_text("def score(response, label):\n    return float(response.strip() == label)\n")
    return run_contracts(folder, *(f"--target={target_of(part)}" for part in EXPECTED), "--deadline=300")[0]


def check(part: str, failures: Failures, expected: Facts) -> None:
    """Check that exactly these contracts failed, with the facts in their messages."""
    if expected.keys() & {ONE, SCHEMA}:
        rest = {name: text for name, text in failures.items() if name not in expected}
        assert all(f"{part}, not asked for" in text for text in rest.values()), rest
    else:
        assert failures.keys() == expected.keys(), failures
    for name, facts in expected.items():
        assert re.search(says(*facts), failures[name])


@pytest.mark.parametrize("part", EXPECTED)
def test_a_violation_fails_only_its_own_contract(broken: dict[str, Failures], part: str) -> None:
    check(part, broken[target_of(part)], EXPECTED[part])


@pytest.mark.full
def test_a_hanging_part_fails_at_the_deadline(tmp_path: Path) -> None:
    arguments = (f"--target={target_of(part)}" for part in HANGING)
    failures, _ = run_contracts(tmp_path, *arguments, f"--deadline={DEADLINE_S}")
    for part, expected in HANGING.items():
        check(part, failures[target_of(part)], expected)
