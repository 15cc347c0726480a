"""The names that other systems have for settings, for hints such as ` (did you mean --total-steps?)`.

The systems are stable-baselines3 and its zoo, CleanRL, RLlib, TorchRL, TF-Agents, JoyRL and ElegantRL.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Container

# A line has what to use here, "=", and the names elsewhere. Alternatives stand between "/", because not every
# command has each of them. Names of tfrl's own flags that no other line names stand after --NAME.
_TABLE = """
--total-steps = timesteps total_timesteps n_timesteps num_timesteps timesteps_total max_timesteps n_iter
--total-steps = stop_timesteps total_env_steps num_env_steps break_step max_train_steps steps train_steps
--total-steps = num_iterations stop_iters training_iteration num_train_steps total_num_steps max_env_steps
--total-frames = frames max_frames n_frames num_frames
--max-episodes = max_episode train_eps num_episodes n_episodes episodes total_episodes n_eps stop_episodes
--max-episode-steps = max_step max_ep_len horizon episode_length max_frames_per_traj max_episode_length
--max-episode-steps = time_limit ep_max_steps max_steps
--solved-at = stop_reward target_return reward_threshold target_reward

--device cpu or gpu = cuda use_cuda use_gpu collector_device
--device gpu:NUMBER = gpu_id gpu learner_gpus cuda_id device_id visible_gpu
--replicas = num_gpus num_gpus_per_learner n_gpus num_gpus_per_worker gpus
--threads = thread_num num_threads n_threads nthreads num_cpus torch_threads
--eager = run_eagerly eager_mode eager_tracing
--log-level = verbose verbosity loglevel

--env = env_id env_name id gym_id task env_key env_class
--env-kwargs = env_config env_args game_args
--env my_module:make_env, which wraps the env = wrapper env_wrapper wrappers
--num-envs = n_envs num_env env_num env_per_collector num_envs_per_worker num_vec_envs num_envs_per_env_runner
--actors / --observers = num_workers num_env_runners num_rollout_workers n_workers worker_num num_collectors
--actors / --observers = n_interactors mp_backend num_actors n_rollout_threads
--env-processes = vec_env vec_env_type
--learners = num_learners learner_num n_learners
--frame-skip = frameskip action_repeat skip frame_repeat
--normalize-observations = normalize observation_filter norm_obs obs_norm
--normalize-rewards = norm_reward normalize_reward reward_norm
--seed = random_seed rand_seed env_seed

--logdir = log_dir log_folder tensorboard_log save_path local_dir storage_path log_path output_dir out_dir
--run-name = exp_name experiment_name tb_log_name cwd run_id name
--resume restart = is_remove if_remove overwrite
--start-from = trained_agent load_path load_checkpoint load_model_step restore pretrained restore_path
--start-from = model_path
--checkpoint-every = save_freq checkpoint_freq checkpoint_frequency save_interval model_save_fre save_every
--checkpoint-every = save_gap
--keep-checkpoints = num_checkpoints num_to_keep
--eval-every = eval_freq eval_interval evaluation_interval eval_iter eval_gap online_eval eval_per_episode
--eval-every-steps = eval_per_step
--eval-episodes = n_eval_episodes evaluation_duration eval_times eval_eps online_eval_episode test_eps
--eval-episodes = num_eval_episodes n_eval_envs
--eval-greedy = deterministic eval_deterministic
--record-every = capture_video record_video save_video video_freq
--callbacks tfrl.callbacks:WandB = track wandb wandb_project_name wandb_entity use_wandb
python -m tfrl.record RUN --window = render render_mode if_render
python -m tfrl.evaluate RUN = mode test play
python -m tfrl.collect RUN = collect_traj
the run's plots/learning_curve.png = show_fig save_fig
the command itself, such as python -m tfrl.dqn = algo algo_name algorithm_name agent agent_name run

