"""Each broken promise is found, by the contract that is about it and with words that help; none is found otherwise.

The contracts run as users run them: `pytest tests/contracts --target ...`, in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

CONTRACTS = Path(__file__).resolve().parent
BROKEN = "tests.contracts.broken_parts"

Failures = dict[str, str]
"""Messages of failed tests, by name."""

ONE, BATCH = "test_a_batch_of_one_is_rewarded", "test_each_answer_of_a_batch_gets_one_finite_reward"
TEXT = "test_whatever_a_policy_writes_is_rewarded"
LABEL = "test_an_unusual_label_is_rewarded_or_refused_with_a_value_error"
ALONE = "test_an_answer_gets_alone_what_it_gets_in_a_batch"
ORDER = "test_the_order_of_a_batch_does_not_matter"
AGAIN = "test_the_same_answers_get_the_same_rewards_again_and_in_a_new_process"
ARGUMENTS = "test_its_arguments_stay_as_they_were"
SCORES = "test_scores_if_it_gives_them_are_from_0_to_1"
LOGS = "test_extra_logs_have_the_same_names_for_every_answer"
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
EXPECTED: dict[str, Failures] = {
    "one_for_all": {
        BATCH: "'rewards' has the shape (1,); give one number for each of the 8 queries",
        **dict.fromkeys((ALONE, ORDER, AGAIN, LOGS), "give one number for each of the"),
    },
    "text_logs": {ONE: "extra_logs['verdict'] must be numbers, found a str among them"},
    "hanging": {ONE: "no result after 2 s (answer 0, prompt 'What is 3 + 4?"},
    "drawn": {
        AGAIN: "asked again it gave another reward; make it depend on its arguments alone",
        **dict.fromkeys((ALONE, ORDER), "nothing can be compared: asked again it gave another reward"),
    },
    "hashed": {AGAIN: "asked in a new process it gave another reward"},
    "centred": {ALONE: "an answer alone got another reward than in a batch"},
    "sorted_rewards": {
        ORDER: "in another order the answers got other rewards; return them in the order of the queries",
        ALONE: "an answer alone got another reward than in a batch",
    },
    "tidying": {ARGUMENTS: "ChangedArguments: queries were ['What is"},
    "word_count": {
        TEXT + "[an empty response]": "ZeroDivisionError: division by zero",
        TEXT + "[white space only]": "A policy writes such things: give a low reward instead.",
        LOGS: "asked for usual and unusual answers together",
    },
    "label_text": {
        LABEL + "[no label (None)]": "AttributeError: 'NoneType' object has no attribute 'strip'",
        **{LABEL + f"[{what}]": "raise a ValueError that says" for what in ("a list", "a number", "an object")},
    },
    "percent": {SCORES: "gave the score 50"},
    "some_logs": {LOGS: "extra_logs['empty'] came for some answers and not for answer 0"},
    "slow_when_long": {LONG: "Answer within 2 s, or allow more with --deadline."},
    "dying": {
        TEXT + UNSEEN: "the process that ran it ended: exit code 3",
        LOGS: "the process that ran it ended: exit code 3",
    },
    # Parts in the user's folder, in order.
    "mine.rules:score": {},
    "one_rule.py:score": {},
    "Endless": {ENDS: "episode 0 was not done after 20 turns; count them in step and return done"},
    "Unfinished": {SCHEMA: "step 0 returned a dict with the keys ['done', 'rewards']; return a dict with rewards, en"},
    "Raising": {SCHEMA: 'raise KeyError("board")'},
    "Forgetful": {RESET: "gave StepResult(reward=1.0, score=1.0, feedback='turn 1', done=False, logs={}), and then St"},
    "Shared": {INSTANCES: "keep its state in self", AT_ONCE: "at once the episodes went otherwise than alone"},
    "Writing": {STATES: "changed states['sampling_params'] from {'temperature': 1.0, "},
    "Drawing": {
        SAME: "the same actions gave another episode",
        **dict.fromkeys((RESET, INSTANCES, AT_ONCE), "nothing can be compared"),
    },
    "Blocking": {SCHEMA: "reset of episode 0 did not return within 2 s"},
    "Crashing": {SAID + UNSEEN: "its process ended with exit code 3 in step 0 of episode 0"},
    "Unmade": {SCHEMA: "an agent is made without arguments, by an __init__ that is not async"},
    "Plain": {SCHEMA: "reset returned a dict that cannot be awaited; write async def reset"},
}
"""What fails for each part, with words of its message. After ONE and SCHEMA a part is asked for nothing more."""


def target_of(part: str) -> str:
    return part if ":" in part else f"{BROKEN}:{part}"


def run_contracts(folder: Path, *arguments: str) -> tuple[dict[str, Failures], str]:
    """Run them from a folder of the user's; return the failures of each target, and what was printed."""
    report = folder / "report.xml"
    # -P: the folder comes on the path by what the contracts do for it, as with the command `pytest`.
    command = [sys.executable, "-P", "-m", "pytest", str(CONTRACTS), "-p", "no:cacheprovider", f"--junitxml={report}"]
    result = subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=110)
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
    return run_contracts(folder, *(f"--target={target_of(part)}" for part in EXPECTED), "--deadline=2")[0]


@pytest.mark.parametrize("part", EXPECTED)
def test_a_broken_promise_is_found_by_its_contract_alone(broken: dict[str, Failures], part: str) -> None:
    failures, expected = broken[target_of(part)], EXPECTED[part]
    if expected.keys() & {ONE, SCHEMA}:
        rest = {name: text for name, text in failures.items() if name not in expected}
        assert all(f"{part}, not asked for" in text for text in rest.values()), rest
    else:
        assert failures.keys() == expected.keys(), failures
    for name, words in expected.items():
        assert words in failures[name]
