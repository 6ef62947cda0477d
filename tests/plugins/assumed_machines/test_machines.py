"""The format of assume_devices."""

import pytest

from plugins.assumed_machines.machines import Machines
from tests.messages import says

GB = 10**9


@pytest.mark.parametrize(
    ("written", "machines"),
    [
        ("8", Machines(8)),
        ("8x2", Machines(8, 2)),
        ("8x2x80GB", Machines(8, 2, 80 * GB)),
        ("4x141gb", Machines(4, None, 141 * GB)),
        ("0x3", Machines(0, 3)),
        ("8x2x80GBx1000GB", Machines(8, 2, 80 * GB, 1000 * GB)),
        ("0x2x64GB", Machines(0, 2, None, 64 * GB)),
    ],
)
def test_assume_devices_has_gpus_per_machine_machines_and_memory(written: str, machines: Machines) -> None:
    assert Machines.parse(written) == machines


@pytest.mark.parametrize("written", ["", "8x0", "two", "8x2x80", "8x2x80GBx1", "0x1x2GBx3GBx4GB", "-1x2"])
def test_an_invalid_value_of_assume_devices_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match=says("assume_devices", "8x2", "8x2x80GB")):
        Machines.parse(written)
