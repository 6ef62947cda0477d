"""Conditions for `rollout.weight_sync=broadcast`."""

from __future__ import annotations

from components.weights.choice import CarrierChoice, SyncSetting


class BroadcastChoice(CarrierChoice):
    """Conditions for the carrier `broadcast`: the engines have separate devices."""

    automatic = 1

    def fault(self, setting: SyncSetting) -> str:
        if setting.lora_rank:
            return "it is for weights without adapters"
        if not setting.apart:
            return "the engines are in the processes of the policy"
        if setting.gpus and setting.shares:
            return "NCCL takes each GPU once, and the engines are on those of the policy"
        return ""

    def describe(self, gpus: int) -> str:
        if gpus:
            return "NCCL, from the policy's rank 0 to all engines at once"
        return "gloo, from rank 0 to all engines at once"
