"""Choice of the carrier that brings weights to rollout engines. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from components.registry import find, names

FOLDER_CARRIER = "shared_memory"
"""Name of the carrier that always works: a folder in shared memory."""
BASIC_CARRIERS = ("auto", FOLDER_CARRIER)
"""Values of `rollout.weight_sync` that no plug-in provides."""

TRANSPORT = "tcp"
"""Name of the `weight transport` that brings versions from the folder to other machines."""


@dataclass(frozen=True, kw_only=True)
class SyncSetting:
    """Facts of a run that decide which carriers can be used."""

    gpus: int
    """Number of GPUs of a machine."""
    apart: bool
    """The engines are in other processes than the ranks of the policy."""
    shares: bool
    """Each rank of the policy has an engine on its device, in another process."""
    lora_rank: int
    """Rank of the policy's adapters. 0: it has none."""


class CarrierChoice:
    """Conditions for a carrier. A plug-in may provide a subclass for its `weight carrier`, as the `carrier choice` of
    the same name, in a module that does not import torch; without one a carrier is used where it is named.
    """

    automatic = 0
    """Rank among the carriers that `rollout.weight_sync=auto` selects on GPUs, the highest first. 0: it never does."""

    def fault(self, setting: SyncSetting) -> str:  # noqa: ARG002
        """Return why the carrier cannot be used; empty if it can."""
        return ""

    def describe(self, gpus: int) -> str:  # noqa: ARG002
        """Describe the way of the weights in a few words. Empty: the name of the carrier says it."""
        return ""


class FolderChoice(CarrierChoice):
    """Conditions for the folder in shared memory: none."""

    def describe(self, gpus: int) -> str:  # noqa: ARG002
        return "shared memory, and TCP to other nodes"


def choose_weight_sync(name: str, setting: SyncSetting) -> tuple[str, str]:
    """Return the name of the carrier that brings weights to the engines, and a description.

    Args:
        name: name of a carrier, or "auto".
        setting: facts of the run.

    Raises:
        ValueError: the named carrier cannot be used.
    """
    if name == "auto":
        choices = {carrier: _choice(carrier) for carrier in names("carrier choice")} if setting.gpus else {}
        possible = [carrier for carrier, choice in choices.items() if choice.automatic and not choice.fault(setting)]
        name = max(possible, key=lambda carrier: choices[carrier].automatic, default=FOLDER_CARRIER)
    choice = _choice(name)
    if fault := choice.fault(setting):
        raise ValueError(f"rollout.weight_sync={name}: {fault}; leave it out")
    return name, choice.describe(setting.gpus) or name


def transport_fault(nodes: int) -> Iterator[str]:
    """Yield why weights cannot reach the engines of a run on so many machines, if they cannot."""
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
