"""Each broken promise is found, by the contract that is about it and with words that help; none is found otherwise.

The contracts run as users run them: `pytest tests/contracts --target ...`, in a process of its own.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.messages import says

CONTRACTS = Path(__file__).resolve().parent
BROKEN = "tests.contracts.broken_parts"

Failures = dict[str, str]
"""Messages of failed tests, by name."""
Facts = dict[str, tuple[object, ...]]
"""What they have to hold."""
NOT_COMPARED = "nothing can be compared"
"""What is said where a promise cannot be tried because another is broken."""

ONE, BATCH = "test_a_batch_of_one_is_rewarded", "test_each_answer_of_a_batch_gets_one_finite_reward"
TEXT = "test_whatever_a_policy_writes_is_rewarded"
LABEL = "test_an_unusual_label_is_rewarded_or_refused_with_a_value_error"
ALONE = "test_an_answer_gets_alone_what_it_gets_in_a_batch"
ORDER = "test_the_order_of_a_batch_does_not_matter"
AGAIN = "test_the_same_answers_get_the_same_rewards_again_and_in_a_new_process"
ARGUMENTS = "test_its_arguments_stay_as_they_were"
SCORES = "test_scores_if_it_gives_them_are_from_0_to_1"
LOGS = "test_extra_logs_are_one_number_for_each_answer"
LONG = "test_a_very_long_answer_is_rewarded_before_the_deadline"

SCHEMA = "test_reset_and_step_return_what_they_have_to"
ENDS = "test_an_episode_ends_within_the_limit_of_turns"
STATES = "test_the_states_it_is_given_stay_as_they_were"
SAID = "test_whatever_a_policy_says_is_answered"
SAME = "test_the_same_actions_give_the_same_episode"
RESET = "test_reset_begins_anew"
INSTANCES = "test_two_instances_share_no_state"
AT_ONCE = "test_episodes_that_run_at_once_give_what_they_give_alone"

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
        **{LABEL + f"[{what}]": ("AttributeError", "ValueError") for what in ("a list", "a number", "an object")},
    },
    "percent": {SCORES: (50, "'scores'")},
    "dying": dict.fromkeys((TEXT + UNSEEN, LOGS), ("exit code 3",)),
    # Parts in the user's folder, in order.
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
"""What fails for each part, with facts of its message. After ONE and SCHEMA a part is asked for nothing more."""
DEADLINE_S = 8
HANGING: dict[str, Facts] = {
    "hanging": {ONE: (f"{DEADLINE_S} s", "response 0", "What is 3 + 4?", "--deadline")},
    "slow_when_long": {LONG: (f"{DEADLINE_S} s", "--deadline")},
    "Blocking": {SCHEMA: ("reset of episode 0", f"{DEADLINE_S} s", "--deadline")},
}
"""The same, with a deadline that all calls meet but those that hang."""


def target_of(part: str) -> str:
    return part if ":" in part else f"{BROKEN}:{part}"


def run_contracts(folder: Path, *arguments: str) -> tuple[dict[str, Failures], str]:
    """Run them from a folder of the user's; return the failures of each target, and what was printed."""
    report = folder / "report.xml"
    # -P: the folder comes on the path by what the contracts do for it, as with the command `pytest`.
    command = [sys.executable, "-P", "-m", "pytest", str(CONTRACTS), "-p", "no:cacheprovider", f"--junitxml={report}"]
    result = subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    failures: dict[str, Failures] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        test, _, case_id = case.attrib["name"].removesuffix("]").partition("[")
        target, _, what = case_id.partition("-")
        found = failures.setdefault(target, {})
        for kind in ("failure", "error", "skipped"):
            for failure in case.findall(kind):
                found[f"{test}[{what}]" if what else test] = failure.text or ""
    return failures, result.stdout


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Failures]:
    """The failures of all broken parts, which one process asks: importing torch takes the longest."""
    folder = tmp_path_factory.mktemp("users")
    (folder / "mine").mkdir()
    for name in ("mine/rules.py", "one_rule.py"):
        (folder / name).write_text("def score(response, label):\n    return float(response.strip() == label)\n")
    return run_contracts(folder, *(f"--target={target_of(part)}" for part in EXPECTED), "--deadline=300")[0]


def check(part: str, failures: Failures, expected: Facts) -> None:
    """See that these contracts failed and no others, and that each says why."""
    if expected.keys() & {ONE, SCHEMA}:
        rest = {name: text for name, text in failures.items() if name not in expected}
        assert all(f"{part}, not asked for" in text for text in rest.values()), rest
    else:
        assert failures.keys() == expected.keys(), failures
    for name, facts in expected.items():
        assert re.search(says(*facts), failures[name])


@pytest.mark.parametrize("part", EXPECTED)
def test_a_broken_promise_is_found_by_its_contract_alone(broken: dict[str, Failures], part: str) -> None:
    check(part, broken[target_of(part)], EXPECTED[part])


@pytest.mark.full
def test_a_part_that_hangs_is_found_by_its_deadline(tmp_path: Path) -> None:
    arguments = (f"--target={target_of(part)}" for part in HANGING)
    failures, _ = run_contracts(tmp_path, *arguments, f"--deadline={DEADLINE_S}")
    for part, expected in HANGING.items():
        check(part, failures[target_of(part)], expected)
