"""Settings and an optimizer for OpenRLHF's trainers, which run here without a GPU and without Ray.

Import this module before OpenRLHF, whose package imports vLLM and FlashAttention. The compared functions call neither,
so empty modules replace them.
"""

# pyright: reportMissingImports=false
# OpenRLHF is in the environment that scripts/oracle.sh makes, and in no other.
from __future__ import annotations

import argparse
import ast
import importlib.util
import math
import os
import sys
import types
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import get_scheduler

os.environ |= {"DS_ACCELERATOR": "cpu", "TORCH_COMPILE_DISABLE": "1"}
_SPEC = importlib.util.find_spec("openrlhf")
assert _SPEC is not None and _SPEC.origin is not None
HOME = Path(_SPEC.origin).parent


def _not_here(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("a comparison called what only a GPU has")


def _hollow(name: str, path: str, *functions: str) -> None:
    module = types.ModuleType(name)
    module.__path__ = [path]
    module.__spec__ = importlib.util.spec_from_loader(name, None)
    module.__dict__.update(dict.fromkeys(functions, _not_here))
    sys.modules[name] = module


_hollow("flash_attn", "")
_hollow("flash_attn.bert_padding", "", "index_first_axis", "pad_input", "rearrange", "unpad_input")
_hollow("flash_attn.utils", "")
_hollow("flash_attn.utils.distributed", "", "all_gather")
_hollow("openrlhf.trainer.ray", str(HOME / "trainer" / "ray"))

from openrlhf.trainer.ppo_utils import experience_maker  # noqa: E402
from openrlhf.trainer.ray import ppo_actor, ppo_critic  # noqa: E402
from openrlhf.utils.deepspeed.deepspeed_utils import get_optimizer_grouped_parameters  # noqa: E402


def settings_of(command: list[str]) -> Any:
    """Return the settings that train_ppo_ray makes of a command line: its parser and everything before training."""
    tree = ast.parse((HOME / "cli" / "train_ppo_ray.py").read_text(encoding="utf-8"))
    main = next(node for node in tree.body if isinstance(node, ast.If))
    start = main.body[-1]
    assert ast.unparse(start) == "train(args)"
    names: dict[str, Any] = {"argparse": argparse, "datetime": datetime}
    with mock.patch.object(sys, "argv", ["train_ppo_ray", *command]):
        exec(compile(ast.Module(main.body[:-1], []), "train_ppo_ray", "exec"), names)
    return names["args"]


class Strategy:
    """Replacement of DeepspeedStrategy for one model on one CPU: AdamW with the groups and the schedule of its
    `prepare`, and an optimizer step after `accumulated_gradient` micro-batches.
    """

    ring_attn_group = None

    def __init__(self, args: Any, model: nn.Module, options: Any, steps: int) -> None:
        self.args = args
        self.accumulated_gradient = args.train.batch_size // args.train.micro_batch_size
        groups = get_optimizer_grouped_parameters(model, options.adam.weight_decay)
        adam = {"lr": options.adam.lr, "betas": tuple(options.adam.betas), "eps": options.adam.eps}
        self.model, self.max_norm = model, options.max_norm
        self.optimizer = torch.optim.AdamW(groups, **adam)
        takes_least = options.lr_scheduler in ("cosine_with_min_lr", "cosine_warmup_with_min_lr")
        self.scheduler = get_scheduler(
            options.lr_scheduler,
            self.optimizer,
            num_warmup_steps=math.ceil(steps * options.lr_warmup_ratio),
            num_training_steps=steps,
            scheduler_specific_kwargs={"min_lr_rate": options.min_lr_ratio} if takes_least else {},
        )
        self.micro_batches = 0
        self.loss = 0.0
        self.losses: list[float] = []
        self.norms: list[float] = []

    def backward(self, loss: Tensor, *_: Any) -> None:
        (loss / self.accumulated_gradient).backward()
        self.loss += float(loss.detach()) / self.accumulated_gradient
        self.micro_batches += 1

    def optimizer_step(self, *_: Any, **__: Any) -> None:
        if self.micro_batches % self.accumulated_gradient:
            return
        self.norms.append(float(nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)))
        self.losses.append(self.loss)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.loss = 0.0

    def get_grad_norm(self, _: nn.Module) -> float:
        return self.norms[-1] if self.norms else 0.0

    def all_reduce(self, x: Any, *_: Any) -> Any:
        return x

    def is_rank_0(self) -> bool:
        return False

    def taken(self) -> tuple[float, float]:
        """Return the means of loss and gradient norm since the last call."""
        means = [sum(values) / len(values) for values in (self.losses, self.norms)]
        self.losses, self.norms = [], []
        return means[0], means[1]


class ExperienceMaker(experience_maker.RemoteExperienceMaker):
    """Calls local models, where the original calls groups of Ray actors."""

    def _dispatch_forward(self, group: Callable[..., Tensor], sync_condition: bool, **columns: Any) -> list[Tensor]:
        del sync_condition
        rows = zip(columns["sequences"], columns["attention_mask"], columns["action_mask"], strict=True)
        return [group(tokens, action_mask=acts, attention_mask=reads) for tokens, reads, acts in rows]

    def _flatten_results(self, refs: Any, duplicate_factor: int) -> list[Any]:
        del duplicate_factor
        return [None] * len(refs) if refs[0] == [None] else refs


class Order:
    """A data-loader sampler that returns a step's responses in a given order for the next epochs."""

    def __init__(self) -> None:
        self.epochs: list[list[int]] = []

    def __iter__(self) -> Iterator[int]:
        return iter(self.epochs.pop(0))

    def __len__(self) -> int:
        return len(self.epochs[0])


def on_a_cpu(patch: Any, order: Order) -> None:
    """Let OpenRLHF's trainers run here, on responses in this order."""

    def loader(*arguments: Any, **named: Any) -> DataLoader[Any]:
        return DataLoader(*arguments, **named | {"shuffle": False, "sampler": order})

    patch.setattr(experience_maker, "ray", types.SimpleNamespace(put=lambda x: x))
    patch.setattr(ppo_actor, "torch_dist_barrier_and_cuda_sync", lambda: None)
    for module in (ppo_actor, ppo_critic):
        patch.setattr(module, "DataLoader", loader)
    # A device that formats as a number in names, and that tensors can be sent to.
    patch.setattr(torch.cuda, "current_device", _Here)


class _Here(str):
    """The device name of this machine's CPU. After `cuda:` it formats as a number."""

    def __new__(cls) -> _Here:
        return super().__new__(cls, "cpu")

    def __format__(self, _: str) -> str:
        return "0"
