"""REINFORCE++: one trainer, a policy that learns, engines that sample from it, and a frozen reference for the KL."""
