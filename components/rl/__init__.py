"""RL maths: pure functions from tensors to tensors. Each one cites the paper and the equation that it computes."""
