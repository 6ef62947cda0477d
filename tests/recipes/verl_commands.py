"""Command lines in the form of verl's examples, and a small one."""

GRPO_ON_GSM8K = """
    algorithm.adv_estimator=grpo
    data.train_files=data/gsm8k/train.parquet
    data.val_files=data/gsm8k/test.parquet
    data.train_batch_size=1024
    data.max_prompt_length=512
    data.max_response_length=1024
    data.filter_overlong_prompts=True
    data.truncation='error'
    actor_rollout_ref.model.path=Qwen/Qwen3-8B
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.fsdp_config.param_offload=False
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.n=5
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8
    actor_rollout_ref.ref.fsdp_config.param_offload=True
    algorithm.use_kl_in_reward=False
    trainer.critic_warmup=0
    trainer.logger='["console","wandb"]'
    trainer.project_name='verl_grpo_example_gsm8k'
    trainer.experiment_name='qwen3_8b_function_rm'
    trainer.n_gpus_per_node=8
    trainer.nnodes=1
    trainer.save_freq=20
    trainer.test_freq=5
    trainer.total_epochs=15
"""
PPO_ON_GSM8K_AND_MATH = """
    data.train_files="['a/gsm8k.parquet', 'a/math.parquet']"
    data.val_files="['a/gsm8k_test.parquet', 'a/math_test.parquet']"
    data.train_batch_size=4096
    data.val_batch_size=1312
    data.return_raw_chat=True
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.ppo_mini_batch_size=512
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000
    actor_rollout_ref.actor.fsdp_config.grad_offload=False
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    +actor_rollout_ref.model.override_config.attn_implementation=sdpa
    critic.strategy=fsdp2
    critic.optim.lr=1e-5
    critic.optim.lr_warmup_steps_ratio=0.05
    critic.model.path=Qwen/Qwen2-7B-Instruct
    critic.ppo_max_token_len_per_gpu=98304
    critic.model.fsdp_config.param_offload=True
    reward_model.enable=True
    reward_model.model.path=sfairXC/FsfairX-LLaMA3-RM-v0.1
    reward_model.micro_batch_size_per_gpu=16
    reward_model.use_dynamic_bsz=True
    reward_model.forward_max_token_len_per_gpu=70000
    algorithm.kl_ctrl.kl_coef=0.001
    trainer.logger=['console']
    ++trainer.val_before_train=False
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=128
    +reward_model.reward_kwargs.max_resp_len=512
    trainer.n_gpus_per_node=8
"""
SMALL = [
    *("data.train_files=task:sort", "actor_rollout_ref.model.path=warm_start:sort", "data.train_batch_size=64"),
    *("actor_rollout_ref.actor.ppo_mini_batch_size=16", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"),
    *("actor_rollout_ref.rollout.n=8", "run_dir=x"),
]
