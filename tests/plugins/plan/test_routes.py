"""Memory of replayed routes in the plan."""

import runpy
from pathlib import Path

from components.models.size import size_of
from plugins.plan.memory import PROCESS_BYTES, MemoryEstimate
from plugins.plan.routes import bytes_per_token, route_bytes
from tests.plugins.plan.test_plan import GB, plan_of, text_of

ROOT = Path(__file__).resolve().parents[3]


def test_routes_take_a_byte_per_routed_layer_and_expert() -> None:
    models = runpy.run_path(str(ROOT / "scripts/plan_table.py"))["MODELS"]
    mixture, dense = (size_of(models[name]) for name in ("Qwen3-30B-A3B", "Qwen2.5-7B"))
    assert mixture is not None
    assert dense is not None
    # 48 layers with 8 experts per token, of 128.
    assert bytes_per_token(mixture) == 384
    assert route_bytes(mixture, 512, 4096) == 512 * 4096 * 384
    assert route_bytes(dense, 512, 4096) == 0
    assert route_bytes(None, 512, 4096) == 0


def test_routes_are_host_memory_of_every_rank_of_the_policy() -> None:
    actor = MemoryEstimate(weights=10 * GB, gradients=0, optimizer=0, base=0, routes=3 * GB)
    plan = plan_of({"ACTOR": actor}, device=80 * GB)
    device, machine = plan.fields()["places"]
    assert device["most"] == 10 * GB
    assert machine["most"] == PROCESS_BYTES["driver"] + 3 * PROCESS_BYTES["process"] + 2 * 3 * GB
    assert "3 GB of host memory in each process of actor" in text_of(plan)
    without = plan_of({"ACTOR": MemoryEstimate(weights=10 * GB)}, device=80 * GB)
    assert "host memory in each process" not in text_of(without)
