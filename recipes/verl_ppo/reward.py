"""Rewards by a function (built-in for the prompt's data source, or the user's), by a reward model, or by both.

Legend: `B` responses. torch is imported only once there are responses.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from components.registry import find, load
from components.rewards.code import PREDICTION, RewardCode
from components.rewards.score_functions import ScoreCode, ScoreFunction, default_functions
from components.rewards.workers import WorkerReward

from .config import VerlPPOConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.batch import Batch

OWN_FUNCTIONS: dict[str, ScoreFunction] = {}
"""Additional reward functions by data source, besides `default_functions`. Add your own functions here; they have to be
defined at the top level of a module. A trailing `*` in a name matches any suffix.
"""


def score_code(config: VerlPPOConfig) -> ScoreCode:
    """Return the reward function of a run: from the user's file or program (ray_trainer.py), or the built-in ones.

    Raises:
        ValueError: the built-in functions do not have the arguments.
    """
    if (code := getattr(config, "reward_code", None)) is not None:
        return replace(code, optional=bool(config.reward.model_path) and not config.reward.function_weight)
    options = config.reward
    functions = default_functions() | OWN_FUNCTIONS
    arguments = dict(options.arguments)
    if options.source is None:
        method = arguments.pop("method", "strict")
        if arguments or method not in ("strict", "flexible"):
            raise ValueError(
                f"reward.arguments={options.arguments}, but the built-in functions take only method=strict or "
                "method=flexible (of openai/gsm8k); change that, or set reward.source"
            )
        if method == "flexible":
            functions["openai/gsm8k"] = functions["gsm8k_flexible"]
    return ScoreCode(
        path=options.source,
        name=options.function,
        kwargs=arguments,
        lists=options.whole_batches,
        functions=functions,
        optional=bool(options.model_path) and not options.function_weight,
    )


def reward_code(code: ScoreCode) -> RewardCode:
    """Return the code that runs in child processes. The user's file may import verl's reward functions there."""
    return (find("reward code", "verl") or ScoreCode.reward_code)(code)


def check_rewards(config: VerlPPOConfig, *parts: Sequence[Mapping[str, Any]]) -> None:
    """Check that the reward function can be loaded and suits the rows of each part of the data.

    Raises:
        ValueError: it cannot be loaded, has no function for a data source, or cannot read the labels.
    """
    code = score_code(config)
    if config.agent.gives_rewards:
        return
    code.check()
    for rows in parts:
        without = sum(row["label"] == "" for row in rows)
        if config.reward.source and 0 < without < len(rows):
            raise ValueError(
                f"{without} of {len(rows)} rows have no reward_model.ground_truth, and the others have one; add it, or "
                "take it out of all rows"
            )
        check_sources(code, (row["datasource"] for row in rows))
        code.check_labels(rows)


def try_function(config: VerlPPOConfig, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Call the user's function once with rows of each part of the data. Return notes; see `plugins/reward_trial`."""
    code = score_code(config)
    if config.agent.gives_rewards or code.path is None:
        return []
    if config.agent.func_path is not None:
        rows = {
            part: [{**row, "extra_info": _with_count(row.get("extra_info"), 1)} for row in rows[part]] for part in rows
        }
    option = f"reward.source={code.spec}"
    try_code = load("reward trial", "code", option)
    return try_code(reward_code(code), option, rows, config.reward.settings())


def check_sources(code: ScoreCode, sources: Iterable[str]) -> None:
    """Raise a ValueError if a data source needs a reward function and has none."""
    unknown = ", ".join(map(repr, code.unknown(sources)))
    if unknown and not code.optional:
        raise ValueError(
            f"there is no reward function for the data source {unknown}; set reward.source to a Python file with "
            "compute_score(data_source, solution_str, ground_truth, extra_info=None), data.source_key to the column "
            "with the data source, or score with a reward model (reward.model_path); there are functions for "
            f"{', '.join(sorted(code.functions))}"
        )


def _with_count(extra_info: Mapping[str, Any] | None, turns: int) -> dict[str, Any]:
    """Add `num_turns`, counted as in verl: the prompt, each turn of the policy, and the results in between."""
    return {**(extra_info or {}), "num_turns": 2 * turns}


def _with_turns(samples: "Batch") -> "Batch":
    """Add `num_turns` to the `extra_info` of episodes, for reward functions."""
    if "num_turns" not in samples:
        return samples
    others = samples.objects.get("extra_info", [None] * len(samples))
    counts = zip(others, samples["num_turns"].tolist(), strict=True)
    return samples.with_objects(extra_info=[_with_count(other, count) for other, count in counts])


