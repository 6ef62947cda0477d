"""State of one rank: the collective that it waits in, and the phase and layer that it computes.

The collective comes from torch's flight recorder, which gloo and NCCL fill. Phase and layer come from the Python stack,
so that nothing is recorded while the rank works.
"""

from __future__ import annotations

import importlib
import pickle
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

from torch import nn

_c10d: Any = importlib.import_module("torch._C._distributed_c10d")
DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")
"""Functions that return the records of gloo and of NCCL. A build of torch may lack the second one."""
BUFFER_SIZE = "TORCH_FR_BUFFER_SIZE" if hasattr(_c10d, DUMPS[0]) else "TORCH_NCCL_TRACE_BUFFER_SIZE"
"""Variable with the number of collectives that are recorded. torch deprecates the older name where it reads the newer
one."""
PHASES = {
    "clip_grad_norm": "gradient clipping",
    "_step": "the optimizer step",
    "step": "the optimizer step",
    "_backward": "the backward pass",
    "backward": "the backward pass",
    "publish": "the weight sync",
    "publish_weights": "the weight sync",
    "save_state": "saving a checkpoint",
    "load_state": "loading a checkpoint",
    "save_hf": "saving the model",
    "forward": "the forward pass",
    "setup": "the set-up",
    "train_step": "a training step",
    "load": "loading the model",
}
"""Phase of a function by its name. The innermost function of the stack that is listed decides."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)(?:\.|$)")
_COLLECTIVES = "distributed_c10d.py"


@dataclass(frozen=True)
class Pending:
    """Collective of a rank that has not ended."""

    group: str
    """Name of the process group, the same on all of its ranks."""
    number: int
    """Number of the collective within its group, from 1."""
    operation: str


@dataclass
class RankState:
    """State of a rank, which other ranks read as JSON."""

    rank: int
    tick: int
    """Number of states that the rank has published. It stops if the process is stopped."""
    beats: int
    """Number of heartbeats of the rank (components/process/heartbeat.py)."""
    phase: str
    layer: str
    pending: Pending | None = None
    counts: dict[str, int] = field(default_factory=dict)
    """Number of the last collective that the rank has started, by group."""

    def as_dict(self) -> dict[str, Any]:
        """Return the state as a dictionary for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RankState:
        """Return the state of a dictionary of `as_dict`."""
        pending = values.pop("pending")
        return cls(**values, pending=pending and Pending(**pending))


def read_state(rank: int, tick: int, beats: int) -> RankState:
    """Return the state of this process."""
    pending, counts = collectives(recorded())
    frames = list(_stack_of(_working_thread()))
    if pending is not None:
        pending = Pending(pending.group, pending.number, _called(frames) or pending.operation)
    return RankState(rank, tick, beats, phase_of(frames), layer_of(frames), pending, counts)


def recorded() -> list[dict[str, Any]]:
    """Return the records of the latest collectives of this process, in the format of torch's flight recorder."""
    # Without stack traces, which take most of the time.
    dumps = [pickle.loads(record) for name in DUMPS if (record := dumped(name, with_stacks=False))]
    return [entry for dump in dumps for entry in dump.get("entries", [])]


def dumped(name: str, with_stacks: bool = True) -> bytes:
    """Return the flight record of gloo or NCCL, pickled by torch, or nothing if torch was built without it."""
    return getattr(_c10d, name)(True, with_stacks, False) if hasattr(_c10d, name) else b""


def collectives(entries: list[dict[str, Any]]) -> tuple[Pending | None, dict[str, int]]:
    """Return the oldest pending collective, and the number of the last collective of each group."""
    counts: dict[str, int] = {}
    oldest: dict[str, Any] | None = None
    for entry in entries:
        if entry.get("is_p2p"):
            continue
        group = entry["process_group"][0]
        counts[group] = max(counts.get(group, 0), entry["collective_seq_id"])
        # gloo never sets the state to "completed", NCCL retires an entry later than it completes.
        is_pending = not entry["retired"] and entry["state"] != "completed"
        if is_pending and (oldest is None or entry["time_created_ns"] < oldest["time_created_ns"]):
            oldest = entry
    if oldest is None:
        return None, counts
    operation = oldest["profiling_name"].rpartition(":")[2]
    return Pending(oldest["process_group"][0], oldest["collective_seq_id"], operation), counts


def phase_of(frames: list[FrameType]) -> str:
    """Return the phase of a stack, given from the innermost frame, or its innermost place outside of libraries."""
    for frame in frames:
        if frame.f_code.co_name in PHASES:
            return PHASES[frame.f_code.co_name]
    for frame in frames:
        code = frame.f_code
        if "site-packages" not in code.co_filename and not code.co_filename.startswith((sys.base_prefix, "<")):
            return f"{code.co_name} ({code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"
    return "no call"


def layer_of(frames: list[FrameType]) -> str:
    """Return the layer of the innermost module of a stack, such as `layer 12`, or an empty string."""
    modules = [module for frame in frames for module in _modules_of(frame)]
    if not modules:
        return ""
    # The outermost module is the model, which names the others.
    name = next((name for name, module in modules[-1].named_modules() if module is modules[0]), "")
    if match := _LAYER.search(name):
        return f"layer {match[1]}"
    return name


def _modules_of(frame: FrameType) -> Iterator[nn.Module]:
    """Yield the modules that a frame works on: `self` of their methods, and those of FSDP's and DeepSpeed's hooks."""
    for variable in ("self", "module", "sub_module"):
        value: Any = frame.f_locals.get(variable)
        if isinstance(value, nn.Module):
            yield value
        # FSDP's group of parameters, which communicates outside of the methods of its module.
        elif hasattr(value, "fsdp_params"):
            yield from value.modules


def _called(frames: list[FrameType]) -> str:
    """Return the function of torch.distributed that was called, which may consist of other collectives, or ''."""
    names = [frame.f_code.co_name for frame in frames if frame.f_code.co_filename.endswith(_COLLECTIVES)]
    return names[-1] if names else ""


def _working_thread() -> FrameType | None:
    """Return the stack of the thread that is in a collective, that runs a call of the job, or of the main thread."""
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    # In a process of several workloads, calls run on other threads than the main one.
    main = frames.get(threading.main_thread().ident or 0)
    stacks = [list(_stack_of(frame)) for frame in frames.values()]
    for is_marked in (_is_in_a_collective, _is_in_a_call):
        for stack in stacks:
            if any(is_marked(frame) for frame in stack):
                return stack[0]
    return main


def _is_in_a_collective(frame: FrameType) -> bool:
    return frame.f_code.co_filename.endswith(_COLLECTIVES)


def _is_in_a_call(frame: FrameType) -> bool:
    return frame.f_code.co_name in ("_observed", "construct") and "supervise" in frame.f_code.co_filename


def _stack_of(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of a stack, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back
