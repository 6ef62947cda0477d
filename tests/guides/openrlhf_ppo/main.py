"""Submits the job of the guide: `python -m openrlhf_ppo.main --out found.json`."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from core import RLJobBuilder, RLRoleType

P = "openrlhf_ppo"


def args_2_omega_conf(args: argparse.Namespace) -> Any:
    return OmegaConf.create(vars(args))


def submit(args: argparse.Namespace) -> int:
    # 1. Create a job builder
    builder = RLJobBuilder().config(args_2_omega_conf(args))

    # 2. Define workloads / roles
    builder.trainer(f"{P}.ppo_trainer.PPOTrainerActor").resource(cpu=0.1)
    (
        builder.actor(f"{P}.ppo_actor.PolicyModelActor")
        .resource(cpu=0.1, accelerator=1)
        .nnodes(args.actor_num_nodes)
        .nproc_per_node(args.actor_num_gpus_per_node)
    )
    (
        builder.critic(f"{P}.ppo_critic.CriticModelRayActor")
        .resource(cpu=0.1, accelerator=0.4)
        .nnodes(args.critic_num_nodes)
        .nproc_per_node(args.critic_num_gpus_per_node)
    )
    (builder.rollout(f"{P}.ppo_rollout.VLLMActor").resource(cpu=0.1, accelerator=1).total(args.vllm_num_engines))
    # optional reference role
    if args.init_kl_coef != 0:
        (
            builder.role(RLRoleType.REFERENCE.name)
            .train(f"{P}.ppo_reference.PPOReferenceActor")
            .resource(cpu=0.1, accelerator=0.4)
            .nnodes(args.ref_num_nodes)
            .nproc_per_node(args.ref_num_gpus_per_node)
        )
    (
        builder.role(RLRoleType.REWARD.name)
        .train(f"{P}.ppo_reward.RewardModelRayActor")
        .resource(cpu=0.1, accelerator=0.4)
        .nnodes(args.reward_num_nodes)
        .nproc_per_node(args.reward_num_gpus_per_node)
    )

    # 3. Build and submit
    job = builder.device_type("CPU").build()
    # optional changes before submission
    if args.skip_node_check:
        for workload in job.workloads.values():
            if workload.backend == "elastic":
                workload.comm_pre_check = False
    print(job.model_dump_json(indent=2))
    if not args.dry_run:
        return job.submit(args.job_name, backend=args.backend).exit_code
    return 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    for role in ("actor", "critic", "ref", "reward"):
        parser.add_argument(f"--{role}_num_nodes", type=int, default=1)
        parser.add_argument(f"--{role}_num_gpus_per_node", type=int, default=1)
    parser.add_argument("--vllm_num_engines", type=int, default=2)
    parser.add_argument("--init_kl_coef", type=float, default=0.1)
    parser.add_argument("--job_name", default="openrlhf-ppo")
    parser.add_argument("--backend", default="ray")
    parser.add_argument("--out", default="")
    parser.add_argument("--skip_node_check", action="store_true")
    parser.add_argument("--dry_run", action="store_true")
    return submit(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
