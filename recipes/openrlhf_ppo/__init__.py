"""PPO in OpenRLHF's shape: one trainer that drives actor, critic, reward, reference and rollout by remote calls."""