--hidden = net_dims net_dim num_cells hidden_sizes hidden_size hidden_dim hidden_units fcnet_hiddens net_arch
--hidden = mlp_hidden_units num_layers hidden_layers layers value_layers actor_layers critic_layers
--hidden = policy_kwargs layer_size actor_hidden_dim critic_hidden_dim branch_layers actor_branch_layers
--hidden = critic_branch_layers merge_layers mid_dim
--activation = activation_fn fcnet_activation nonlinearity activations
--torso / --model = policy features_extractor_class conv_filters cnn custom_model
--memory = use_lstm recurrent use_rnn
--memory-size = lstm_cell_size lstm_hidden_size rnn_hidden_dim
--sequence-length = max_seq_len
--share-torso = vf_share_layers shared_network independ_actor shared_layers

--lr = learning_rate step_size policy_lr lr_actor pi_lr lr_a actor_learning_rate actor_lr
--critic-lr / --lr = critic_lr q_lr lr_critic value_lr vf_lr lr_c critic_learning_rate
--lr-schedule / --schedule = lr_decay linear_lr_decay use_linear_lr_decay learning_rate_schedule lr_annealing
--lr-schedule / --schedule = anneal_lr
--optimizer = optim optimizer_class opt_type share_optimizer
--adam-epsilon = adam_eps eps optimizer_epsilon
--max-grad-norm = grad_clip clip_grad_norm max_norm grad_norm gradient_clip clip_grad grad_norm_clipping
--gamma = discount discount_factor discount_rate

--clip-ratio = clip_range clip_epsilon clip_coef clip_param eps_clip clip_eps ratio_clip
--clip-value = clip_range_vf vf_clip_param clip_vloss
--entropy-coef / --alpha = ent_coef entropy_coeff entropy_eps entropy_weight entropy_beta lambda_entropy beta
--entropy-coef / --alpha = entropy_bonus
--value-coef = vf_coef vf_loss_coeff value_loss_coef critic_coef critic_loss_coef value_coeff vf_coeff
--gae-lambda = lambda lambda_ lmbda lam gae lambda_gae_adv gae_lmbda advantage_module
--epochs / --updates-per-step = n_epochs num_epochs update_epochs num_sgd_iter k_epochs ppo_epochs noptepochs
--num-steps / --n-step = n_steps
--num-steps / --iteration-steps = rollout_fragment_length target_step horizon_len rollout_length
--num-steps / --iteration-steps = nsteps steps_per_epoch train_batch_size frames_per_batch update_timestep
--num-steps / --iteration-steps = train_batch_size_per_learner exps_trucation_size trajectory_length
--num-steps / --iteration-steps = rollout_steps
--minibatch-size / --num-minibatches / --batch-size = batch_size sub_batch_size sgd_minibatch_size mb_size
--minibatch-size / --num-minibatches / --batch-size = mini_batch_size sgd_batch_size minibatch
--num-minibatches / --batch-size = minibatches n_minibatches num_mini_batch
--target-kl = kl_target target_kl_divergence max_kl
--normalize-advantages = norm_adv normalize_advantage average_gae

--replay-size = buffer_size max_buffer_size buffer_capacity memory_capacity replay_buffer_size max_memo
--replay-size = replay_capacity capacity memory_size replay_buffer_config buffer_type replay_size
--learning-starts = learning_starts init_random_frames start_steps warmup_steps min_buffer_size
--learning-starts = start_timesteps num_steps_sampled_before_learning_starts replay_start_size
--train-every = train_freq train_frequency update_every training_frequency
--updates-per-step / --epochs = gradient_steps utd_ratio repeat_times training_intensity num_updates
--tau = tau soft_update_tau polyak target_update_polyak soft_target_tau
--target-every = target_update target_update_interval target_network_frequency target_network_update_freq
--target-every = hard_update_freq target_update_freq target_update_fre target_replace_iter
--exploration-steps / --exploration-noise = epsilon_decay exploration_fraction epsilon_timesteps eps_decay
--exploration-steps / --exploration-noise = annealing_frames epsilon_decay_steps exploration_timesteps
--exploration-start / --exploration-noise = epsilon_start start_e eps_start exploration_initial_eps
--exploration-start / --exploration-noise = initial_epsilon
--exploration-end / --exploration-noise = epsilon_end end_e eps_end exploration_final_eps final_epsilon
--exploration-end / --exploration-noise = epsilon explore_rate
--exploration-noise / --exploration-steps = action_noise explore_noise noise_std expl_noise sigma ou_noise
--exploration-noise / --exploration-steps = exploration_type exploration_config
--double = double_q double_dqn use_double
--dueling = use_dueling dueling_dqn
--prioritized = if_use_per per prioritized_replay use_per
--priority-exponent = prioritized_replay_alpha per_alpha
--priority-beta = prioritized_replay_beta per_beta
--policy-delay = policy_frequency actor_update_freq policy_freq
--target-noise = target_policy_noise policy_noise
--target-noise-clip = noise_clip
--entropy-target = target_entropy autotune auto_entropy

