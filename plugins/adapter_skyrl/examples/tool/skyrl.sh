#!/usr/bin/env bash
# Trains in SkyRL on the environments of run.toml, next to this file. Further arguments override these.
# SkyRL has its own settings for [trainer], [bridge], [engine], [curriculum], [teacher.*], [sink.*] and [health]: only the
# learning rate is carried over. Of [transform.*], group_advantage is carried over.
set -euo pipefail
cd "$(dirname "$0")"
exec python -m skyrl.train.entrypoints.main_base \
  trainer.override_entrypoint=atropos_adapter_skyrl.entrypoint \
  atropos.run=run.toml \
  atropos.source=rings \
  atropos.rings=rings \
  atropos.engines='["http://127.0.0.1:8001"]' \
  trainer.policy.model.path=Qwen/Qwen2.5-0.5B-Instruct \
  trainer.seed=0 \
  trainer.max_training_steps=200 \
  trainer.epochs=200 \
  trainer.train_batch_size=64 \
  trainer.policy_mini_batch_size=64 \
  trainer.algorithm.advantage_estimator=grpo \
  trainer.algorithm.grpo_norm_by_std=true \
  trainer.algorithm.use_kl_loss=false \
  trainer.placement.colocate_all=false \
  trainer.placement.policy_num_gpus_per_node=1 \
  trainer.placement.ref_num_gpus_per_node=1 \
  trainer.eval_interval=20 \
  trainer.eval_before_train=true \
  trainer.eval_batch_size=256 \
  trainer.ckpt_interval=50 \
  trainer.max_ckpts_to_keep=2 \
  trainer.ckpt_path=checkpoints \
  trainer.export_path=exports \
  trainer.logger=console \
  generator.inference_engine.num_engines=1 \
  generator.inference_engine.tensor_parallel_size=1 \
  generator.n_samples_per_prompt=8 \
  generator.eval_n_samples_per_prompt=1 \
  data.dataloader.num_workers=0 \
  trainer.policy.optimizer_config.lr=1e-06 \
  generator.sampling_params.max_generate_length=512 \
  generator.sampling_params.temperature=1.0 \
  generator.sampling_params.top_p=1.0 \
  generator.sampling_params.top_k=-1 \
  generator.sampling_params.min_p=0.0 \
  generator.sampling_params.logprobs=1 \
  generator.eval_sampling_params.max_generate_length=512 \
  generator.eval_sampling_params.temperature=0.0 \
  generator.eval_sampling_params.top_p=1.0 \
  generator.eval_sampling_params.top_k=-1 \
  generator.eval_sampling_params.min_p=0.0 \
  generator.eval_sampling_params.logprobs=1 \
  "$@"
