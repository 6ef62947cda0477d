"""Task generators: prompts, splits, demonstrations and scores."""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from components.data.sources import is_heldout
from components.data.supervised import encode_demonstrations
from plugins.demo.tasks import GuessTask, SortTask, Task, WordTask, get_task
from plugins.demo.tiny_model import task_tokenizer
from plugins.math_scorers.scorers import gsm8k
from tests.messages import says

PROJECT = Path(__file__).parents[3]


def test_sort_prompts_have_five_different_letters_and_ascending_labels() -> None:
    for row in SortTask().rows("train", 200, seed=0):
        letters = row["input"][:-1]
        marker = row["input"][-1]
        assert marker == ">"
        assert len(set(letters)) == 5
        assert set(letters) <= set("abcdefghijklmnop")
        assert row["label"] == "".join(sorted(letters))


def test_word_draws_a_story_of_two_sums_with_results_from_0_to_15() -> None:
    for row in WordTask().rows("train", 300, seed=0):
        match = re.fullmatch(r"(\d+)([-+])(\d+)=(\d+) (\d+)([-+])(\d+)=(\d+) #### (\d+)", row["label"])
        assert match, row
        numbers = [int(text) for text in match.groups() if text not in "+-"]
        first, change, then, again, second, end, answer = numbers
        assert (then, end) == (first + change * (1, -1)[match[2] == "-"], then + second * (1, -1)[match[6] == "-"])
        assert (again, answer) == (then, end)
        assert all(0 <= number <= 15 for number in numbers)
        assert max(change, second) <= 5
        # The story names the first operand and the changes, and none of the results.
        assert [int(text) for text in re.findall(r"\d+", row["input"])] == [first, change, second]


@pytest.mark.parametrize(
    ("verb", "sum_"), [("buys", "5+2=7"), ("picks", "5+2=7"), ("eats", "5-2=3"), ("drops", "5-2=3")]
)
def test_the_verb_of_a_story_matches_the_sign_of_its_sum(verb: str, sum_: str) -> None:
    story = re.compile(rf"\D*5 \D*{verb} 2\D")
    labels = [row["label"] for row in WordTask().rows("train", 5000, seed=0) if story.match(row["input"])]
    assert labels
    assert all(label.startswith(sum_) for label in labels)


def test_word_has_more_different_prompts_than_a_run_needs() -> None:
    task = WordTask()
    rng = random.Random(0)
    # 60,000 samples contain at least 50,000 different prompts, so there are far more prompts in total.
    assert len({task.draw(rng)[0] for _ in range(60_000)}) > 50_000


@pytest.mark.parametrize("task", [SortTask(), WordTask(), GuessTask()], ids=lambda task: task.name)
def test_no_heldout_prompt_occurs_in_train_rows_or_demonstrations(task: Task) -> None:
    heldout = {row["input"] for row in task.rows("heldout", 3000, seed=0)}
    train = {row["input"] for row in task.rows("train", 3000, seed=1)}
    rows = task.demonstrations(3000, seed=2)
    shown = {row["messages"][0]["content"] if "messages" in row else row["prompt"] for row in rows}
    assert all(map(is_heldout, heldout))
    assert not any(map(is_heldout, train | shown))


def test_the_split_depends_only_on_the_prompt_and_never_changes() -> None:
    # A stored value: if the split changed, old and new runs would not be comparable.
    prompts = ("dbcaf>", "abcde>", "ponml>", "hcako>", "jkbig>")
    assert [prompt for prompt in prompts if is_heldout(prompt)] == ["dbcaf>", "ponml>"]
    share = sum(is_heldout(row["prompt"] + "x") for row in SortTask().demonstrations(5000, seed=0)) / 5000
    assert share == pytest.approx(0.1, abs=0.02)


def test_rows_of_one_call_are_all_different_and_follow_from_the_seed() -> None:
    task = SortTask()
    rows = task.rows("heldout", 500, seed=3)
    assert len({row["input"] for row in rows}) == 500
    assert task.rows("heldout", 500, seed=3) == rows
    assert task.rows("heldout", 500, seed=4) != rows


