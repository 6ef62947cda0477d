"""The shipped environments: who knows how reaches the reward, who does not gets none, and nonsense is answered."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agents.environment import AgentInstanceBase
from agents.environments import calculator, code, guess, gymnasium, textarena
from agents.loading import check_agent, load_agent
from agents.options import AgentOptions
from agents.player import open_player
from components.batch import Batch
from components.data.tasks import GuessTask, WordTask
from components.data.text import TextEncoder, load_tokenizer
from components.data.tiny_model import learnt_tokenizer, tiny_model
from components.engines.config import HFRolloutConfig, SamplingConfig

Steps = list[dict[str, Any]]
Player = Callable[[str], str]
"""What is said, to what is answered."""

LAKE = {"env": "FrozenLake-v1", "seed": 3, "options": {"is_slippery": False}}
NUMBER = {"env": "GuessTheNumber-v0", "seed": 3}
ADD = {"tests": ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(3, 4) == 7"]}
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "%s"}}</tool_call>'


def text_of(said: Any) -> str:
    return said if isinstance(said, str) else "\n".join(message["content"] for message in said)


def play(world: AgentInstanceBase, prompt: str, label: Any, player: Player, turns: int = 30) -> Steps:
    """Play an episode to its end, or so many turns; what each step returned."""

    async def episode() -> Steps:
        said = (await world.reset({"observation": prompt, "label": label}))["observation"]
        steps: Steps = []
        while len(steps) < turns and not (steps and steps[-1]["done"]):
            states = {"observation_text": "", "action_text": player(text_of(said)), "label": label}
            steps.append(await world.step(states))
            said = steps[-1]["environment_feedback"]
        return steps

    return asyncio.run(episode())


def saying(*words: str) -> Player:
    """One after the other, whatever is said."""
    left = list(words)
    return lambda _said: left.pop(0)


def halving(low: int, high: int, smaller: str, larger: str, write: str = "{}") -> Player:
    """Guess the middle of what is left."""
    bounds = [low, high]

    def guess_middle(said: str) -> str:
        middle = sum(bounds) // 2
        if smaller in said:
            bounds[1] = middle - 1
        elif larger in said:
            bounds[0] = middle + 1
        return write.format(sum(bounds) // 2)

    return guess_middle


def rewards(steps: Steps) -> list[float]:
    return [step["rewards"] for step in steps]


# guess


@pytest.mark.parametrize("row", GuessTask().rows("train", 20, seed=1))
def test_halving_finds_every_number_in_its_turns(row: dict[str, str]) -> None:
    limit = GuessTask().limit_of(row["input"])
    steps = play(guess.AgentInstance(), row["input"], row["label"], halving(1, limit, "<", ">"))
    assert rewards(steps) == [0.0] * (len(steps) - 1) + [1.0]
    assert steps[-1]["scores"] == 1.0 and len(steps) <= GuessTask.turns


def test_a_game_that_is_not_won_ends_after_its_turns_and_what_is_no_number_costs_one() -> None:
    steps = play(guess.AgentInstance(), "abc12:", "7", saying("12", "<", "", "3"))
    assert [step["environment_feedback"] for step in steps] == ["<", ":", ":", ">"]
    assert rewards(steps) == [0.0] * 4
    assert [step["done"] for step in steps] == [False, False, False, True]
    assert steps[-1]["extra_logs"] == {"guesses": 4, "invalid_guesses": 2}


def test_everything_that_the_guessing_game_says_is_in_its_tasks_alphabet() -> None:
    for said in ("9" * 5000, "x", "3", "7", "٣"):
        (step,) = play(guess.AgentInstance(), "abc12:", "5", saying(said), turns=1)
        assert set(step["environment_feedback"]) <= set(GuessTask.alphabet)


# calculator


def test_word_problems_are_solved_with_a_calculator() -> None:
    (row,) = WordTask().rows("train", 1, seed=3)
    first, second, answer = re.split(r" #### | ", row["label"])
    calls = CALL % first.partition("=")[0] + CALL % second.partition("=")[0]
    steps = play(calculator.AgentInstance(), row["input"], row["label"], saying(calls, f"So #### {answer}"))
    assert [message["content"] for message in steps[0]["environment_feedback"]] == [
        first.partition("=")[2],
        second.partition("=")[2],
    ]
    assert rewards(steps) == [0.0, 1.0]
    assert steps[-1]["extra_logs"] == {"tool_calls": 2, "tool_errors": 0}
    assert rewards(play(calculator.AgentInstance(), row["input"], row["label"], saying("#### 99"))) == [0.0]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3 + 4) * 2.50", "17.5"),
        ("7/2", "3.5"),
        ("6/2", "3"),
        ("-7 // 2", "-4"),
        ("7 % 4 ** 1", "3"),
        ("0.1 + 0.2", "0.3"),
        ("2**64", "18446744073709551616"),
        (" +1", "1"),
    ],
)
def test_the_calculator_does_arithmetic(expression: str, value: str) -> None:
    assert calculator.calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 +",
        "1 if 1 else 2",
        "__import__('os').system('true')",
        "abs(1)",
        "True + 1",
        "'a' * 9",
        "9 ** 9 ** 9",
        "(10 ** 64) ** 64",
        "1e308 * 10",
        "(-1) ** 0.5",
        "(" * 100 + "1" + ")" * 101,
        "1" * 300,
        "\0",
    ],
)
def test_the_calculator_does_nothing_else_and_not_for_long(expression: str) -> None:
    with pytest.raises(ValueError, match=r"expression|arithmetic|too large"):
        calculator.calculator(expression)


# code


def test_code_that_passes_its_tests_is_rewarded_after_it_was_told_which_one_failed() -> None:
    wrong, right = "```python\ndef add(a, b): return 3\n```", "So:\n```\ndef add(a, b):\n    return a + b\n```\nDone."
    steps = play(code.AgentInstance(), "Write add(a, b).", json.dumps(ADD), saying(wrong, right))
    assert rewards(steps) == [0.0, 1.0]
    said = text_of(steps[0]["environment_feedback"])
    assert said.startswith("Test 2 of 3 failed.\nassert add(2, 2) == 4\nTraceback")
    assert "AssertionError" in said and "add(1, 2)" not in said
    assert [step["extra_logs"]["passed_share"] for step in steps] == [pytest.approx(1 / 3), 1.0]


def test_the_last_test_is_never_told() -> None:
    (step,) = play(
        code.AgentInstance(),
        "",
        ADD,
        saying("add = {(1, 2): 3, (2, 2): 4}.get\nadd = lambda a, b: min(a + b, 4)"),
        turns=1,
    )
    assert text_of(step["environment_feedback"]) == "Test 3 of 3 failed.\nTry again.\n"
    (step,) = play(code.AgentInstance(), "", {"tests": "assert add(1, 2) == 3"}, saying("add = max"), turns=1)
    assert text_of(step["environment_feedback"]) == "Test 1 of 1 failed.\nTry again.\n"
    (step,) = play(code.AgentInstance(), "", {"tests": [{"input": "1", "output": "2"}]}, saying("print(3)"), turns=1)
    assert text_of(step["environment_feedback"]) == "Test 1 of 1 failed.\nInput:\n1\nFound:\n3\nTry again.\n"


@pytest.mark.parametrize(
    "look",
    [
        "open(__file__).read()",
        "os.pread(0, 9999, 0).decode()",
        "open('/proc/self/fd/0').read()",
        "repr(globals())",
        "repr(vars(sys.modules['__main__']))",
    ],
)
def test_an_answer_finds_neither_test_nor_mark_where_it_may_look_by_the_way(look: str) -> None:
    program = (
        f"import os, sys\nadd = max\nprint('found:', [line for line in ({look}).splitlines() if 'assert' in line])"
    )
    (step,) = play(code.AgentInstance(), "", ADD, saying(program), turns=1)
    said = text_of(step["environment_feedback"])
    assert "found: []" in said or 'found: ["print' in said or "['print" in said, said


@pytest.mark.parametrize("trick", ["exec = lambda *_: None", "print = compile = str", "import os\nos.write = print"])
def test_an_answer_that_redefines_what_judges_it_gains_nothing(trick: str) -> None:
    (step,) = play(code.AgentInstance(), "", ADD, saying(f"{trick}\nadd = max"), turns=1)
    assert step["rewards"] == 0.0
    (step,) = play(code.AgentInstance(), "", ADD, saying(f"{trick}\ndef add(a, b): return a + b"), turns=1)
    assert step["rewards"] == 1.0


def test_a_fault_is_shown_at_its_line_of_the_answer() -> None:
    program = "def add(a, b):\n    return 1 / 0"
    (step,) = play(code.AgentInstance(), "", ADD, saying(program), turns=1)
    assert text_of(step["environment_feedback"]) == (
        "Test 1 of 3 failed.\nassert add(1, 2) == 3\nTraceback (most recent call last):\n"
        '  File "<test>", line 1, in <module>\n  File "main.py", line 2, in add\n    return 1 / 0\n'
        "           ~~^~~\nZeroDivisionError: division by zero\nTry again.\n"
    )


RIGHT, WRONG = "add = lambda a, b: a + b", "add = max"


@pytest.mark.parametrize(
    "text",
    [
        f"```python\n{RIGHT}\n```\nRun it:\n```bash\npython main.py\n```\nIt prints:\n```text\n3\n```\n",
        f"```bash\nls\n```\n```Python3\n{RIGHT}\n```\n",
        f"```py\n{WRONG}\n```\nNo:\n``` python title=x\n{RIGHT}\n",
        f"```\n{RIGHT}\n```",
        RIGHT,
    ],
)
def test_the_last_block_of_python_is_the_answer(text: str) -> None:
    (step,) = play(code.AgentInstance(), "", {"tests": ADD["tests"][:1]}, saying(text), turns=1)
    assert step["rewards"] == 1.0


def test_a_program_is_judged_by_all_that_it_prints() -> None:
    label = {
        "tests": [{"input": "3", "output": "0\n1\n2\n"}, {"input": "5000", "output": "\n".join(map(str, range(5000)))}]
    }
    wrong, right = "print(0)", "for i in range(int(input())): print(i, end=' \\n')"
    steps = play(code.AgentInstance(), "Count.", label, saying(wrong, right))
    assert rewards(steps) == [0.0, 1.0]
    said = text_of(steps[0]["environment_feedback"])
    assert said == "Test 1 of 2 failed.\nInput:\n3\nExpected:\n0\n1\n2\n\nFound:\n0\nTry again.\n"


@pytest.mark.parametrize("trick", ["raise SystemExit", "import os; os._exit(0)", "def add(a, b):", "[" * 200])
def test_a_program_that_ends_early_or_is_none_passes_no_test(trick: str) -> None:
    (step,) = play(code.AgentInstance(), "", ADD, saying(trick), turns=1)
    assert (step["rewards"], step["scores"]) == (0.0, 0.0)


def test_the_tries_are_limited() -> None:
    steps = play(code.AgentInstance(), "", ADD, lambda _said: "add = max")
    assert rewards(steps) == [0.0] * 4 and steps[-1]["extra_logs"]["tries"] == 4


# textarena


def test_a_game_of_textarena_is_won_by_who_knows_it_and_not_by_who_does_not() -> None:
    steps = play(
        textarena.AgentInstance(), "Play.", json.dumps(NUMBER), halving(1, 20, "lower", "higher", "I say [{}].")
    )
    assert rewards(steps) == [0.0] * (len(steps) - 1) + [1.0] and steps[-1]["scores"] == 1.0
    # Two moves in a row that are none end it.
    lost = play(textarena.AgentInstance(), "Play.", NUMBER, saying("99", "no"))
    assert rewards(lost) == [0.0, 0.0] and lost[-1]["done"]
    assert "invalid move" in text_of(lost[0]["environment_feedback"])
    assert lost[-1]["extra_logs"] == {"invalid_move": 1.0}


def test_a_move_without_brackets_gets_them_and_the_game_does_not_repeat_it() -> None:
    (step,) = play(textarena.AgentInstance(), "Play.", NUMBER, saying(" 20 "), turns=1)
    assert text_of(step["environment_feedback"]) == "The target number is lower.\n"


def test_the_rules_follow_the_prompt_and_the_seed_makes_the_game() -> None:
    def begin(label: dict[str, Any]) -> str:
        return text_of(
            asyncio.run(textarena.AgentInstance().reset({"observation": "Hi.", "label": label}))["observation"]
        )

    games = [begin({"env": "FifteenPuzzle-v0", "seed": seed}) for seed in (1, 1, 2)]
    assert games[0].startswith("Hi.\n\nYou are")
    assert games[0] == games[1] != games[2]


def test_games_side_by_side_are_the_same_as_alone_and_leave_the_common_numbers_alone() -> None:
    async def boards(worlds: list[textarena.AgentInstance]) -> list[list[str]]:
        """Of 2048, which draws a new tile after each move."""
        for world in worlds:
            await world.reset({"observation": "", "label": {"env": "2048-v0", "seed": 5}})
        said: list[list[str]] = [[] for _ in worlds]
        for move in ("up", "left", "down"):
            for world, heard in zip(worlds, said):
                heard.append(text_of((await world.step({"action_text": move}))["environment_feedback"]))
        return said

    random.seed(7)
    before = random.getstate()
    (alone,) = asyncio.run(boards([textarena.AgentInstance()]))
    assert asyncio.run(boards([textarena.AgentInstance() for _ in range(3)])) == [alone] * 3
    assert random.getstate() == before


@pytest.mark.parametrize("game", textarena.GAMES.split())
def test_every_listed_game_plays_without_a_download(game: str) -> None:
    (step,) = play(textarena.AgentInstance(), "", {"env": f"{game}-v0", "seed": 1}, saying("1"), turns=1)
    assert -1.0 <= step["rewards"] <= 1.0 and text_of(step["environment_feedback"]).strip()


@pytest.mark.parametrize("name", ["TicTacToe-v0", "Wordle-v0", "Countdown-v0", "GuessTheNumber", "Nonsense-v0"])
def test_games_of_several_players_or_with_downloads_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"the label's env is '.*'; set it to <game>-v0, for one of .*GuessTheNumber"):
        play(textarena.AgentInstance(), "", {"env": name}, saying())


# gymnasium


def test_a_game_of_gymnasium_is_won_by_who_knows_it_and_not_by_who_does_not() -> None:
    way = saying("down", "I go DOWN.", "right", "1, no: 2", "down", "right")
    steps = play(gymnasium.AgentInstance(), "Play.", json.dumps(LAKE), way)
    assert rewards(steps) == [0.0] * 5 + [1.0] and steps[-1]["scores"] == 1.0
    hole = play(gymnasium.AgentInstance(), "Play.", LAKE, saying("right", "down"))
    assert rewards(hole) == [0.0, 0.0] and hole[-1]["done"] and hole[-1]["scores"] == 0.0


def test_the_state_is_written_and_what_names_no_action_is_answered() -> None:
    world = gymnasium.AgentInstance()
    begin = asyncio.run(world.reset({"observation": "Play.", "label": LAKE}))["observation"]
    assert begin == [
        {
            "role": "user",
            "content": "Play.\nYou stand at [ ]. Reach G; H are holes.\nWrite one of: left, down, right, up.\n"
            "[S]FFF\nFHFH\nFFFH\nHFFG\n",
        }
    ]
    step = asyncio.run(world.step({"action_text": "jump"}))
    assert text_of(step["environment_feedback"]).startswith("That names no action. Write one of: left")
    assert (step["rewards"], step["done"], step["extra_logs"]) == (0.0, False, {"invalid_actions": 1})


def test_a_taxi_sees_its_passenger_its_goal_and_itself() -> None:
    world = gymnasium.AgentInstance()
    asyncio.run(world.reset({"observation": "", "label": {"env": "Taxi-v4", "seed": 3}}))
    # The taxi at the upper middle, the passenger at R, who wants to Y.
    assert world._shown(None) == (
        "+---------+\n|<R>: |[ ]: :G|\n| : | : : |\n| : : : : |\n| | : | : |\n|(Y)| : |B: |\n+---------+\n"
    )
    way = ["south", "south", "west", "west", "north", "north", "pickup", "south", "south", "south", "south", "dropoff"]
    found = [asyncio.run(world.step({"action_text": word})) for word in way]
    assert "[_]" in text_of(found[7]["environment_feedback"])
    # 20 for arriving, and -1 for each of the eleven steps before.
    assert sum(rewards(found)) == 20 - 11
    assert (found[-1]["scores"], found[-1]["done"]) == (1.0, True)


def test_blackjack_says_what_the_cards_make() -> None:
    label = {"env": "Blackjack-v1", "seed": 3}
    steps = play(gymnasium.AgentInstance(), "", label, saying("hit", "stick"))
    assert text_of(steps[0]["environment_feedback"]) == "Your cards make 17; the dealer shows 10.\n"
    assert rewards(steps) == [0.0, -1.0] and steps[-1]["scores"] == 0.0


def test_a_game_that_takes_too_long_is_over() -> None:
    label = {**LAKE, "options": {"is_slippery": False, "max_episode_steps": 3}}
    steps = play(gymnasium.AgentInstance(), "", label, lambda _said: "left")
    assert [step["done"] for step in steps] == [False, False, True]
    assert steps[-1]["scores"] == 0.0


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ({"env": "Nonsense-v1"}, "gymnasium cannot make the label's"),
        ({"env": "FrozenLake-v1", "options": {"no": 1}}, "gymnasium cannot make the label's"),
        ({"env": "Pendulum-v1"}, "Pendulum-v1 has the actions Box.*set env to e.g. FrozenLake-v1"),
        ("FrozenLake-v1", "the label 'FrozenLake-v1' is no JSON object with 'env'; set data.label_key"),
        ({"game": 1}, "is no JSON object with 'env'"),
    ],
)
def test_a_label_that_makes_no_game_says_what_to_set(label: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        play(gymnasium.AgentInstance(), "", label, saying())


# all


@pytest.mark.parametrize("name", ["textarena", "gymnasium"])
def test_a_library_that_is_not_installed_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=f"env:{name} needs {name}, .*; run: bash scripts/setup.sh recipes games"):
        load_agent(f"env:{name}")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that has learnt nothing, with a chat template."""
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = learnt_tokenizer(["Play the game. Write one of: 1 2 3 [user] [assistant] [system] [tool]"] * 8, 300)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tiny_model(tokenizer, seed=0, hidden=32, layers=1, max_positions=4096).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "label"),
    [("guess", "7"), ("calculator", "#### 7"), ("code", json.dumps(ADD)), ("textarena", NUMBER), ("gymnasium", LAKE)],
)
def test_an_untrained_policy_plays_every_environment_without_an_error(name: str, label: Any, policy: Path) -> None:
    check_agent(f"env:{name}")
    agent = AgentOptions(func_path=f"env:{name}", max_turns=3)
    player = open_player(str(policy), HFRolloutConfig(), agent, lambda: load_tokenizer(policy))
    prompt = TextEncoder(load_tokenizer(policy)).encode_prompt("Play the game.")
    ids = {"prompt_id": torch.zeros(4, dtype=torch.int64), "sample_id": torch.arange(4)}
    objects = {"prompt": ["Play the game."] * 4, "label": [label] * 4}
    batch = player.play(Batch.from_rows({"tokens": [prompt] * 4}, ids, objects), SamplingConfig(max_new_tokens=5))
    player.close()
    assert batch["error"] == [""] * 4
    assert set(batch["status"]) <= {"finished", "truncated"}
    assert int(batch["num_turns"].min()) >= 1
