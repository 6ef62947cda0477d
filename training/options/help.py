"""The flag `--help`, whose text the plug-in option_help provides."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from components.registry import load
from training.options.schema import recipe_of


def print_help(schema: type, arguments: Sequence[str], program: str = "") -> int | None:
    """Print the help if the command line contains `--help` or `-h`. A group, or an option, may follow as the topic.

    Args:
        schema: dataclass of the options.
        arguments: the command line.
        program: name of the program in error messages. Default: the recipe of the schema.

    Returns:
        The exit code: 0, or 2 for an unknown topic. None if the command line requests no help.
    """
    if not {"--help", "-h"}.intersection(arguments):
        return None
    try:
        print(load("option help", "text", "--help")(schema, arguments))
    except ValueError as error:
        print(f"{program or recipe_of(schema)}: {error}", file=sys.stderr)
        return 2
    return 0
