"""Complete commands of OpenRLHF and verl, such as `ray job submit ... -- python3 -m openrlhf.cli.train_sft --bf16`."""

from __future__ import annotations

import re
from collections.abc import Sequence

PROGRAM = "program"
"""Option that stands for a program that is not known. The tables of the other systems refuse it."""
LAUNCHER = "launcher"
"""Option that stands for a launcher, such as `ray job submit`. The tables of the other systems give it a message."""
OPENRLHF = "openrlhf.cli"
OPENRLHF_PROGRAMS = (
    "train_ppo_ray",
    "train_ppo",
    "train_sft",
    "train_dpo",
    "train_rm",
    "train_kto",
    "train_prm",
    "train_kd",
    "train_opd",
    "batch_inference",
    "interactive_chat",
    "lora_combiner",
    "serve_rm",
)
"""Programs of OpenRLHF, which were scripts of these names before they were modules."""
TRAINED = ("train_ppo_ray", "train_ppo", "train_sft", "train_dpo", "train_kto", "train_rm")
"""Programs of OpenRLHF that a recipe runs. The options of other programs are left out, so that the only message is the
replacement of the program.
"""
LAUNCHERS = {
    "ray": "ray job submit",
    "deepspeed": "deepspeed",
    "torchrun": "torchrun",
    "accelerate": "accelerate launch",
}
"""First word of a launcher -> its name in messages."""
_MODULE = re.compile(r"(openrlhf\.cli\.\w+|(verl|recipe)(\.\w+)+)")
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*|-m|torchrun|deepspeed|--module|-u|-B")
"""Words before a program."""
_OTHER = re.compile(r"[^=]+\.py|[A-Za-z_]\w*(\.\w+)+")
"""Script or module of a program that is not known."""
_SCRIPT = re.compile(r"(?:.*?/)??((?:verl|recipe)/[\w/]+|[^/]+)\.py")


def with_program_as_option(arguments: Sequence[str]) -> list[str]:
    """Replace the words up to the program by options.

    The program becomes an option of its own name. The table of the other system accepts it, or refuses it with the
    reason. Another program that Python starts becomes the option `program`. Without a program the arguments are
    returned unchanged.
    """
    for place, word in enumerate(arguments):
        if (program := _program(word)) is not None:
            if program.startswith(OPENRLHF) and program.rpartition(".")[2] not in TRAINED:
                return [f"{program}=true"]
            names = [LAUNCHERS[word] for word in arguments[:place] if word in LAUNCHERS]
            return [f"{program}=true", *(f"{LAUNCHER}={name}" for name in names[:1]), *arguments[place + 1 :]]
    for place, word in enumerate(arguments):
        if _OTHER.fullmatch(word) and arguments[place - 1 : place] and _PYTHON.fullmatch(arguments[place - 1]):
            return [f"{PROGRAM}={word}", *arguments[place + 1 :]]
    return list(arguments)


def _program(word: str) -> str | None:
    """Return the module of a program of OpenRLHF or verl, or None for other words."""
    if _MODULE.fullmatch(word):
        return word
    script = _SCRIPT.fullmatch(word)
    if script is None:
        return None
    if script[1] in OPENRLHF_PROGRAMS:
        return f"{OPENRLHF}.{script[1]}"
    if "/" in script[1]:
        return script[1].replace("/", ".")
    return None
