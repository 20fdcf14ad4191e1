"""Stable-Baselines3: DQN on CartPole, whose actions are read from the GPU."""

from stable_baselines3 import DQN

model = DQN("MlpPolicy", "CartPole-v1", device="cuda", learning_starts=64, train_freq=4, target_update_interval=32)
model.learn(total_timesteps=256)
