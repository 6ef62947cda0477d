"""The arithmetic of the OpenRLHF table for train_sft, train_rm and train_dpo: what takes more than another name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.adapter import Adapter, Computed, as_text

TABLE = Path(__file__).parent / "openrlhf.yaml"
INPUT_TEMPLATE = "User: {}\nAssistant: "
"""That train_sft writes around prompts unless it is told otherwise."""
_SWITCHES = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "cosine_with_min_lr": {},
    "cosine": {"train.lr_scheduler": "cosine_with_min_lr", "train.min_lr_ratio": 0.0},
    "linear": {"train.min_lr_ratio": 0.0},
    "constant": {"train.lr_warmup_ratio": 0.0},
    "constant_with_warmup": {"train.lr_scheduler": "constant"},
}
"""transformers' name of a schedule -> the options that make it here, beside `train.lr_scheduler`."""

_LOGS = (
    ("use_wandb", "log.wandb", "log.wandb_key"),
    ("key", "log.wandb", "log.wandb_key"),
    ("use_tensorboard", "log.tensorboard", "log.tensorboard_dir"),
    ("tensorboard_dir", "log.tensorboard", "log.tensorboard_dir"),
)
"""The last part of OpenRLHF's name, the switch here, and where another value goes."""


def adapter(*sections: str) -> Adapter:
    """OpenRLHF's names for the recipe of these sections of the table."""
    return Adapter.load(TABLE, "shared", "supervised", *sections, compute=compute)


def compute(given: Mapping[str, Any], options: Mapping[str, Any]) -> Computed:
    """Options that follow from several of OpenRLHF's, or from a value of another kind.

    Args:
        given: values of the names that the table computes with.
        options: those so far, by their names here.
    """
    found = Computed()
    # 0.11 has the names of 0.8 with a group before them.
    own = {name.rpartition(".")[2]: value for name, value in given.items()}
    _log(own, found)
    _template(own, found)
    if "lr_scheduler" in own:
        _schedule(as_text(own["lr_scheduler"]), found)
    if "target_modules" in own:
        modules = own["target_modules"]
        found.options["train.lora_target_modules"] = modules if isinstance(modules, str) else ",".join(modules)
    _columns(own, options, found)
    return found


def _log(own: Mapping[str, Any], found: Computed) -> None:
    """W&B's key or `true`, and TensorBoard's folder or `true`."""
    for name, option, text_option in _LOGS:
        value = own.get(name)
        if value is None:
            continue
        is_on = _SWITCHES.get(as_text(value))
        found.options |= {text_option: value} if is_on is None else {option: is_on}


def _template(own: Mapping[str, Any], found: Computed) -> None:
    """The text around prompts, which OpenRLHF leaves away where there is no place for the prompt in it."""
    template = own.get("input_template")
    if template is None:
        return
    if "{}" in template:
        found.options["data.input_template"] = template
    else:
        found.notes.append(f"no effect of input_template={template!r}: it has no {{}}, where the prompt would go")


def _schedule(name: str, found: Computed) -> None:
    if name in _SCHEDULES:
        found.options |= {"train.lr_scheduler": name, **_SCHEDULES[name]}
    else:
        found.faults.append(f"lr_scheduler={name}: use one of {', '.join(_SCHEDULES)}")


def _columns(own: Mapping[str, Any], options: Mapping[str, Any], found: Computed) -> None:
    """The columns of train_sft, and how it reads them: with a template of its own, and the last response alone."""
    plain = _is_on(own.get("pretrain_mode", own.get("pretrain_mode_enable")))
    if plain:
        found.options["data.plain_text"] = True
    if "multiturn" in own:
        found.options["data.multiturn"] = _is_on(own["multiturn"])
    if not {"input_key", "output_key"} & own.keys():
        return
    found.options["data.prompt_key"] = own.get("input_key", "input")
    if own.get("output_key") is not None:
        found.options["data.response_key"] = own["output_key"]
    if not {"data.multiturn"} & {*options, *found.options}:
        found.options["data.multiturn"] = False
    is_templated = _is_on(options.get("data.apply_chat_template"))
    if not plain and not is_templated and not ({"input_template", "data.input_template"} & {*own, *options}):
        found.options["data.input_template"] = INPUT_TEMPLATE
        found.notes.append(f"data.input_template={INPUT_TEMPLATE!r}, as input_key is OpenRLHF's; another may be given")


def _is_on(value: Any) -> bool:
    return value is not None and _SWITCHES.get(as_text(value), False)
