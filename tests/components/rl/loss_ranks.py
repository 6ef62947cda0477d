"""One rank of a group that divides an optimizer step: writes the sums of all losses over the ranks to a file.

Usage: loss_ranks.py OUTPUT RANK WORLD_SIZE. A file in OUTPUT serves as rendezvous.

Legend: B sequences; N all tokens of a part end to end; D dimensions of the parameter.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from components.batch import Batch
from components.rl.aggregation import Totals
from tests.components.rl.loss_cases import LOSSES, make_step, reduced

Sums = dict[str, torch.Tensor]
PARAMETERS = 5


def whole_step() -> Batch:
    """Return nine sequences, so that ranks get shares of different sizes. One sequence has no action."""
    step = make_step([5, 1, 17, 40, 3, 1, 8, 2, 30], seed=3)
    mask_N = torch.where(step.sequence_ids == 1, False, step["mask"])
    return step.with_tokens(mask=mask_N, dropped=step["dropped"] & mask_N, held=step["held"] & mask_N)


def evaluate(parts: list[Batch], totals: Totals) -> Sums:
    """Return loss, metrics and the gradient of a parameter for each loss and aggregation, summed over the parts."""
    sums: Sums = {}
    for name, loss in LOSSES.items():
        for part in parts:
            parameter_D = torch.linspace(-0.1, 0.1, PARAMETERS).requires_grad_()
            # The effect of the parameter on a token depends only on the token, not on its position in a part.
            features_ND = torch.stack([(k * part["advantage"] + part["old"]).sin() for k in range(PARAMETERS)], 1)
            outputs = reduced(loss, part["x"] + features_ND @ parameter_D, part, totals)
            for aggregation, out in outputs.items():
                (gradient_D,) = torch.autograd.grad(out.loss, parameter_D, retain_graph=True)
                values = {"loss": out.loss.detach(), "gradient": gradient_D, **out.metrics}
                for what, x in values.items():
                    key = f"{name}, {aggregation}, {what}"
                    sums[key] = sums[key] + x if key in sums else x
    return sums


def main() -> None:
    output = sys.argv[1]
    rank = int(sys.argv[2])
    world_size = int(sys.argv[3])
    meeting = f"file://{output}/meeting"
    guard = timedelta(seconds=200)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size, timeout=guard)
    share = whole_step().split(dist.get_world_size())[dist.get_rank()]
    acting_B = [bool(share.row(i, "mask").any()) for i in range(len(share))]
    counts = torch.tensor([int(share["mask"].sum()), sum(acting_B)])
    dist.all_reduce(counts)
    tokens, sequences = counts.tolist()
    # The second rank processes its share in two parts, the first rank in one.
    sums = evaluate(share.split(1 + dist.get_rank()), Totals(tokens, sequences))
    for name in sorted(sums):
        dist.all_reduce(sums[name])
    torch.save(sums, f"{output}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
