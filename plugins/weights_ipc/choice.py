"""Conditions for `rollout.weight_sync=ipc`."""

from __future__ import annotations

from components.weights.choice import CarrierChoice, SyncSetting


class IPCChoice(CarrierChoice):
    """Conditions for the carrier `ipc`: each rank shares its device with an engine in another process."""

    automatic = 2

    def fault(self, setting: SyncSetting) -> str:
        if setting.lora_rank:
            return "it is for weights without adapters"
        if not setting.shares:
            return "the ranks of the policy have no engines beside them, on the same devices"
        return ""

    def describe(self, gpus: int) -> str:
        if gpus:
            return "CUDA IPC, from each rank to the engine on its GPU"
        return "a bucket that engines map"
