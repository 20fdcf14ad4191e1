"""Programs of numbers: Fourier transforms, complex numbers, linear algebra, Gaussian processes, simulations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

from support.ordinary import Step, program


def _fit(parameters: Iterable[torch.Tensor], loss_of: Callable[[], torch.Tensor], lr: float = 1e-2) -> Step:
    optimizer = torch.optim.Adam(list(parameters), lr=lr)

    def step() -> None:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        loss.item()

    return step


class SpectralConv(nn.Module):
    """As the Fourier neural operator has it."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weights = nn.ParameterList(
            nn.Parameter(torch.rand(width, width, modes, modes, dtype=torch.cfloat) / width**2) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft2(x)
        out = torch.zeros_like(spectrum)
        m = self.modes
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], self.weights[0])
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -m:, :m], self.weights[1])
        return torch.fft.irfft2(out, s=x.shape[-2:])


@program
def fourier_neural_operator() -> Step:
    lift, lower = nn.Conv2d(1, 20, 1).cuda(), nn.Conv2d(20, 1, 1).cuda()
    layers = nn.ModuleList(SpectralConv(20, 8) for _ in range(2)).cuda()
    x, y = torch.randn(8, 1, 32, 32).cuda(), torch.randn(8, 1, 32, 32).cuda()

    def loss_of() -> torch.Tensor:
        out = lift(x)
        for layer in layers:
            out = F.gelu(layer(out) + out)
        return F.mse_loss(lower(out), y)

    return _fit([*lift.parameters(), *layers.parameters(), *lower.parameters()], loss_of)


@program
def mixing_of_tokens_by_fourier_transforms() -> Step:
    """FNet: attention replaced by the real part of a two-dimensional transform."""
    embed = nn.Embedding(500, 128).cuda()
    feed = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).cuda()
    norm, head = nn.LayerNorm(128).cuda(), nn.Linear(128, 500).cuda()
    ids = (torch.arange(8 * 64).view(8, 64) % 500).cuda()

    def loss_of() -> torch.Tensor:
        x = embed(ids)
        x = norm(x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real)
        return F.cross_entropy(head(norm(x + feed(x))).flatten(0, 1), ids.flatten())

    return _fit([*embed.parameters(), *feed.parameters(), *norm.parameters(), *head.parameters()], loss_of)


@program
def global_filters_of_an_image() -> Step:
    """GFNet: a learned filter, kept as pairs of real numbers, in the frequency domain."""
    weight = nn.Parameter(torch.randn(16, 9, 64, 2, device="cuda") * 0.02)
    cut, head = nn.Conv2d(3, 64, 4, 4).cuda(), nn.Linear(64, 10).cuda()
    images = torch.randn(8, 3, 64, 64).cuda()

    def loss_of() -> torch.Tensor:
        x = cut(images).permute(0, 2, 3, 1).float()
        x = torch.fft.rfft2(x, dim=(1, 2), norm="ortho") * torch.view_as_complex(weight)
        x = torch.fft.irfft2(x, s=(16, 16), dim=(1, 2), norm="ortho")
        return F.cross_entropy(head(x.mean((1, 2))), torch.arange(8, device="cuda"))

    return _fit([weight, *cut.parameters(), *head.parameters()], loss_of)


@program(asks=True)
def denoising_by_masks_of_spectrograms() -> Step:
    net = nn.GRU(257, 128, batch_first=True).cuda()
    head = nn.Linear(128, 257).cuda()
    window = torch.hann_window(512).cuda()
    noisy, clean = torch.randn(4, 8000).cuda(), torch.randn(4, 8000).cuda()

    def loss_of() -> torch.Tensor:
        spectrum = torch.stft(noisy, 512, 128, window=window, return_complex=True)
        mask = head(net(spectrum.abs().transpose(1, 2))[0]).sigmoid().transpose(1, 2)
        out = torch.istft(spectrum * mask, 512, 128, window=window, length=8000)
        return F.l1_loss(out, clean)

    return _fit([*net.parameters(), *head.parameters()], loss_of)


