"""GPyTorch: an exact Gaussian process on 2,000 points."""

import gpytorch
import torch


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean = gpytorch.means.ConstantMean()
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


x = torch.linspace(0, 1, 2000).cuda()
y = torch.sin(x * 6.28) + 0.2 * torch.randn(2000).cuda()
likelihood = gpytorch.likelihoods.GaussianLikelihood().cuda()
model = Model(x, y, likelihood).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
for _ in range(10):
    optimizer.zero_grad()
    loss = -objective(model(x), y)
    loss.backward()
    optimizer.step()
model.eval()
likelihood.eval()
with torch.no_grad(), gpytorch.settings.fast_pred_var():
    print(likelihood(model(torch.linspace(0, 1, 51).cuda())).mean.shape)
