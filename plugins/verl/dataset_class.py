"""Rows of a user's Dataset class, which verl's `data.custom_cls` names."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.data.mixture import Note
from components.data.text import TextEncoder, render_prompt
from components.process.child_process import described
from components.process.code_files import load_file
from plugins.verl.rows import RowForm, limited_rows, rows_of_records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PACKAGE = "pkg://"
"""Prefix of an importable module's name, which may replace the path of a file."""
IDS = ("raw_prompt_ids", "input_ids")
"""Fields with the token ids of the prompt. The first field that a row has is used."""
MESSAGES = "raw_prompt"
"""Field with the prompt as messages."""
IMAGES = ("multi_modal_data", "multi_modal_inputs")
"""Fields that hold images, videos or audio where they are not empty."""
NOT_COLUMNS = (*IDS, *IMAGES, MESSAGES, "attention_mask", "position_ids", "dummy_tensor", "full_prompts")
"""Fields that are not columns of the data."""
KWARGS = ("tools_kwargs", "interaction_kwargs", "need_tools_kwargs")
"""Fields beside `extra_info` that tools and interactions read there."""
DEFAULTS: Mapping[str, Any] = {
    "cache_dir": "~/.cache/verl/rlhf",
    "image_key": "images",
    "video_key": "videos",
    "return_raw_chat": True,
    "return_raw_input_ids": False,
    "return_full_prompt": False,
    "return_multi_modal_inputs": True,
    "filter_overlong_prompts": False,
    "filter_overlong_prompts_workers": 1,
    "validation_shuffle": False,
    "dataloader_num_workers": 8,
    "use_shm": False,
    "trust_remote_code": False,
    "tool_config_path": None,
    "apply_chat_template_kwargs": {},
}
"""verl's defaults of keys of `data.*` that no option of the recipe sets."""


def load_class_rows(
    path: str,
    name: str,
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    config: Mapping[str, Any],
    *,
    max_rows: int | None = None,
    draw: bool = False,
    seed: int = 0,
    note: Note | None = None,
    **form: Any,
) -> list[dict[str, Any]]:
    """Create a user's dataset from files, and return its rows in the format of `load_verl_rows`.

    Args:
        path: Python file with the class, or `pkg://` and the name of a module.
        name: name of the class.
        files: data files.
        tokenizer: tokenizer of the policy.
        config: config that the class receives, in addition to DEFAULTS.
        max_rows: maximum number of rows. A class with a parameter `max_samples` receives it too.
        draw: see `load_verl_rows`.
        seed: see `load_verl_rows`.
        note: called with a message if `max_rows` leaves rows out.
        form: fields of a `RowForm`.

    Raises:
        ValueError: the class cannot be loaded or created, or one of its rows cannot be used.
    """
    where = f"data.class_path={path}: {name}"
    dataset = _make(_find_class(path, name), where, files, tokenizer, {**DEFAULTS, **config}, max_rows)
    encoder = TextEncoder(tokenizer)
    row_form = RowForm(**form)
    records = list[dict[str, Any]]()
    for number in range(len(dataset)):
        place = f"{where}, row {number}"
        try:
            item = dataset[number]
        except Exception as error:
            raise _failed(f"{place} cannot be read", error) from error
        records.append(_record_of(item, place, row_form.prompt_key, encoder))
    if not records:
        raise ValueError(f"{where} has no rows")
    rows = rows_of_records(records, where, row_form)
    return limited_rows(rows, max_rows, where, draw=draw, seed=seed, note=note)