@program
def spectral_losses_of_several_resolutions() -> Step:
    net = nn.Sequential(nn.Conv1d(1, 32, 15, padding=7), nn.Tanh(), nn.Conv1d(32, 1, 15, padding=7)).cuda()
    wave = torch.randn(4, 1, 8192).cuda()

    def loss_of() -> torch.Tensor:
        out, loss = net(wave).squeeze(1), wave.new_zeros(())
        for size in (256, 512, 1024):
            window = torch.hann_window(size, device="cuda")
            a, b = (
                torch.stft(one, size, size // 4, window=window, return_complex=True).abs()
                for one in (out, wave.squeeze(1))
            )
            loss = loss + (a - b).norm() / b.norm() + F.l1_loss(a.clamp(min=1e-5).log(), b.clamp(min=1e-5).log())
        return loss

    return _fit(net.parameters(), loss_of)


@program
def complex_linear_layers() -> Step:
    layers = nn.ModuleList(nn.Linear(a, b, dtype=torch.cfloat) for a, b in ((64, 128), (128, 10))).cuda()
    x, y = torch.randn(128, 64, dtype=torch.cfloat).cuda(), (torch.arange(128) % 10).cuda()

    def loss_of() -> torch.Tensor:
        hidden = layers[0](x)
        hidden = torch.polar(F.relu(hidden.abs()), hidden.angle())
        return F.cross_entropy(layers[1](hidden).abs(), y)

    return _fit(layers.parameters(), loss_of)


@program
def state_spaces_by_long_convolutions() -> Step:
    """S4D: the kernel from a diagonal matrix of complex numbers, applied by Fourier transforms."""
    h, n, length = 64, 16, 256
    log_dt = nn.Parameter(torch.rand(h, device="cuda") * 2 - 5)
    log_real = nn.Parameter(torch.log(0.5 * torch.ones(h, n, device="cuda")))
    imaginary = nn.Parameter(math.pi * torch.arange(n, device="cuda").repeat(h, 1).float())
    c = nn.Parameter(torch.view_as_real(torch.randn(h, n, dtype=torch.cfloat, device="cuda")))
    skip, mix = nn.Parameter(torch.randn(h, device="cuda")), nn.Conv1d(h, 2 * h, 1).cuda()
    x, y = torch.randn(8, h, length).cuda(), torch.randn(8, h, length).cuda()

    def loss_of() -> torch.Tensor:
        a = -log_real.exp() + 1j * imaginary
        dta = a * log_dt.exp()[:, None]
        k = dta[:, :, None] * torch.arange(length, device="cuda")
        kernel = 2 * torch.einsum("hn,hnl->hl", torch.view_as_complex(c) * (dta.exp() - 1) / a, k.exp()).real
        out = torch.fft.irfft(torch.fft.rfft(x, n=2 * length) * torch.fft.rfft(kernel, n=2 * length), n=2 * length)
        out = F.gelu(out[..., :length] + x * skip[:, None])
        return F.mse_loss(F.glu(mix(out), dim=1), y)

    return _fit([log_dt, log_real, imaginary, c, skip, *mix.parameters()], loss_of)


@program
def rotary_positions_by_complex_numbers() -> Step:
    """As the reference code of Llama has it."""
    heads, size, length = 4, 32, 64
    angles = torch.outer(torch.arange(length).float(), 1.0 / 10_000 ** (torch.arange(0, size, 2).float() / size))
    turns = torch.polar(torch.ones_like(angles), angles).cuda()
    embed, qkv = nn.Embedding(500, 128).cuda(), nn.Linear(128, 384, bias=False).cuda()
    out = nn.Linear(128, 500).cuda()
    ids = (torch.arange(4 * length).view(4, length) % 500).cuda()

    def turned(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns[None, :, None]).flatten(3).type_as(x)

    def loss_of() -> torch.Tensor:
        q, k, v = (part.view(4, length, heads, size) for part in qkv(embed(ids)).chunk(3, -1))
        q, k, v = (part.transpose(1, 2) for part in (turned(q), turned(k), v))
        hidden = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(out(hidden).flatten(0, 1), ids.flatten())

    return _fit([*embed.parameters(), *qkv.parameters(), *out.parameters()], loss_of)


@program
def gaussian_process_by_cholesky() -> Step:
    x, y = torch.linspace(0, 1, 200).cuda()[:, None], torch.randn(200).cuda()
    scale, length, noise = (nn.Parameter(torch.zeros((), device="cuda")) for _ in range(3))

    def loss_of() -> torch.Tensor:
        kernel = scale.exp() * torch.exp(-torch.cdist(x, x).pow(2) / (2 * length.exp() ** 2))
        kernel = kernel + noise.exp() * torch.eye(200, device="cuda")
        factor = torch.linalg.cholesky(kernel)
        alpha = torch.cholesky_solve(y[:, None], factor)
        return 0.5 * (y @ alpha).sum() + factor.diagonal().log().sum() + 100 * math.log(2 * math.pi)

    return _fit([scale, length, noise], loss_of)


@program
def ridge_regression_in_closed_form() -> Step:
    features = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 24)).cuda()
    x, y = torch.randn(8, 40, 32).cuda(), torch.randn(8, 40, 3).cuda()

    def loss_of() -> torch.Tensor:
        z = features(x)
        gram = z[:, :30].mT @ z[:, :30] + torch.eye(24, device="cuda")
        weight = torch.linalg.solve(gram, z[:, :30].mT @ y[:, :30])
        return F.mse_loss(z[:, 30:] @ weight, y[:, 30:])

    return _fit(features.parameters(), loss_of)


