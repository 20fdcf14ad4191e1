"""Agents: replay, policies, advantages, with a small environment on the host."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal

from support.ordinary import Step, program


class Pole:
    """Four numbers that move by themselves; an episode has 20 moments."""

    def reset(self) -> np.ndarray:
        self.at = 0
        return np.zeros(4, dtype=np.float32)

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        self.at += 1
        return np.full(4, 0.1 * self.at, dtype=np.float32), 1.0, self.at >= 20


def _mlp(width: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, out)).to("cuda")


@program(asks=True)
def deep_q_learning() -> Step:
    policy, target, world = _mlp(4, 2), _mlp(4, 2), Pole()
    target.load_state_dict(policy.state_dict())
    optimizer, memory = torch.optim.AdamW(policy.parameters(), lr=1e-4, amsgrad=True), deque(maxlen=1000)
    state = world.reset()

    def step() -> None:
        nonlocal state
        for _ in range(40):
            if random.random() > 0.5:
                with torch.no_grad():
                    action = policy(torch.tensor(state, device="cuda").unsqueeze(0)).max(1).indices.view(1, 1).item()
            else:
                action = random.randrange(2)
            after, reward, done = world.step(action)
            memory.append((state, action, after, reward, done))
            state = world.reset() if done else after
        batch = random.sample(memory, 32)
        states = torch.tensor(np.stack([b[0] for b in batch]), device="cuda")
        actions = torch.tensor([[b[1]] for b in batch], device="cuda")
        rewards = torch.tensor([b[3] for b in batch], device="cuda")
        going = torch.tensor([not b[4] for b in batch], device="cuda", dtype=torch.bool)
        following = torch.tensor(np.stack([b[2] for b in batch if not b[4]]), device="cuda")
        values = torch.zeros(32, device="cuda")
        with torch.no_grad():
            values[going] = target(following).max(1).values
        loss = F.smooth_l1_loss(policy(states).gather(1, actions), (values * 0.99 + rewards).unsqueeze(1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(policy.parameters(), 100)
        optimizer.step()

    return step


@program(asks=True)
def reinforce() -> Step:
    policy, world = _mlp(4, 2), Pole()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

    def step() -> None:
        state, saved, rewards, done = world.reset(), [], [], False
        while not done:
            chances = F.softmax(policy(torch.from_numpy(state).float().unsqueeze(0).cuda()), dim=1)
            chosen = Categorical(chances)
            action = chosen.sample()
            saved.append(chosen.log_prob(action))
            state, reward, done = world.step(action.item())
            rewards.append(reward)
        returns, total = deque(), 0.0
        for reward in rewards[::-1]:
            total = reward + 0.99 * total
            returns.appendleft(total)
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        optimizer.zero_grad()
        torch.cat([-p * r for p, r in zip(saved, returns, strict=True)]).sum().backward()
        optimizer.step()

    return step


@program(asks=True)
def proximal_policy_optimization() -> Step:
    actor, critic = _mlp(8, 4), _mlp(8, 1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=2.5e-4, eps=1e-5)
    seen = torch.randn(128, 8).cuda()

    def step() -> None:
        with torch.no_grad():
            chosen = Categorical(logits=actor(seen))
            actions = chosen.sample()
            before, values = chosen.log_prob(actions), critic(seen).flatten()
            rewards, advantages, last = torch.ones(128).cuda(), torch.zeros(128).cuda(), 0
            for t in reversed(range(127)):
                last = rewards[t] + 0.99 * values[t + 1] - values[t] + 0.99 * 0.95 * last
                advantages[t] = last
            returns = advantages + values
        order = np.arange(128)
        np.random.shuffle(order)
        for start in range(0, 128, 32):
            index = order[start : start + 32]
            chosen = Categorical(logits=actor(seen[index]))
            ratio = (chosen.log_prob(actions[index]) - before[index]).exp()
            with torch.no_grad():
                kl = ((ratio - 1) - ratio.log()).mean()
            gain = advantages[index]
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            loss = torch.max(-gain * ratio, -gain * torch.clamp(ratio, 0.8, 1.2)).mean()
            loss = (
                loss - 0.01 * chosen.entropy().mean() + 0.5 * F.mse_loss(critic(seen[index]).view(-1), returns[index])
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 0.5)
            optimizer.step()
        if kl > 10:
            print(end="")

    return step


@program(asks=True)
def soft_actor_critic() -> Step:
    actor, first, second = _mlp(8, 4), _mlp(10, 1), _mlp(10, 1)
    log_alpha = torch.zeros(1, requires_grad=True, device="cuda")
    a = torch.optim.Adam(actor.parameters(), lr=3e-4)
    q = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=3e-4)
    temperature = torch.optim.Adam([log_alpha], lr=3e-4)
    seen, moved, rewards = torch.randn(64, 8).cuda(), torch.rand(64, 2).cuda(), torch.ones(64, 1).cuda()

    def act(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, spread = actor(states).chunk(2, -1)
        normal = Normal(mean, spread.clamp(-5, 2).exp())
        x = normal.rsample()
        y = torch.tanh(x)
        return y, (normal.log_prob(x) - torch.log(1 - y.pow(2) + 1e-6)).sum(1, keepdim=True)

    def step() -> None:
        alpha = log_alpha.exp().item()
        with torch.no_grad():
            action, chance = act(seen)
            both = torch.cat((seen, action), 1)
            goal = rewards + 0.99 * (torch.min(first(both), second(both)) - alpha * chance)
        both = torch.cat((seen, moved), 1)
        q.zero_grad()
        (F.mse_loss(first(both), goal) + F.mse_loss(second(both), goal)).backward()
        q.step()
        action, chance = act(seen)
        both = torch.cat((seen, action), 1)
        a.zero_grad()
        (alpha * chance - torch.min(first(both), second(both))).mean().backward()
        a.step()
        temperature.zero_grad()
        (-log_alpha.exp() * (chance.detach() - 2)).mean().backward()
        temperature.step()

    return step
