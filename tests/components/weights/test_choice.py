"""The carrier of weights that a run uses."""

import re

import pytest

from components.weights import choice
from components.weights.choice import SyncSetting, choose_weight_sync, transport_fault
from tests.messages import says


@pytest.mark.parametrize(
    ("option", "gpus", "apart", "shares", "lora_rank", "expected"),
    [
        ("auto", 8, True, True, 0, "ipc"),
        ("auto", 8, True, False, 0, "broadcast"),
        ("auto", 8, False, False, 0, "shared_memory"),
        ("auto", 8, True, True, 16, "shared_memory"),
        ("auto", 8, True, False, 16, "shared_memory"),
        ("auto", 0, True, True, 0, "shared_memory"),
        ("shared_memory", 8, True, True, 0, "shared_memory"),
        ("ipc", 0, True, True, 0, "ipc"),
        ("broadcast", 0, True, True, 0, "broadcast"),
    ],
)
def test_auto_selects_a_gpu_transport_for_separate_processes_with_gpus(
    option: str, gpus: int, apart: bool, shares: bool, lora_rank: int, expected: str
) -> None:
    setting = SyncSetting(gpus=gpus, apart=apart, shares=shares, lora_rank=lora_rank)
    assert choose_weight_sync(option, setting)[0] == expected


@pytest.mark.parametrize(
    ("option", "apart", "shares", "lora_rank", "why"),
    [
        ("ipc", True, False, 0, "no engines beside"),
        ("ipc", True, True, 16, "adapters"),
        ("broadcast", False, False, 0, "in the processes of the policy"),
        ("broadcast", True, True, 0, "each GPU once"),
        ("broadcast", True, False, 16, "adapters"),
    ],
)
def test_an_unusable_weight_transport_is_rejected(
    option: str, apart: bool, shares: bool, lora_rank: int, why: str
) -> None:
    setting = SyncSetting(gpus=8, apart=apart, shares=shares, lora_rank=lora_rank)
    with pytest.raises(ValueError, match=says(f"rollout.weight_sync={option}", why)):
        choose_weight_sync(option, setting)


def test_without_the_plug_ins_auto_selects_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "names", lambda kind: [])
    setting = SyncSetting(gpus=8, apart=True, shares=True, lora_rank=0)
    assert choose_weight_sync("auto", setting)[0] == "shared_memory"
    assert list(transport_fault(1)) == []
    (fault,) = transport_fault(2)
    assert re.search(says("placement.nodes=2", "weights_tcp", "missing"), fault)