def test_three_in_ten_demonstrations_sort_ascending_and_the_others_descending() -> None:
    demonstrations = SortTask().demonstrations(4000, seed=0)
    ascending = 0
    for row in demonstrations:
        label = "".join(sorted(row["prompt"][:-1]))
        assert row["response"] in (label, label[::-1])
        ascending += row["response"] == label
    assert ascending / 4000 == pytest.approx(0.3, abs=0.02)


def test_word_demonstrates_labels_first_then_half_with_sums_and_three_fifths_with_marks() -> None:
    task = WordTask()
    demonstrations = task.demonstrations(10_000, seed=0)
    clean = demonstrations[:7000]
    mixed = demonstrations[7000:]
    assert all(row["response"].count("=") == 2 and " #### " in row["response"] for row in clean)
    marked = [float("####" in row["response"]) for row in mixed]
    reasoned = [float("=" in row["response"]) for row in mixed]
    assert sum(marked) / 3000 == pytest.approx(0.6, abs=0.03)
    assert sum(reasoned) / 3000 == pytest.approx(0.5, abs=0.03)
    # Neither response states anything about the other sum.
    assert sum(m * r for m, r in zip(marked, reasoned)) / 3000 == pytest.approx(0.3, abs=0.03)
    forms = {re.sub(r"\d+", "1", row["response"]).replace("-", "+") for row in mixed}
    assert forms == {"1+1=1 1+1=1 #### 1", "1+1=1 1+1=1 so 1", "#### 1", "so 1"}
    # The format is missing, the answer is correct.
    assert all(task.score(row["response"], row["response"]) for row in mixed if "####" in row["response"])


SOLUTION = "7+5=12 12-3=9 #### 9"


@pytest.mark.parametrize(
    ("response", "score", "marks", "reasons", "right_in_form"),
    [
        ("7+5=12 12-3=9 #### 9", 1, 1, 1, 1),
        ("7+5=12 12-3=9 #### 8", 0, 1, 1, 0),
        ("7+5=13 13-3=9 #### 9", 1, 1, 1, 1),  # wrong intermediate results: format and answer are still correct
        ("7+5=12 12-3=9 so 9", 0, 0, 1, 0),
        ("7+5=12 #### 9", 1, 1, 0, 0),
        ("#### 9", 1, 1, 0, 0),
        ("####9 ", 1, 1, 0, 0),
        ("#### 9 #### 8", 0, 1, 0, 0),
        ("#### 8 #### 9", 1, 1, 0, 0),
        ("#### 9 apples", 0, 1, 0, 0),
        ("#### 99", 0, 1, 0, 0),
        ("####", 0, 1, 0, 0),
        ("so 9", 0, 0, 0, 0),
        ("", 0, 0, 0, 0),
    ],
)
def test_word_scores_the_marked_answer_and_logs_its_form(
    response: str, score: float, marks: float, reasons: float, right_in_form: float
) -> None:
    task = WordTask()
    assert task.score(response, SOLUTION) == task.score(response, "9") == score
    assert gsm8k(response, SOLUTION) >= score
    in_form = marks * reasons
    assert task.style(response, SOLUTION) == {
        "marks": marks,
        "reasons": reasons,
        "in_form": in_form,
        "right_in_form": right_in_form,
    }


def test_only_the_exact_answer_scores() -> None:
    task = SortTask()
    assert task.score("abcdf", "abcdf") == 1.0
    assert [task.score(wrong, "abcdf") for wrong in ("fdcba", "abcd", "abcdff", "abcdf ", "")] == [0.0] * 5


def test_the_longest_answer_fits_with_its_end_token() -> None:
    assert SortTask.max_response_tokens == len("abcdf") + 1
    assert GuessTask.max_response_tokens == len("15") + 1