def _find_class(path: str, name: str) -> Any:
    from agents.verl_tools import provide_verl
    from plugins.verl import standins

    provide_verl()
    provide_verl(standins.MODULES)
    try:
        if path.startswith(PACKAGE):
            module = importlib.import_module(path.removeprefix(PACKAGE))
        else:
            file = Path(path).expanduser().absolute()
            if not file.is_file():
                raise FileNotFoundError(f"there is no file {file}")
            module = load_file(file)
        dataset_class = getattr(module, name)
    except (Exception, SystemExit) as error:
        raise _failed(f"data.class_path={path}: {name} cannot be loaded", error) from error
    missing = [method for method in ("__len__", "__getitem__") if not hasattr(dataset_class, method)]
    if missing or not inspect.isclass(dataset_class):
        raise ValueError(
            f"data.class_path={path}: {name} is no Dataset class (it lacks {', '.join(missing) or 'a class'}); derive "
            "it from torch.utils.data.Dataset, with __len__ and __getitem__"
        )
    return dataset_class


def _make(
    dataset_class: Any,
    where: str,
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    config: Mapping[str, Any],
    max_rows: int | None,
) -> Any:
    from omegaconf import OmegaConf

    arguments = {"tokenizer": tokenizer, "config": OmegaConf.create(dict(config)), "processor": None}
    try:
        parameters = inspect.signature(dataset_class).parameters
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        arguments["max_samples"] = max_rows
        if max_rows is None:
            # verl's value for all rows.
            arguments["max_samples"] = -1
        first = next((each for each in ("data_files", "parquet_files") if each in parameters), "data_files")
        taken = {key: value for key, value in arguments.items() if takes_any or key in parameters}
        return dataset_class(**{first: list(files)}, **taken)
    except Exception as error:
        raise _failed(f"{where} cannot be made of {', '.join(files)}", error) from error


def _record_of(item: Any, where: str, prompt_key: str, encoder: TextEncoder) -> dict[str, Any]:
    """Return a row of the class as one of verl's files."""
    if not isinstance(item, Mapping):
        raise ValueError(
            f"{where} is a {type(item).__name__}; __getitem__ gives a mapping with raw_prompt or input_ids"
        )
    if images := [name for name in IMAGES if _holds_something(item.get(name))]:
        raise ValueError(f"{where} has {images[0]}; prompts are text here, so leave images, videos and audio out")
    record = {name: _plain(value) for name, value in item.items() if name not in NOT_COLUMNS}
    prompt = _prompt_of(item, where, prompt_key, encoder)
    extra = dict(record.get("extra_info") or {})
    others = {name: record[name] for name in KWARGS if record.get(name) and name not in extra}
    if extra or others or "extra_info" in record:
        record["extra_info"] = {**extra, **others}
    return record | {prompt_key: prompt}


def _prompt_of(item: Mapping[str, Any], where: str, prompt_key: str, encoder: TextEncoder) -> Any:
    """Return the prompt as messages or text. If token ids and rendered messages differ, the token ids are used."""
    messages = _plain(item.get(MESSAGES))
    ids = _ids_of(item)
    if ids is None and messages is None:
        return _plain(item.get(prompt_key))
    if ids is None:
        return messages
    if messages is not None and encoder.encode_prompt(render_prompt(messages, encoder.tokenizer)) == ids:
        return messages
    text = str(encoder.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    if encoder.encode_prompt(text) != ids:
        raise ValueError(
            f"{where}: its token ids are not those of their text {text!r:.100}, and prompts are read as text; return "
            "the messages as raw_prompt, and no input_ids"
        )
    return text


def _ids_of(item: Mapping[str, Any]) -> list[int] | None:
    """Return the ids of the prompt without padding, or None if the row has none."""
    name = next((name for name in IDS if item.get(name) is not None), None)
    if name is None:
        return None
    ids = [int(each) for each in _plain(item[name])]
    mask = None
    if name == "input_ids":
        # verl pads input_ids to the maximum length of a prompt, and raw_prompt_ids not at all.
        mask = _plain(item.get("attention_mask"))
    if mask is None:
        return ids
    return [each for each, is_token in zip(ids, mask, strict=True) if is_token]


def _holds_something(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_something(each) for each in value.values())
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


def _plain(value: Any) -> Any:
    """Return a value without tensors and arrays."""
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def _failed(what: str, error: BaseException) -> ValueError:
    reason, trace = described(error)
    failed = ValueError(f"{what}: {reason}")
    failed.add_note(trace)
    return failed
