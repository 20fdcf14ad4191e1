"""Pyro: a variational autoencoder by stochastic variational inference."""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam
from torch import nn


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 400), nn.Softplus(), nn.Linear(400, 100))
        self.decoder = nn.Sequential(nn.Linear(50, 400), nn.Softplus(), nn.Linear(400, 784), nn.Sigmoid())

    def model(self, x):
        pyro.module("decoder", self.decoder)
        with pyro.plate("data", x.shape[0]):
            zero = x.new_zeros(x.shape[0], 50)
            z = pyro.sample("z", dist.Normal(zero, zero + 1).to_event(1))
            pyro.sample("x", dist.Bernoulli(self.decoder(z), validate_args=False).to_event(1), obs=x)

    def guide(self, x):
        pyro.module("encoder", self.encoder)
        with pyro.plate("data", x.shape[0]):
            mean, scale = self.encoder(x).chunk(2, -1)
            pyro.sample("z", dist.Normal(mean, scale.exp()).to_event(1))


vae = VAE().cuda()
inference = SVI(vae.model, vae.guide, Adam({"lr": 1e-3}), loss=Trace_ELBO())
for _ in range(5):
    print(inference.step(torch.rand(256, 784, device="cuda")))
