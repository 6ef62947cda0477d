"""Fused Triton kernels of the training pass. `train.kernels=fused` and `train.kernels=auto` load them."""

PROVIDES = {"training kernels": {"choice": "choice:choose", "model": "install:use_kernels"}}