@program(asks=True)
def normalizing_flow_with_invertible_mixing() -> Step:
    """Glow's matrix, its determinant in the likelihood, and affine couplings."""
    mix = nn.Parameter(torch.linalg.qr(torch.randn(16, 16))[0].cuda())
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16)).cuda()
    x = torch.randn(256, 16).cuda()

    def loss_of() -> torch.Tensor:
        z = x @ mix
        log_det = torch.linalg.slogdet(mix)[1]
        a, b = z.chunk(2, -1)
        shift, log_scale = net(a).chunk(2, -1)
        b = b * log_scale.tanh().exp() + shift
        prior = torch.distributions.Normal(0.0, 1.0)
        return -(prior.log_prob(torch.cat((a, b), -1)).sum(-1) + log_scale.tanh().sum(-1) + log_det).mean()

    return _fit([mix, *net.parameters()], loss_of)


@program
def whitening_by_inverse_and_determinant() -> Step:
    net = nn.Linear(32, 16).cuda()
    x = torch.randn(4, 64, 32).cuda()

    def loss_of() -> torch.Tensor:
        z = net(x)
        z = z - z.mean(1, keepdim=True)
        covariance = z.mT @ z / 63 + 0.1 * torch.eye(16, device="cuda")
        inverse = torch.linalg.inv(covariance)
        return (inverse @ covariance).diagonal(dim1=-2, dim2=-1).sum() - torch.logdet(covariance).sum()

    return _fit(net.parameters(), loss_of)


@program
def procrustes_alignment_by_svd() -> Step:
    net = nn.Linear(3, 3).cuda()
    first, second = torch.randn(16, 100, 3).cuda(), torch.randn(16, 100, 3).cuda()

    def loss_of() -> torch.Tensor:
        moved = net(first)
        u, _, vt = torch.linalg.svd(moved.mT @ second)
        sign = torch.linalg.det(u @ vt)
        u = torch.cat((u[..., :-1], u[..., -1:] * sign[:, None, None]), -1)
        return F.mse_loss(moved @ (u @ vt), second)

    return _fit(net.parameters(), loss_of)


@program
def principal_components_on_the_way() -> Step:
    net, head = nn.Linear(64, 64).cuda(), nn.Linear(8, 10).cuda()
    x, y = torch.randn(256, 64).cuda(), (torch.arange(256) % 10).cuda()

    def loss_of() -> torch.Tensor:
        hidden = net(x)
        with torch.no_grad():
            _, _, basis = torch.pca_lowrank(hidden, q=8)
        return F.cross_entropy(head(hidden @ basis), y)

    return _fit([*net.parameters(), *head.parameters()], loss_of)


@program
def least_squares_and_pseudo_inverses() -> Step:
    net = nn.Linear(32, 12).cuda()
    x, y = torch.randn(100, 32).cuda(), torch.randn(100, 2).cuda()

    def loss_of() -> torch.Tensor:
        z = net(x)
        return F.mse_loss(z @ (torch.linalg.pinv(z) @ y), y) + 1e-3 * torch.linalg.matrix_norm(z, 2)

    return _fit(net.parameters(), loss_of)


@program
def optimal_transport_by_sinkhorn() -> Step:
    net = nn.Linear(16, 16).cuda()
    x, y = torch.randn(128, 16).cuda(), torch.randn(128, 16).cuda()

    def loss_of() -> torch.Tensor:
        cost = torch.cdist(net(x), y, p=2) ** 2
        f, g = torch.zeros(128, device="cuda"), torch.zeros(128, device="cuda")
        for _ in range(10):
            f = -0.1 * torch.logsumexp((g[None] - cost) / 0.1, 1)
            g = -0.1 * torch.logsumexp((f[:, None] - cost) / 0.1, 0)
        plan = ((f[:, None] + g[None] - cost) / 0.1).exp()
        return (plan * cost).sum()

    return _fit(net.parameters(), loss_of)


