"""Ranks of `test_watch.py`: rank 1 is stopped by a signal before each kind of collective, and rank 0 waits for it."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from components.train.process_group import init_process_group
from plugins.collective_watch.guard import _store_address
from plugins.collective_watch.watch import Watch

LIMIT_S = 2.0


class Layer(nn.Module):
    """A layer whose forward pass is one collective."""

    def forward(self, collective: Callable[[], Any]) -> None:
        collective()


class Model(nn.Module):
    """A model of two layers. The second one has the collective."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, collective: Callable[[], Any]) -> None:
        self.layers[1](collective)


def kinds() -> dict[str, Callable[[], Any]]:
    """Return the collectives that the engines use, by the name of the function."""
    four = torch.ones(4)
    return {
        "all_reduce": lambda: dist.all_reduce(four),
        "all_gather": lambda: dist.all_gather([torch.zeros(4), torch.zeros(4)], four),
        "all_gather_single": lambda: dist.all_gather_single(torch.zeros(8), four),
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(torch.zeros(2), four),
        "broadcast": lambda: dist.broadcast(four, 1),
        "barrier": dist.barrier,
        "all_gather_object": lambda: dist.all_gather_object([None, None], {"rank": 0}),
    }


def step(pids: list[int], stops: bool = True) -> None:
    """Stop this process, or sleep, within a function that has the name of an optimizer step."""
    time.sleep(LIMIT_S / 4)
    if stops:
        os.kill(pids[1], signal.SIGSTOP)
    else:
        time.sleep(LIMIT_S)


def waits() -> list[str]:
    """Return the sentences that rank 0 reports, one for each kind of collective and one for a rank that sleeps."""
    # The lines of a long wait are no output of the ranks here.
    logging.getLogger("plugins.collective_watch").addHandler(logging.NullHandler())
    init_process_group(60)
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    reports: list[str] = []

    def report(sentence: str) -> None:
        reports.append(sentence)
        os.kill(pids[1], signal.SIGCONT)

    Watch("ACTOR", _store_address(), LIMIT_S, report).start()
    model = Model()
    for collective in kinds().values():
        if dist.get_rank() == 1:
            step(pids)
        model(collective)
    if dist.get_rank() == 1:
        step(pids, stops=False)
    model(dist.barrier)
    return reports
