"""verl's keys of the reward as the options of this recipe."""

from training.options.table_adapter import Computed

from .nested_keys import values_within

MANAGERS = ("naive", "batch", "dapo", "prime", "limited", "remote", "gdpo")
FUNCTIONS = "functions run at the same time in reward.workers processes of their own, each with a deadline"


def named_models(keys: Computed) -> list[str]:
    """Return the keys of reward models with names of their own, `reward_model.reward_models.NAME`, as before 0.7."""
    parts = [key.split(".") for key in keys.values if key.startswith("reward_model.reward_models.")]
    return sorted({".".join(part[:3]) for part in parts})


def asks_served_model(keys: Computed) -> bool:
    """Return True if the user's function alone gives the reward and calls a served model, as in verl since 0.7."""
    since_0_7 = keys.name("reward.reward_model.enable", "reward_model.rollout.name", "reward.reward_model.rollout.name")
    since_0_7 = since_0_7 or named_models(keys)
    is_enabled = keys.get("reward_model.enable", "reward.reward_model.enable")
    return bool(since_0_7 and is_enabled and keys.option("reward.source"))


def read_reward(keys: Computed) -> None:
    """Set the options of the reward model, the reward manager, and DAPO's penalty on length."""
    if asks_served_model(keys):
        keys.notes.append(
            "no effect of reward_model: as in verl, the function of custom_reward_function alone gives the reward. "
            "Serve the model that it calls by `vllm serve MODEL`, and pass the address, for example by "
            "custom_reward_function.reward_kwargs.reward_router_address=HOST:PORT"
        )
    elif keys.get("reward_model.enable", "reward.reward_model.enable"):
        model = keys.get("reward_model.model.path", "reward.reward_model.model_path")
        keys.put("reward.model_path", model or "", "reward_model.model.path")
        served = ("reward_model.rollout.name", "reward.reward_model.rollout.name")
        keys.idle("a reward model is a classifier of transformers", *served)
        if not model:
            keys.faults.append("reward_model.enable=true without reward_model.model.path; set that too")
    name = "reward_model.reward_manager"
    models = named_models(keys)
    of_models = [f"{model}.reward_manager" for model in models]
    manager = keys.get(name, "reward.reward_manager.name", "reward_manager.name", *of_models, default="naive")
    if manager not in MANAGERS:
        keys.faults.append(
            f"{name}={manager} is not available; use naive, batch or dapo, and do its computation in the function of "
            "custom_reward_function.path, which gets custom_reward_function.reward_kwargs"
        )
    if manager == "batch":
        keys.put("reward.whole_batches", True, name)
    elif manager not in ("naive", "dapo"):
        keys.notes.append(f"{name}={manager} is naive: {FUNCTIONS}")
    kwargs = [f"{model}.reward_kwargs" for model in models]
    settings = values_within(keys, "reward_model.reward_kwargs", "reward.reward_kwargs", *kwargs)
    longest = settings.pop("max_resp_len", None)
    response = keys.option("rollout.max_new_tokens", 512)
    buffer = {name.removeprefix("overlong_buffer_cfg."): value for name, value in settings.items()}
    buffer |= values_within(keys, "reward_model.overlong_buffer", "custom_reward_function.overlong_buffer")
    unknown = sorted(buffer.keys() - {"enable", "len", "penalty_factor", "log"})
    if unknown and manager in MANAGERS:  # those of another manager go with it
        keys.faults.append(
            f"reward_model.reward_kwargs has {', '.join(unknown)}; there are overlong_buffer_cfg.enable, .len, "
            ".penalty_factor and .log, and max_resp_len; the function's own are custom_reward_function.reward_kwargs"
        )
    if buffer.get("enable") and longest not in (None, response):
        keys.faults.append(f"reward_kwargs.max_resp_len={longest}; set it to data.max_response_length={response}")
    if buffer.get("enable") and manager == "dapo":
        keys.put("algorithm.overlong_buffer", buffer.get("len", 0), "overlong_buffer_cfg.len")
        keys.put("algorithm.overlong_penalty", buffer.get("penalty_factor", 1.0), "overlong_buffer_cfg.penalty_factor")
    elif buffer.get("enable"):
        keys.notes.append("no effect of overlong_buffer: reward_model.reward_manager is not dapo")
