"""verl's keys of a user's own Dataset class (`data.custom_cls`), whose config is all of `data`."""

import fnmatch
from collections.abc import Iterable
from dataclasses import replace

from training.options.adapter import Translation, WrittenOption, as_text
from training.options.table_adapter import UNSET, TableAdapter

NOT_OF_CLASS = ("data.custom_cls.path", "data.custom_cls.name", "data.train_files", "data.val_files")
"""Keys of `data` that are no part of the config of a user's Dataset class."""


class VerlAdapter(TableAdapter):
    """The table, with the keys that a user's Dataset class reads."""

    def translate(self, written: Iterable[WrittenOption]) -> Translation:
        """See `Adapter.translate`. Beside `data.custom_cls` all of `data` is the config of that class."""
        options = list(written)
        last = {option.name: option.value for option in options}
        if as_text(last.get("data.custom_cls.path")) in UNSET:
            return super().translate(options)
        options_here: list[WrittenOption] = []
        arguments: list[WrittenOption] = []
        refused = [name for name in self.refused if name.startswith("data.")]
        for option in options:
            group, _, key = option.name.partition(".")
            if group != "data" or option.name in NOT_OF_CLASS or key.startswith("class_"):
                options_here.append(option)
                continue
            arguments.append(replace(option, name=f"data.class_arguments.{key}"))
            is_ours = self._target_of(option.name) is not None or option.name in self.computed
            if is_ours or any(fnmatch.fnmatchcase(option.name, name) for name in refused):
                options_here.append(option)
        result = super().translate(options_here)
        for option in arguments:
            result.add(option, option.name.replace(".class_arguments.", "."))
        return result
