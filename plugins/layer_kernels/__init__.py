"""Fused Triton kernels of decoder layers. `plugins/kernels` loads them if the folder exists."""

PROVIDES = {"training kernels": {"layers": "replace:use_layer_kernels"}}