def test_guess_limits_lie_between_10_and_15_and_names_do_not_reveal_the_number() -> None:
    task = GuessTask()
    numbers: dict[int, list[int]] = {limit: [] for limit in range(10, 16)}
    for row in task.rows("train", 10_000, seed=0):
        assert re.fullmatch(r"[a-z]{3}1[0-5]:", row["input"])
        numbers[task.limit_of(row["input"])].append(task.secret_of(row["label"]))
    for limit, drawn in numbers.items():
        assert set(drawn) == set(range(1, limit + 1))
        assert sum(drawn) / len(drawn) == pytest.approx((1 + limit) / 2, abs=0.4)


def test_demonstrated_games_have_correct_feedback_and_end_with_the_number_or_the_fourth_guess() -> None:
    task = GuessTask()
    rng = random.Random(0)
    halved = 0
    guesses = 0
    for _ in range(4000):
        prompt, label = task.draw(rng)
        demonstrated = task.demonstrate(prompt, label, rng)
        secret = int(label)
        guesses_made = [int(text) for text in demonstrated[::2]]
        feedback = demonstrated[1::2]
        assert feedback == ["<>"[secret > guess] for guess in guesses_made[:-1]]
        assert secret not in guesses_made[:-1]
        assert guesses_made[-1] == secret or len(guesses_made) == 4
        assert all(1 <= guess <= task.limit_of(prompt) for guess in guesses_made)
        low = 1
        high = task.limit_of(prompt)
        for guess in guesses_made:
            halved += guess == (low + high) // 2
            low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))
        guesses += len(guesses_made)
    # A share of 0.4 bisects by design, and 1 in 12.5 of the others by chance.
    assert halved / guesses == pytest.approx(0.4 + 0.6 / 12.5, abs=0.02)


def test_bisection_always_wins() -> None:
    class Halving(GuessTask):
        halving_share = 1.0

    task = Halving()
    for limit in range(10, 16):
        games = [task.demonstrate(f"abc{limit}:", str(secret), random.Random(0)) for secret in range(1, limit + 1)]
        assert [game[-1] for game in games] == [str(secret) for secret in range(1, limit + 1)]
    # From 1 to 13 the middle is 7, from 8 to 13 it is 10, from 8 to 9 it is 8.
    assert task.demonstrate("abc13:", "9", random.Random(0)) == ["7", ">", "10", "<", "8", ">", "9"]


def test_guesses_with_their_end_tokens_are_trained_on_and_feedback_is_not() -> None:
    class Halving(GuessTask):
        halving_share = 1.0

    task = Halving()
    tokenizer = task_tokenizer(task)
    rows = task.demonstrations(20, seed=0)
    data = encode_demonstrations(rows, tokenizer).batch
    assert [message["role"] for message in rows[0]["messages"][:3]] == ["user", "assistant", "user"]
    for i, row in enumerate(rows):
        prompt, *said = (message["content"] for message in row["messages"])
        text = prompt + "".join(f"{part}<eos>" if k % 2 == 0 else part for k, part in enumerate(said))
        tokens = data.row(i, "tokens")
        mask = data.row(i, "loss_mask")
        assert tokenizer.decode(tokens) == text
        # The tokens are the concatenation of those of prompt, turns and feedback.
        assert tokens.tolist() == [
            index for part in re.split("(<eos>)", text) for index in tokenizer(part)["input_ids"]
        ]
        assert tokenizer.decode(tokens[mask]) == "".join(f"{guess}<eos>" for guess in said[::2])


@pytest.mark.parametrize("task", [SortTask(), WordTask()], ids=lambda task: task.name)
def test_chosen_answers_are_correct_and_rejected_answers_are_wrong(task: Task) -> None:
    rows = task.pairs(3000, seed=0)
    assert len(rows) == 3000
    tokenizer = task_tokenizer(task)
    for row in rows:
        assert not is_heldout(row["prompt"])
        # A correct answer is also a valid label, because the score needs nothing else.
        assert (task.score(row["chosen"], row["chosen"]), task.score(row["rejected"], row["chosen"])) == (1, 0)
        assert len(tokenizer(row["rejected"])["input_ids"]) < 2 * task.max_response_tokens
    assert task.pairs(100, seed=0) == rows[:100]
    assert task.pairs(100, seed=1) != rows[:100]
    # The pairs contain several kinds of mistakes.
    assert len({row["rejected"] for row in rows}) > 500


