"""Adapters, autocast and sleep: the work of a rank in test_config.py."""

import gc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from components.batch import Batch
from components.models.loading import load_policy
from components.models.value_model import load_value_model
from components.train.engine import TrainEngine
from components.train.opening import open_engine
from components.train.state import EngineState, save_state
from plugins.deepspeed.engine import tensors_within
from plugins.resume.engine_state import load_state
from plugins.sleep.host_memory import HostCopies
from tests.components.helpers import train_cases as cases

RANK, ALPHA = 4, 8.0
LORA: dict[str, dict[str, Any]] = {
    **{f"zero-{stage}": {"zero_stage": stage} for stage in (0, 2, 3)},
    "fsdp-3": {"engine": "fsdp", "zero_stage": 3},
    "checkpointing-1": {"zero_stage": 1},
    "checkpointing-fsdp-2": {"engine": "fsdp", "zero_stage": 2},
    "bf16-1": {"zero_stage": 1, "precision": "bf16"},
    **{f"bf16-fsdp-{stage}": {"engine": "fsdp", "zero_stage": stage, "precision": "bf16"} for stage in (2, 3)},
}
RESUMED = {
    "zero-0": {},
    "zero-2": {"zero_stage": 2, "ema_beta": 0.5},
    "zero-3": {"zero_stage": 3, "lora_dropout": 0.3},
    "bf16-3": {"zero_stage": 3, "precision": "bf16"},
    "fsdp-3": {"engine": "fsdp", "zero_stage": 3, "ema_beta": 0.5},
}
CROSSED = [("zero-3", "fsdp-3"), ("fsdp-3", "zero-0"), ("zero-0", "zero-3"), ("bf16-3", "fsdp-3")]
"""Cases saved by two ranks -> case in which one rank loads the state."""
CAST: dict[str, dict[str, Any]] = {
    "zero-0": {},
    "zero-3": {"zero_stage": 3},
    "fsdp-2": {"engine": "fsdp", "zero_stage": 2},
}
ASLEEP: dict[str, dict[str, Any]] = {
    **{f"zero-{stage}": {"zero_stage": stage} for stage in (0, 3)},
    "bf16-1": {"zero_stage": 1, "precision": "bf16"},
    "fsdp-3": {"engine": "fsdp", "zero_stage": 3},
}
COUNTED: dict[str, dict[str, Any]] = {
    **{f"zero-{stage}": {"zero_stage": stage} for stage in (1, 2)},
    **{f"bf16-{stage}": {"zero_stage": stage, "precision": "bf16"} for stage in (2, 3)},
    **{f"bf16-fsdp-{stage}": {"engine": "fsdp", "zero_stage": stage, "precision": "bf16"} for stage in (2, 3)},
}
"""Further cases that sleep. Only the memory left after sleep is checked."""
LEARNED: dict[str, dict[str, Any]] = {"zero-2": {"zero_stage": 2}, "fsdp-2": {"engine": "fsdp", "zero_stage": 2}}
LEARNING_STEPS = 12


def lora_engine(model_folder: str, checkpointing: bool = False, **changes: Any) -> TrainEngine:
    gc.freeze()  # see state_engine in train_worker.py
    settings = {"lora_rank": RANK, "lora_alpha": ALPHA} | changes
    return open_engine(load_policy(model_folder, gradient_checkpointing=checkpointing), cases.config(**settings))


def masters(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in EngineState(engine).master_weights()}


def beneath(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine._frozen()}


def average(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.average.tensors.items()} if engine.average else {}


def lora(model_folder: str, output: Path) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for case, changes in LORA.items():
        engine = lora_engine(model_folder, checkpointing="checkpointing" in case, **changes)
        start = {"first": masters(engine), "beneath": beneath(engine), "start": cases.weights(engine)}
        record[case] = start | cases.train(engine) | {"last": masters(engine), "still_beneath": beneath(engine)}
        engine.save_hf(output / f"hf-{case}")
    for case, changes in LEARNED.items():
        engine = lora_engine(model_folder, lr_scheduler="constant", **changes)
        steps = [engine.train_step(cases.minibatches()[0], cases.nll)["loss"] for _ in range(LEARNING_STEPS)]
        record[f"learned-{case}"] = steps
    for name in ("deepspeed", "fsdp"):
        settings = {"engine": name, "zero_stage": 3, "lora_rank": RANK, "lora_alpha": ALPHA}
        value = open_engine(load_value_model(model_folder), cases.config(**settings))
        record[f"value-{name}"] = {"first": masters(value)} | cases.train(value, cases.squared_error)
        record[f"value-{name}"]["last"] = masters(value)
        value.save_hf(output / f"value-{name}")
    return record


def step(engine: TrainEngine, batches: list[Batch]) -> dict[str, Any]:
    metrics = [engine.train_step(batch, cases.nll) for batch in batches]
    return {"metrics": metrics, "masters": masters(engine), "average": average(engine)}