@program
def radiance_fields_by_cumulative_products() -> Step:
    """NeRF: points along rays, positional encodings, weights by a cumulative product, a finer second pass."""
    net = nn.Sequential(nn.Linear(39, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4)).cuda()
    origins, directions = torch.randn(64, 3).cuda(), F.normalize(torch.randn(64, 3), dim=-1).cuda()
    colours = torch.rand(64, 3).cuda()

    def rendered(depths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        points = origins[:, None] + directions[:, None] * depths[..., None]
        bands = [points] + [f(points * 2.0**i) for i in range(6) for f in (torch.sin, torch.cos)]
        out = net(torch.cat(bands, -1))
        gaps = torch.cat((depths[:, 1:] - depths[:, :-1], torch.full_like(depths[:, :1], 1e10)), -1)
        alpha = 1 - torch.exp(-F.relu(out[..., 3]) * gaps)
        left = torch.cumprod(torch.cat((torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10), -1), -1)[:, :-1]
        weights = alpha * left
        return (weights[..., None] * out[..., :3].sigmoid()).sum(-2), weights

    def loss_of() -> torch.Tensor:
        depths = torch.linspace(2, 6, 32, device="cuda").expand(64, 32)
        coarse, weights = rendered(depths)
        pdf = (weights[:, 1:-1] + 1e-5).detach()
        cdf = torch.cumsum(pdf / pdf.sum(-1, keepdim=True), -1)
        cdf = torch.cat((torch.zeros_like(cdf[:, :1]), cdf), -1)
        u = torch.rand(64, 16, device="cuda")
        above = torch.searchsorted(cdf, u, right=True).clamp(max=cdf.size(-1) - 1)
        fine, _ = rendered(torch.cat((depths, depths.gather(1, above)), -1).sort(-1)[0])
        return F.mse_loss(coarse, colours) + F.mse_loss(fine, colours)

    return _fit(net.parameters(), loss_of)


@program
def hash_encoded_image() -> Step:
    """Instant neural graphics primitives: tables read at hashed corners of grids."""
    tables = nn.Parameter(torch.rand(4, 4096, 2, device="cuda") * 1e-4)
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3)).cuda()
    primes = torch.tensor([1, 2654435761], device="cuda")

    def loss_of() -> torch.Tensor:
        where = torch.rand(1024, 2, device="cuda")
        features = []
        for level in range(4):
            scaled = where * 16 * 2**level
            corner = scaled.floor().long()
            share = scaled - corner
            found = 0
            for dx in (0, 1):
                for dy in (0, 1):
                    one = corner + torch.tensor([dx, dy], device="cuda")
                    index = ((one * primes)[:, 0] ^ (one * primes)[:, 1]) % 4096
                    weight = (share[:, 0] if dx else 1 - share[:, 0]) * (share[:, 1] if dy else 1 - share[:, 1])
                    found = found + weight[:, None] * tables[level][index]
            features.append(found)
        return F.mse_loss(net(torch.cat(features, -1)), where.repeat(1, 2)[:, :3])

    return _fit([tables, *net.parameters()], loss_of)


@program(asks=True)
def variational_inference_by_distributions() -> Step:
    from torch.distributions import Gamma, Independent, Normal, kl_divergence

    loc, log_scale = nn.Parameter(torch.zeros(20, device="cuda")), nn.Parameter(torch.zeros(20, device="cuda"))
    x, y = torch.randn(200, 20).cuda(), torch.rand(200).cuda()

    def loss_of() -> torch.Tensor:
        posterior = Independent(Normal(loc, log_scale.exp()), 1)
        prior = Independent(Normal(torch.zeros_like(loc), torch.ones_like(loc)), 1)
        weight = posterior.rsample((8,))
        likelihood = Gamma(2.0, (-(x @ weight.mT)).exp() + 1e-3, validate_args=False).log_prob(y[:, None] + 0.1)
        return -(likelihood.sum(0).mean() - kl_divergence(posterior, prior))

    return _fit([loc, log_scale], loss_of)


@program
def mixture_density_network() -> Step:
    from torch.distributions import Categorical, MixtureSameFamily, Normal

    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 15)).cuda()
    x, y = torch.randn(256, 8).cuda(), torch.randn(256).cuda()

    def loss_of() -> torch.Tensor:
        logits, mean, scale = net(x).chunk(3, -1)
        mixture = MixtureSameFamily(
            Categorical(logits=logits, validate_args=False),
            Normal(mean, F.softplus(scale) + 1e-3, validate_args=False), validate_args=False,
        )  # fmt: skip
        return -mixture.log_prob(y).mean()

    return _fit(net.parameters(), loss_of)


@program
def kalman_filter_of_linear_dynamics() -> Step:
    dynamics = nn.Parameter(torch.eye(4, device="cuda") * 0.9)
    emission = nn.Parameter(torch.randn(2, 4, device="cuda"))
    seen = torch.randn(16, 2).cuda()

    def loss_of() -> torch.Tensor:
        mean, covariance, loss = torch.zeros(4, device="cuda"), torch.eye(4, device="cuda"), 0.0
        for observation in seen:
            mean, covariance = dynamics @ mean, dynamics @ covariance @ dynamics.T + 0.1 * torch.eye(4, device="cuda")
            spread = emission @ covariance @ emission.T + 0.1 * torch.eye(2, device="cuda")
            gain = torch.linalg.solve(spread, emission @ covariance).T
            error = observation - emission @ mean
            loss = loss + error @ torch.linalg.solve(spread, error) + torch.logdet(spread)
            mean, covariance = mean + gain @ error, covariance - gain @ emission @ covariance
        return loss

    return _fit([dynamics, emission], loss_of)
