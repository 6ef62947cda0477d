"""Choice of the carrier that transfers weights to rollout engines. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from components.registry import find, names

FOLDER_CARRIER = "shared_memory"
"""Name of the carrier that works everywhere: a folder in shared memory."""
BASIC_CARRIERS = ("auto", FOLDER_CARRIER)
"""Values of `rollout.weight_sync` that no plug-in provides."""

TRANSPORT = "tcp"
"""Name of the `weight transport` that copies versions from the folder to other machines."""


@dataclass(frozen=True, kw_only=True)
class SyncSetting:
    """Facts of a run that decide which carriers can be used."""

    gpus: int
    """Number of GPUs of a machine."""
    apart: bool
    """True if the engines run in other processes than the ranks of the policy."""
    shares: bool
    """True if each rank of the policy shares its device with an engine in another process."""
    lora_rank: int
    """Rank of the policy's low-rank adapters. 0: it has none."""


class CarrierChoice:
    """Conditions under which a carrier can be used.

    A plug-in may provide a subclass for its `weight carrier`, as the `carrier choice` of the same name, in a module
    that does not import torch. A carrier without one is used only if `rollout.weight_sync` names it.
    """

    automatic = 0
    """Priority among the carriers that `rollout.weight_sync=auto` selects on GPUs; the highest wins. 0: never
    selected."""

    def fault(self, setting: SyncSetting) -> str:  # noqa: ARG002
        """Return the reason why the carrier cannot be used, or an empty string if it can."""
        return ""

    def describe(self, gpus: int) -> str:  # noqa: ARG002
        """Return a short description of the transfer. Empty: the name of the carrier is used."""
        return ""


class FolderChoice(CarrierChoice):
    """Choice of the folder in shared memory, which can always be used."""

    def describe(self, gpus: int) -> str:  # noqa: ARG002
        return "shared memory, and TCP to other nodes"


def choose_weight_sync(name: str, setting: SyncSetting) -> tuple[str, str]:
    """Return the name of the carrier that transfers weights to the engines, and a short description of it.

    Args:
        name: name of a carrier, or "auto".
        setting: facts of the run.

    Raises:
        ValueError: the named carrier cannot be used.
    """
    if name == "auto":
        choices = {carrier: _choice(carrier) for carrier in names("carrier choice")} if setting.gpus else {}
        # A carrier that is faster on GPUs may still be impossible in this run; the folder is then the fallback.
        possible = [carrier for carrier, choice in choices.items() if choice.automatic and not choice.fault(setting)]
        name = max(possible, key=lambda carrier: choices[carrier].automatic, default=FOLDER_CARRIER)
    choice = _choice(name)
    if fault := choice.fault(setting):
        raise ValueError(f"rollout.weight_sync={name}: {fault}; leave it out")
    return name, choice.describe(setting.gpus) or name


def transport_fault(nodes: int) -> Iterator[str]:
    """Yield a message if weights cannot be transferred to engines on other machines.

    Args:
        nodes: number of machines of the run.
    """
    if nodes > 1 and TRANSPORT not in names("weight transport"):
        yield (
            f"placement.nodes={nodes} needs a plug-in that provides the weight transport {TRANSPORT!r} (weights_tcp), "
            "which is missing; restore it, or set 1"
        )


def _choice(name: str) -> CarrierChoice:
    if name == FOLDER_CARRIER:
        return FolderChoice()
    provided: type[CarrierChoice] = find("carrier choice", name) or CarrierChoice
    return provided()
