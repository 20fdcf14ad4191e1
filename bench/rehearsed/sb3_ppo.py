"""Stable-Baselines3: PPO on CartPole with its networks on the GPU."""

from stable_baselines3 import PPO

model = PPO("MlpPolicy", "CartPole-v1", device="cuda", n_steps=128, batch_size=64, n_epochs=2, verbose=1)
model.learn(total_timesteps=512)
