"""GPyTorch: a sparse variational Gaussian process in mini-batches."""

import gpytorch
import torch
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy


class Model(gpytorch.models.ApproximateGP):
    def __init__(self, points):
        distribution = CholeskyVariationalDistribution(points.size(0))
        super().__init__(VariationalStrategy(self, points, distribution, learn_inducing_locations=True))
        self.mean = gpytorch.means.ConstantMean()
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


x, y = torch.randn(4096, 8).cuda(), torch.randn(4096).cuda()
model, likelihood = Model(x[:256]).cuda(), gpytorch.likelihoods.GaussianLikelihood().cuda()
objective = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=y.numel())
optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.01)
for start in range(0, 4096, 512):
    optimizer.zero_grad()
    (-objective(model(x[start : start + 512]), y[start : start + 512])).backward()
    optimizer.step()
