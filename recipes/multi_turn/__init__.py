"""Episodes of many turns: one trainer, a policy that learns, and engines that play it against an environment."""
