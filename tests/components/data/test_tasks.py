"""The generators of tasks: what is drawn, what is kept apart, what is scored."""

import subprocess
import sys
from pathlib import Path

import pytest

from components.data.tasks import SortTask, get_task, is_heldout

PROJECT = Path(__file__).parents[3]


def test_sort_asks_for_five_different_letters_in_ascending_order() -> None:
    for row in SortTask().rows("train", 200, seed=0):
        letters, marker = row["input"][:-1], row["input"][-1]
        assert marker == ">"
        assert len(set(letters)) == 5
        assert set(letters) <= set("abcdefghijklmnop")
        assert row["label"] == "".join(sorted(letters))


def test_no_heldout_prompt_occurs_in_train_rows_or_demonstrations() -> None:
    task = SortTask()
    heldout = {row["input"] for row in task.rows("heldout", 3000, seed=0)}
    train = {row["input"] for row in task.rows("train", 3000, seed=1)}
    shown = {row["prompt"] for row in task.demonstrations(3000, seed=2)}
    assert all(map(is_heldout, heldout))
    assert not any(map(is_heldout, train | shown))


def test_held_out_is_decided_by_the_prompt_alone_and_stays_as_it_is() -> None:
    # Noted once: were the split to move, old and new runs could not be compared.
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


def test_only_the_exact_answer_scores() -> None:
    task = SortTask()
    assert task.score("abcdf", "abcdf") == 1.0
    assert [task.score(wrong, "abcdf") for wrong in ("fdcba", "abcd", "abcdff", "abcdf ", "")] == [0.0] * 5


def test_the_longest_answer_fits_with_its_end_token() -> None:
    assert SortTask.max_response_tokens == len("abcdf") + 1


def test_asking_for_more_prompts_than_exist_says_how_many_there_are() -> None:
    class TwoLetters(SortTask):
        name = "two"
        letters = "abcd"
        length = 2

    with pytest.raises(ValueError, match=r"100 different train prompts and found only \d+; ask for fewer"):
        TwoLetters().rows("train", 100, seed=0)


def test_an_unknown_task_or_split_names_the_choices() -> None:
    with pytest.raises(ValueError, match=r"no task 'sor'; set it to one of: .*sort"):
        get_task("sor")
    with pytest.raises(ValueError, match="'train' or 'heldout'"):
        SortTask().rows("test", 1, seed=0)  # pyright: ignore[reportArgumentType]


def test_planning_a_run_imports_no_torch() -> None:
    code = (
        "import sys, components.data.tasks, components.data.prompts, components.data.stream, components.data.rewards\n"
        "import components.checkpoint, components.tracking, components.warm_start\n"
        "from components.warm_start import WarmStartSettings, warm_start_path\n"
        "warm_start_path(WarmStartSettings())\n"
        "components.data.prompts.load_rows('task:sort', max_rows=3)\n"
        "components.data.rewards.check_reward('sort')\n"
        "heavy = {'torch', 'transformers', 'deepspeed', 'vllm', 'ray', 'wandb', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=PROJECT)
    assert result.returncode == 0, result.stderr
