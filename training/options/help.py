"""The flag `--help`, whose text the plug-in option_help provides."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from components.registry import load
from training.options.schema import recipe_of


def print_help(schema: type, arguments: Sequence[str], program: str = "") -> int | None:
    """Print the help that a command line asks for.

    Args:
        schema: the options.
        arguments: the command line.
        program: name of the program, for messages. Default: the recipe of the schema.

    Returns:
        The exit code: 0, or 2 for an unknown topic. None where no help is asked for.
    """
    flag = next((index for index, word in enumerate(arguments) if word in ("--help", "-h")), None)
    if flag is None:
        return None
    following = arguments[flag + 1 : flag + 2]
    topic = next((word for word in following if not word.startswith("-") and "=" not in word), "")
    try:
        print(load("option help", "text", "--help")(schema, topic))
    except ValueError as error:
        print(f"{program or recipe_of(schema)}: {error}", file=sys.stderr)
        return 2
    return 0
