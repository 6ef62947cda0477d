"""GRPO: one trainer, a policy that learns, engines that sample from it, and a frozen reference where there is a KL."""
