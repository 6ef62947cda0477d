"""Context, tensor and expert parallelism, and the load-balancing loss of mixtures of experts.

`parallel.context`, `parallel.tensor` or `parallel.expert` above 1 loads the axes. `train.router_aux_loss_coef` above 0
loads the loss.
"""

PROVIDES = {
    "parallelism": dict.fromkeys(("context", "tensor", "expert"), "axes:ParallelAxes"),
    "auxiliary loss": {"router": "router_loss:RouterLoss"},
}
