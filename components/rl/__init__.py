"""RL maths: pure functions, tensors in and tensors out. Each names the paper and equation that it computes."""
