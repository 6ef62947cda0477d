"""Dry run of a command: all its checks, and its plan as JSON and as a table.

Nothing here imports torch, unless a model other than a demonstration's has to be read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.models.sources import is_made
from components.net.hub import WEIGHTS
from components.net.hub_requests import ModelNotFound, find_model
from components.registry import find, load
from training.launch.command import Command
from training.launch.machines import is_this_machine
from training.launch.plan import Plan


def show_plan(command: Command[Any], plan: Plan) -> None:
    """Run all checks of a command, and print its plan.

    If the run is planned for other machines, errors of models and data become notes, because those machines may
    have other files than this one.

    Raises:
        ValueError, OSError: the run would be rejected.
    """
    fault = None
    try:
        command.check(plan)
    except (ValueError, OSError) as error:
        # Raised only after the plan was printed: a dry run is for reading the plan of a run that does not fit too.
        fault = error
        if not is_this_machine():
            plan.notes = [*plan.notes, f"with the models and data of this machine it would be refused: {error}"]
    # Data that cannot be read have no lengths.
    text = plan.json()
    if fault is None:
        text = _with_speed(command, plan)
    emit: str = plan.config.emit
    if emit != "none":
        text = load("manifest", emit, f"emit={emit}")(plan)
    print(text)
    plan.check_and_show(always=True)
    if fault is None:
        _show_first(command, plan)
    elif is_this_machine():
        raise fault


def _with_speed(command: Command[Any], plan: Plan) -> str:
    """Return the plan as JSON with the predicted speed, if a plug-in predicts it. Its text is added to the notes."""
    predict = find("speed prediction", "plan")
    prediction = predict and predict(command, plan)
    if prediction is None:
        return plan.json()
    plan.notes = [*plan.notes, prediction.line(plan.step_count)]
    return json.dumps({**json.loads(plan.json()), **prediction.fields()}, indent=2)


def _show_first(command: Command[Any], plan: Plan) -> None:
    """Show the first example in a dry run, if the model and the data are local files."""
    config: Any = plan.config
    names = [name.strip() for name in config.data.path.split(",")]
    if all(Path(name).expanduser().exists() for name in (config.model.path, *names)):
        for description in command.first_example(plan.config):
            print(f"{command.folder.name}: {description}", file=sys.stderr)


def absent_models(models: Mapping[str, str]) -> dict[str, str]:
    """Return the models that are missing on this machine, by option, with the reason.

    A plan only needs the config.json of a model, which is fetched into the cache of the Hugging Face hub.

    Args:
        models: path of each model, by option.
    """
    absent = dict[str, str]()
    for option, path in models.items():
        if is_made(path):
            continue
        folder = Path(path).expanduser()
        try:
            find_model(path)
        # A plan for other machines must not fail because of a model that only they have.
        except ModelNotFound as error:
            absent[option] = str(error)
        except ValueError:
            continue  # the checks before a run report it
        if folder.is_dir() and not any(next(folder.glob(pattern), None) for pattern in WEIGHTS):
            absent[option] = "the folder has no weights"
    return absent