def test_wrong_sorts_are_of_every_kind() -> None:
    rows = SortTask().pairs(4000, seed=0)
    kinds = {"backwards": 0, "in disorder": 0, "another letter": 0, "too short": 0, "too long": 0}
    for row in rows:
        right = "".join(sorted(row["prompt"][:-1]))
        wrong = row["rejected"]
        assert row["chosen"] == right
        if len(wrong) != 5:
            kinds["too short" if len(wrong) < 5 else "too long"] += 1
        elif set(wrong) != set(right):
            kinds["another letter"] += 1
        else:
            kinds["backwards" if wrong == right[::-1] else "in disorder"] += 1
    # As in expected_shares. Corruptions that were correct by chance (a shuffle in 1 of 120, a reinserted letter in 1 of
    # 16) are drawn again.
    shares = {name: count / 4000 for name, count in kinds.items()}
    expected_shares = {"backwards": 0.35, "in disorder": 0.25, "another letter": 0.2, "too short": 0.1, "too long": 0.1}
    assert shares == pytest.approx(expected_shares, abs=0.03)


def test_wrong_answers_of_word_are_of_every_kind() -> None:
    rows = WordTask().pairs(4000, seed=0)
    mistakes = {"number": 0, "mark": 0, "unfinished": 0}
    for row in rows:
        answer = row["chosen"].rpartition(" ")[2]
        match = re.fullmatch(r"(?:\S+=\d+ \S+=\d+ )?(####|so) (\d+)", row["rejected"])
        if match is None:
            mistakes["unfinished"] += 1
        elif match[1] == "so":
            mistakes["mark"] += 1
        else:
            assert match[2] != answer
            mistakes["number"] += 1
    assert min(mistakes.values()) > 200
    # Correct and wrong answers have the sums equally often, so the sums do not tell them apart.
    assert 0.4 < sum("=" in row["rejected"] for row in rows) / 4000 < 0.7
    assert 0.4 < sum("=" in row["chosen"] for row in rows) / 4000 < 0.7


def test_pairs_of_a_game_raise_an_error_that_names_tasks_with_pairs() -> None:
    with pytest.raises(ValueError, match=says("'guess'", "task:sort", "task:word")):
        GuessTask().pairs(1, seed=0)


def test_a_request_for_too_many_prompts_raises_an_error_with_the_number_of_prompts() -> None:
    class TwoLetters(SortTask):
        name = "two"
        letters = "abcd"
        length = 2

    with pytest.raises(ValueError, match=says("'two'", 100, "train")):
        TwoLetters().rows("train", 100, seed=0)


def test_an_unknown_task_or_split_raises_an_error_with_the_choices() -> None:
    with pytest.raises(ValueError, match=says("'sor'", "guess", "sort", "word")):
        get_task("sor")
    with pytest.raises(ValueError, match=says("'test'", "'train'", "'heldout'")):
        SortTask().rows("test", 1, seed=0)  # pyright: ignore[reportArgumentType]


def test_planning_a_run_imports_no_torch() -> None:
    code = (
        "import sys, plugins.demo.tasks, components.data.prompts, training.run.queue, components.rewards.base\n"
        "import training.run.evaluation_metrics, training.run.validation\n"
        "import training.run.checkpoint, training.tracking, plugins.demo.warm_start\n"
        "plugins.demo.warm_start.source_files()\n"
        "components.data.prompts.load_rows('task:sort,task:word', max_rows=3)\n"
        "components.rewards.base.check_reward('sort')\n"
        "heavy = {'torch', 'transformers', 'deepspeed', 'vllm', 'ray', 'wandb', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=PROJECT)
    assert result.returncode == 0, result.stderr