def resumed(model_folder: str, states: Path, output: Path) -> dict[str, Any]:
    record: dict[str, Any] = {}
    batches = cases.minibatches()
    for case, changes in RESUMED.items():
        engine = lora_engine(model_folder, **changes)
        saved = step(engine, batches[:2])
        save_state(engine, states / case)
        record[case] = {"saved": saved, "on": step(engine, batches[2:])}
        if engine.average:
            engine.save_hf(output / f"hf-ema-{case}")
        again = lora_engine(model_folder, **changes)
        record[case]["inexact"] = load_state(again, states / case)
        record[case]["again"] = step(again, batches[2:])
    return record


def crossed(model_folder: str, states: Path) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for saved, loaded in CROSSED:
        engine = lora_engine(model_folder, **(RESUMED[loaded] | {"ema_beta": None}))
        inexact = load_state(engine, states / saved)
        start = masters(engine)
        record[f"{saved}-{loaded}"] = {"inexact": inexact, "loaded": start, **step(engine, cases.minibatches()[2:])}
    return record


def refused(model_folder: str, other_folder: str, states: Path) -> dict[str, str]:
    plain = open_engine(load_policy(model_folder), cases.config())
    save_state(plain, states / "plain")
    attempts = {
        "without": (plain, "zero-0"),
        "of_none": (lora_engine(model_folder), "plain"),
        "other_rank": (lora_engine(model_folder, lora_rank=3), "zero-0"),
        "other_targets": (lora_engine(model_folder, lora_target_modules="q_proj, v_proj"), "zero-0"),
        "other_weights": (lora_engine(other_folder, engine="fsdp", zero_stage=3), "zero-0"),
    }
    messages = {}
    for name, (engine, state) in attempts.items():
        before = masters(engine)
        try:
            load_state(engine, states / state)
            messages[name] = "no error"
        except ValueError as error:
            messages[name] = str(error)
        after = masters(engine)
        assert all(torch.equal(before[key], after[key]) for key in before)
    return messages


def cast(model_folder: str) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for precision in ("fp32", "bf16_autocast"):
        for case, changes in CAST.items():
            engine = open_engine(load_policy(model_folder), cases.config(precision=precision, **changes))
            state = cases.train(engine)
            moments = {str(m.dtype) for s in engine.adam.state.values() for m in s.values()}
            record[f"{precision}-{case}"] = state | {"masters": masters(engine), "moments": moments}
    return record


def asleep(model_folder: str) -> dict[str, Any]:
    record: dict[str, Any] = {}
    batches = cases.minibatches()
    for case, changes in (ASLEEP | COUNTED).items():
        for sleeps in (False, True) if case in ASLEEP else (True,):
            before = held_in_memory()
            engine = movable_engine(model_folder, **changes)
            first = step(engine, batches[:2])
            engine.forward(cases.own_part(engine), cases.logprobs)
            if sleeps:
                record[f"{case}-asleep"] = sleep_and_wake(engine) | move_and_return(engine, before, dict(first))
            record[f"{case}-{sleeps}"] = {"first": first, **step(engine, batches[2:]), "weights": cases.weights(engine)}
            del engine
    return record


def movable_engine(model_folder: str, **changes: Any) -> TrainEngine:
    """A weight that is not the memory-mapped file of a CPU model, because that cannot be freed."""
    model = load_policy(model_folder)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return open_engine(model, cases.config(**changes))


def move_and_return(engine: TrainEngine, before: dict[int, int], records: dict[str, Any]) -> dict[str, int]:
    """Simulate on CPU memory the effect of `sleep` on GPU memory.

    Return the bytes that it frees, and the bytes left in the tensors that this process has created since `before`.
    Tensors of the test's records are not counted.
    """
    copies = HostCopies(engine._tensors(), engine._scratch(), "cpu")
    waiting = [copy for _, _, pieces in copies._freed for copy in pieces]
    ours = {tensor.untyped_storage().data_ptr() for tensor in tensors_within([waiting, list(records.values())])}
    left = {place: size for place, size in held_in_memory().items() if place not in before and place not in ours}
    copies.restore()
    return {"bytes": copies.nbytes, "left": sum(left.values())}


def held_in_memory() -> dict[int, int]:
    """Return the bytes of every tensor of this process, by its address."""
    gc.collect()
    held: dict[int, int] = {}
    for thing in gc.get_objects():
        # A mesh keeps the numbers of its ranks in host memory, also with GPUs.
        if type(thing) in (Tensor, torch.nn.Parameter, DTensor) and thing.dtype != torch.int32:
            storage = getattr(thing, "_local_tensor", thing).untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return held


def sleep_and_wake(engine: TrainEngine) -> dict[str, Any]:
    freed, messages = engine.sleep(), []
    calls = [
        lambda: engine.forward(cases.own_part(engine), cases.logprobs),
        lambda: engine.train_step(cases.minibatches()[0], cases.nll),
        lambda: list(engine.gathered_parameters()),
        lambda: engine.save_hf("nowhere"),
        lambda: save_state(engine, "nowhere"),
        lambda: load_state(engine, "nowhere"),
    ]
    for call in calls:
        try:
            call()
            messages.append("no error")
        except ValueError as error:
            messages.append(str(error))
    engine.sleep()
    engine.wake()
    engine.wake()
    return {"freed": freed, "messages": messages}
