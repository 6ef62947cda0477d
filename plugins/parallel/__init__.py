"""Parallelism beside data: ranks that share sequences (context), layers (tensor) or experts; and the loss that balances
the experts of a mixture.

`parallel.context`, `parallel.tensor` and `parallel.expert` above 1 load the axes; `train.router_aux_loss_coef` above 0
loads the loss.
"""

PROVIDES = {
    "parallelism": dict.fromkeys(("context", "tensor", "expert"), "axes:ParallelAxes"),
    "auxiliary loss": {"router": "router_loss:RouterLoss"},
}