--frame-skip = gym_frame_skip
--hidden = fc_layer_params actor_fc_layers value_fc_layers critic_obs_fc_layers q_fc_layers
--max-grad-norm = gradient_clipping
--gae-lambda = lambda_value
--clip-ratio = importance_ratio_clipping
--clip-value = value_clipping
--entropy-coef = entropy_regularization
--value-coef = value_pred_loss_coef
--num-steps / --train-every = collect_steps_per_iteration
--learning-starts = initial_collect_steps
--tau = target_update_tau
--target-every = target_update_period
--exploration-end / --exploration-noise = epsilon_greedy
--n-step = n_step_update
--huber-delta = td_errors_loss_fn
--value-loss / --huber-delta = loss_critic_type
--reward-scale = reward_scale_factor
--alpha-start = initial_log_alpha initial_alpha

= framework backend torch_deterministic is_fork compile state_dim action_dim if_discrete new_step_api
= n_states n_actions optimize_memory_usage replay_buffer_class use_gae use_critic kl_coeff
= use_sde sde_sample_freq v_min v_max num_atoms n_atoms noisy vmin vmax joyrl_version policy_summary_fre
= interact_summary_fre is_learner_async stats_window_size if_off_policy ignore_params
= share_buffer ppo_type continuous kl_lambda kl_beta batch_mode num_cpus_per_env_runner twin_q split_trajs
= upload_model

--NAME = action_samples actor_timeout advantage_clip advantage_coef alpha_lr augment augment_coef aux_epochs
--NAME = aux_lr aux_minibatches backup_entropy bc_alpha beta_clone c_bar conservative_weight critics dataset
--NAME = dropout expectile exploration_decay free_deviation free_running freeze_torso held_shards image_size
--NAME = lag level_replay level_schedule level_staleness level_temperature log_every memory_inputs
--NAME = noise_correlation normalization normalize_random_steps observer_timeout order_coef
--NAME = order_hidden patience per_image_standardization policy_updates preprocess renew_advantages
--NAME = reward_norm_gamma rho_bar soft_target split target_bound temperature torso_weights validation
--NAME = value_epochs value_every vtrace_lambda warmup weight_decay width
"""


@functools.cache
def names() -> dict[str, tuple[str, ...]]:
    """The names here by the name elsewhere or in another command; none for settings without a counterpart."""
    found: dict[str, tuple[str, ...]] = {}
    own: list[str] = []
    for line in filter(None, _TABLE.splitlines()):
        here, _, elsewhere = line.partition("=")
        choices = tuple(filter(None, map(str.strip, here.split("/"))))
        if choices == ("--NAME",):
            own += elsewhere.split()
        else:
            found |= dict.fromkeys(elsewhere.split(), choices)
            own += [name for choice in choices for name in fields_in(choice)]
    return {name: (f"--{name.replace('_', '-')}",) for name in own} | found


def other_name(name: str, kinds: Container[str]) -> str:
    """A hint for another system's name of a setting; "" if no system has it.

    Args:
      name: as the user wrote it, with dashes or underscores.
      kinds: the settings of the command, which a hint may name.
    """
    choices = names().get(name.strip("-").replace("-", "_").lower())
    if choices is None:
        return ""
    if not choices:
        return " (leave it out: tfrl has no such setting)"
    fitting = [choice for choice in choices if all(flag in kinds for flag in fields_in(choice))]
    if not fitting:
        return f" (other commands have {' or '.join(choices)})"
    what = fitting[0]
    return f" (did you mean {what}?)" if what.startswith("--") else f" (use {what})"


def fields_in(text: str) -> list[str]:
    """The fields of the flags at the beginning of a text of the table."""
    return [flag.replace("-", "_") for flag in re.findall(r"^--([a-z-]+)", text)]