class RewardManager:
    """Computes rewards by a function, a reward model, or both. Holds worker processes until it is closed."""

    def __init__(
        self, config: VerlPPOConfig, tokenizer: "PreTrainedTokenizerBase", info: Callable[[str], None]
    ) -> None:
        """Start the function's processes, unless an agent's environment gives the rewards.

        Args:
            config: configuration of the run.
            tokenizer: tokenizer of the policy.
            info: called with messages about responses without a reward, and with printed examples.
        """
        self.num_examine = config.reward.num_examine
        """Number of scored responses to print per data source and batch."""
        self._code = score_code(config)
        self._config = config
        self._tokenizer = tokenizer
        self._info = info
        self._workers = None
        if not config.agent.gives_rewards:
            self._workers = WorkerReward(reward_code(self._code), config.reward.settings())

    def __call__(self, samples: "Batch", step: int = 0) -> "Batch":
        """Compute the rewards of B responses.

        Args:
            samples: responses with `tokens`, `action_mask` and `prompt_length`, the objects `prompt`, `label`,
                `datasource` and optionally `extra_info`, and `rm_score` if a reward model has scored them. Samples that
                have a `reward` are episodes and keep it.
            step: number of finished training steps. Functions for whole batches may read it.

        Returns:
            The samples with `reward`, `score`, `reward_failed`, and `log_<name>` for each other number that the
            function returns (NaN for responses without it). The object `info_pred` is the function's `pred` as text,
            and `info` a mapping of its other values, or None. With a reward model, the reward is the model's score plus
            function_weight times the function's, and the score is the function's if there is one.

        Raises:
            RewardError: the function failed for more responses than reward.max_failed_share allows.
            ValueError: there is no function for a data source.
        """
        from components.data.samples import add_rewards, ask_for_rewards, with_rewards

        if self._workers is None or "reward" in samples:
            return add_rewards(samples, None, self._tokenizer, self._info)
        check_sources(self._code, samples["datasource"])
        samples = _with_turns(samples)
        output = ask_for_rewards(samples, self._workers, self._tokenizer, step)
        scored = with_rewards(samples, output, self._info, "score" if self._code.optional else "reward")
        # Every batch has these columns: it may be concatenated with batches of other data sources, which have them.
        predicted = output.texts.get(PREDICTION, [None] * len(samples))
        others = {name: texts for name, texts in output.texts.items() if name != PREDICTION}
        infos = [
            {name: texts[i] for name, texts in others.items() if texts[i] is not None} for i in range(len(samples))
        ]
        scored = scored.with_objects(info_pred=predicted, info=[info or None for info in infos])
        if "rm_score" in samples:
            scored = self._with_model(scored)
        scored = self._less_overlong(scored)
        self._print_examples(scored)
        return scored

    def close(self) -> None:
        """End the processes."""
        if self._workers is not None:
            self._workers.close()

    def _print_examples(self, scored: "Batch") -> None:
        """Print the first responses of each data source with their scores and rewards."""
        shown: Counter[str] = Counter()
        for i, source in enumerate(scored["datasource"]):
            # Counted per source, because the first rows of a step may all be from one source.
            if shown[source] == self.num_examine:
                continue
            shown[source] += 1
            actions = scored.row(i, "tokens")[scored.row(i, "action_mask")]
            response = self._tokenizer.decode(actions, skip_special_tokens=True)
            about = {"prompt": scored["prompt"][i], "response": response, "ground_truth": scored["label"][i]}
            about |= {"score": f"{float(scored['score'][i]):g}", "reward": f"{float(scored['reward'][i]):g}"}
            self._info(f"{source}: " + "; ".join(f"[{name}] {value}" for name, value in about.items()))

    def _with_model(self, scored: "Batch") -> "Batch":
        """Add the reward model's score to the function's, which some data sources do not have."""
        import torch

        weight = self._config.reward.function_weight
        model_B, function_B = scored["rm_score"].float(), scored["score"]
        knows_B = torch.tensor([self._code.knows(source) for source in scored["datasource"]])
        reward_B = model_B + weight * function_B
        # A sum fails if one of its terms fails. With a weight of 0 the function is not a term.
        failed_B = scored["reward_failed"] * float(weight != 0)
        return scored.with_sequences(
            reward=torch.where(failed_B > 0, 0.0, reward_B),
            reward_failed=failed_B,
            score=torch.where(knows_B, function_B, model_B),
            log_model=model_B,
            log_function=torch.where(knows_B, function_B, torch.nan),
        )

    def _less_overlong(self, scored: "Batch") -> "Batch":
        """Subtract DAPO's penalty from responses whose length is close to the maximum."""
        from components.rl.rewards import overlong_penalty

        buffer = self._config.algorithm.overlong_buffer
        if buffer is None:
            return scored
        limits = (self._config.rollout.max_new_tokens, buffer, self._config.algorithm.overlong_penalty)
        reward_B = overlong_penalty(scored["reward"], scored.sum_tokens(scored["action_mask"]), *limits)
        lost_B = reward_B - scored["reward"]
        return scored.with_sequences(reward=reward_B, log_overlong_reward=lost_B, log_overlong=(lost_B < 0).float())
