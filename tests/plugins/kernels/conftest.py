"""Processes in which Triton interprets the kernels."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.architecture import ROOT

WORK = Path(__file__).with_name("interpreted.py")
Interpret = Callable[..., Any]


def start(*words: object) -> subprocess.Popen[str]:
    """Start a process in which Triton interprets kernels. The variable must be set before triton is imported."""
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(WORK), *map(str, words)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result_of(process: subprocess.Popen[str]) -> Any:
    """Wait for a process and return what it has printed."""
    output, error = process.communicate(timeout=500)
    assert process.returncode == 0, error
    # Libraries print to stdout too.
    return json.loads(output.splitlines()[-1])


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int) -> bytes:
    """Compile a kernel for a GPU, which need not exist, and return the machine code.

    Args:
        kernel: function with `triton.jit`, in a process without the interpreter.
        types: Triton's types of the arguments by name. Those in `constants` may be left out.
        constants: values of the constant arguments.
        capability: compute capability, such as 90 for an H100.
    """
    names: list[str] = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8}).asm["cubin"]


@pytest.fixture(scope="session")
def interpret() -> Interpret:
    """Return the function that runs a function of interpreted.py and returns its result."""
    return lambda *words: result_of(start(*words))
