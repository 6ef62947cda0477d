"""Each piece of advice on a case built for it. `test_advice_helps.py` applies them."""

from dataclasses import replace
from typing import Any

from plugins.light_meter.advice import advise

SECONDS = {"generate": 4.0, "reward": 1.0, "train": 4.0, "step": 10.0}


def option(config: Any, seconds: dict[str, float] = SECONDS, cores: int = 2, tokens: float = 480) -> str:
    advice = advise(config, seconds, tokens, cores, on_gpu=False)
    return f"{advice.option}={advice.value}" if advice else ""


def test_engine_with_fewer_rows_than_responses_is_to_take_all_of_them(config: Any) -> None:
    few = replace(config, rollout=replace(config.rollout, max_num_seqs=8))
    assert option(few) == "rollout.max_num_seqs=32"
    assert option(config) == ""


def test_slow_reward_in_one_process_is_to_have_a_process_for_each_core(config: Any) -> None:
    seconds = {"generate": 1.0, "reward": 8.0, "train": 1.0, "step": 10.0}
    assert option(config, seconds, cores=4) == "reward.workers=4"
    assert option(config, seconds, cores=1) == ""
    assert option(config, seconds | {"reward": 0.03, "step": 0.1}, cores=4) == ""


def test_micro_batches_of_few_tokens_are_to_be_larger(config: Any) -> None:
    small = replace(config, train=replace(config.train, max_tokens=32))
    assert option(small) == "train.max_tokens=256"
    # Further epochs have more optimizer steps of the same size.
    assert option(replace(small, train=replace(small.train, epochs=4))) == "train.max_tokens=256"


def test_checkpointing_is_to_be_off_on_a_cpu(config: Any) -> None:
    saving = replace(config, train=replace(config.train, gradient_checkpointing=True))
    assert option(saving) == "train.gradient_checkpointing=false"


def test_roles_with_devices_of_their_own_are_to_work_at_the_same_time(config: Any) -> None:
    apart = replace(config, placement=replace(config.placement, colocate=False))
    assert option(apart) == "asynchronous.enabled=true"
    # Otherwise the run with the advice would be refused.
    assert option(replace(apart, backend="local")) == ""
    assert option(replace(apart, placement=replace(apart.placement, engines_sleep=True))) == ""


def test_phase_that_takes_little_of_a_step_has_no_advice(config: Any) -> None:
    few = replace(config, rollout=replace(config.rollout, max_num_seqs=8))
    assert option(few, {"generate": 1.0, "train": 9.0, "step": 10.0}) == ""
