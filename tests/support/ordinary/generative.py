"""GANs, diffusion, variational and autoregressive models of images."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from support.ordinary import Step, program


@program
def dcgan() -> Step:
    generator = nn.Sequential(nn.ConvTranspose2d(64, 64, 4, 1, 0, bias=False), nn.BatchNorm2d(64), nn.ReLU(True),
                              nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(True),
                              nn.ConvTranspose2d(32, 3, 4, 2, 1, bias=False), nn.Tanh()).cuda()  # fmt: skip
    discriminator = nn.Sequential(nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(32, 64, 4, 2, 1),
                                  nn.BatchNorm2d(64), nn.LeakyReLU(0.2, True), nn.Conv2d(64, 1, 4, 1, 0),
                                  nn.Sigmoid(), nn.Flatten(0)).cuda()  # fmt: skip
    first = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    second = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    criterion, images = nn.BCELoss(), torch.randn(16, 3, 16, 16)

    def step() -> None:
        discriminator.zero_grad()
        real = images.to("cuda")
        label = torch.full((real.size(0),), 1.0, dtype=torch.float, device="cuda")
        output = discriminator(real).view(-1)
        criterion(output, label).backward()
        d_x = output.mean().item()
        noise = torch.randn(real.size(0), 64, 1, 1, device="cuda")
        fake = generator(noise)
        label.fill_(0.0)
        criterion(discriminator(fake.detach()).view(-1), label).backward()
        first.step()
        generator.zero_grad()
        label.fill_(1.0)
        criterion(discriminator(fake).view(-1), label).backward()
        second.step()
        assert d_x == d_x

    return step


@program
def wgan_with_gradient_penalty() -> Step:
    generator = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64)).cuda()
    critic = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)).cuda()
    g, c = torch.optim.RMSprop(generator.parameters(), 5e-5), torch.optim.RMSprop(critic.parameters(), 5e-5)
    real = torch.randn(32, 64, device="cuda")

    def step() -> None:
        fake = generator(torch.randn(32, 32, device="cuda")).detach()
        alpha = torch.rand(32, 1, device="cuda")
        mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        scores = critic(mixed)
        gradient = torch.autograd.grad(scores, mixed, torch.ones_like(scores), create_graph=True, retain_graph=True)[
            0
        ]
        penalty = ((gradient.norm(2, dim=1) - 1) ** 2).mean()
        c.zero_grad()
        (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
        c.step()
        g.zero_grad()
        (-critic(generator(torch.randn(32, 32, device="cuda"))).mean()).backward()
        g.step()

    return step


@program
def vae_example() -> Step:
    encoder = nn.Linear(784, 400).cuda()
    mean, logvar = nn.Linear(400, 20).cuda(), nn.Linear(400, 20).cuda()
    decoder = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 784), nn.Sigmoid()).cuda()
    parameters = [p for part in (encoder, mean, logvar, decoder) for p in part.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    data = torch.rand(128, 1, 28, 28).cuda()

    def step() -> float:
        hidden = F.relu(encoder(data.view(-1, 784)))
        mu, lv = mean(hidden), logvar(hidden)
        z = mu + torch.randn_like(lv) * torch.exp(0.5 * lv)
        bce = F.binary_cross_entropy(decoder(z), data.view(-1, 784), reduction="sum")
        kld = -0.5 * torch.sum(1 + lv - mu.pow(2) - lv.exp())
        optimizer.zero_grad()
        (bce + kld).backward()
        optimizer.step()
        return (bce + kld).item() / len(data)

    return step


@program(asks=True)
def vae_by_distributions() -> Step:
    from torch.distributions import Normal, kl_divergence

    encoder = nn.Linear(64, 32).cuda()
    decoder = nn.Linear(16, 64).cuda()
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
    x = torch.randn(32, 64, device="cuda")

    def step() -> None:
        mu, scale = encoder(x).chunk(2, -1)
        posterior = Normal(mu, F.softplus(scale) + 1e-4)
        prior = Normal(torch.zeros_like(mu), torch.ones_like(mu))
        z = posterior.rsample()
        loss = F.mse_loss(decoder(z), x) + kl_divergence(posterior, prior).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


@program
def vq_vae() -> Step:
    encoder, decoder = nn.Conv2d(3, 32, 4, 4).cuda(), nn.ConvTranspose2d(32, 3, 4, 4).cuda()
    codes = nn.Embedding(128, 32).cuda()
    parameters = [*encoder.parameters(), *decoder.parameters(), *codes.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-4)
    x = torch.randn(8, 3, 32, 32).cuda()

    def step() -> None:
        z = encoder(x).permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, 32)
        distance = flat.pow(2).sum(1, keepdim=True) + codes.weight.pow(2).sum(1) - 2 * flat @ codes.weight.t()
        picked = torch.argmin(distance, dim=1).unsqueeze(1)
        one_hot = torch.zeros(picked.shape[0], 128, device=x.device)
        one_hot.scatter_(1, picked, 1)
        quantized = torch.matmul(one_hot, codes.weight).view(z.shape)
        loss = F.mse_loss(quantized.detach(), z) * 0.25 + F.mse_loss(quantized, z.detach())
        quantized = z + (quantized - z).detach()
        average = one_hot.mean(0)
        torch.exp(-torch.sum(average * torch.log(average + 1e-10))).item()
        out = decoder(quantized.permute(0, 3, 1, 2).contiguous())
        optimizer.zero_grad()
        (F.mse_loss(out, x) + loss).backward()
        optimizer.step()

    return step


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64))
        self.first, self.norm = nn.Conv2d(3, 64, 3, padding=1), nn.GroupNorm(8, 64)
        self.middle, self.last = nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(-torch.arange(16, device=x.device) * 0.5)
        angles = t[:, None].float() * rates[None]
        embedded = self.time(torch.cat((angles.sin(), angles.cos()), -1))
        hidden = F.silu(self.norm(self.first(x))) + embedded[:, :, None, None]
        return self.last(F.silu(self.middle(hidden)))


@program
def ddpm_with_ema() -> Step:
    model = Denoiser().cuda()
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    betas = torch.linspace(1e-4, 0.02, 1000)
    alphas = torch.cumprod(1.0 - betas, dim=0).cuda()
    x = torch.randn(8, 3, 32, 32).cuda()

    def step() -> None:
        t = torch.randint(0, 1000, (x.size(0),), device=x.device).long()
        noise = torch.randn_like(x)
        alpha = alphas.gather(-1, t).view(-1, 1, 1, 1)
        noisy = alpha.sqrt() * x + (1 - alpha).sqrt() * noise
        loss = F.mse_loss(model(noisy, t), noise)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for shadow, weight in zip(ema.parameters(), model.parameters(), strict=True):
                shadow.lerp_(weight, 0.001)

    return step


@program
def ddpm_sampling_loop() -> Step:
    model = Denoiser().cuda().eval()
    betas = torch.linspace(1e-4, 0.02, 10, device="cuda")
    alphas = 1 - betas
    products = torch.cumprod(alphas, 0)

    @torch.no_grad()
    def step() -> torch.Tensor:
        x = torch.randn(4, 3, 32, 32, device="cuda")
        for i in reversed(range(10)):
            t = torch.full((4,), i, device="cuda", dtype=torch.long)
            noise = torch.randn_like(x) if i > 0 else torch.zeros_like(x)
            x = (x - (1 - alphas[i]) / (1 - products[i]).sqrt() * model(x, t)) / alphas[i].sqrt()
            x = x + betas[i].sqrt() * noise
        return x.clamp(-1, 1).cpu()

    return step


@program
def diffusers_unet() -> Step:
    from diffusers import DDPMScheduler, UNet2DModel

    model = UNet2DModel(sample_size=32, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
                        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                        up_block_types=("AttnUpBlock2D", "UpBlock2D")).to("cuda")  # fmt: skip
    scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    images = torch.randn(4, 3, 32, 32).to("cuda")

    def step() -> None:
        noise = torch.randn(images.shape, device=images.device)
        timesteps = torch.randint(0, 1000, (4,), device=images.device, dtype=torch.int64)
        noisy = scheduler.add_noise(images, noise, timesteps)
        loss = F.mse_loss(model(noisy, timesteps, return_dict=False)[0], noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program
def flow_matching() -> Step:
    model = nn.Sequential(nn.Linear(65, 256), nn.SiLU(), nn.Linear(256, 64)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = torch.randn(256, 64)

    def step() -> None:
        x1 = data[torch.randint(0, 256, (64,))].cuda()
        x0, t = torch.randn_like(x1), torch.rand(64, 1, device="cuda")
        loss = ((model(torch.cat(((1 - t) * x0 + t * x1, t), -1)) - (x1 - x0)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


@program
def pixel_autoregression() -> Step:
    class Masked(nn.Conv2d):
        def __init__(self, kind: str, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            self.register_buffer("mask", torch.ones_like(self.weight))
            _, _, h, w = self.weight.size()
            self.mask[:, :, h // 2, w // 2 + (kind == "B") :] = 0
            self.mask[:, :, h // 2 + 1 :] = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data *= self.mask
            return super().forward(x)

    net = nn.Sequential(Masked("A", 1, 32, 7, 1, 3), nn.ReLU(), Masked("B", 32, 32, 7, 1, 3), nn.ReLU(),
                        nn.Conv2d(32, 256, 1)).cuda()  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters())
    images = torch.rand(8, 1, 28, 28)

    def step() -> None:
        x = images.cuda()
        target = (x[:, 0] * 255).long()
        loss = F.cross_entropy(net(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


@program
def style_transfer_by_gram_matrices() -> Step:
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1)).cuda()
    net.requires_grad_(False)
    picture = torch.rand(1, 3, 64, 64, device="cuda").requires_grad_()
    optimizer = torch.optim.Adam([picture], lr=0.01)
    style = torch.rand(1, 3, 64, 64, device="cuda")

    def gram(x: torch.Tensor) -> torch.Tensor:
        a, b, c, d = x.size()
        features = x.view(a * b, c * d)
        return torch.mm(features, features.t()).div(a * b * c * d)

    def step() -> None:
        with torch.no_grad():
            picture.clamp_(0, 1)
        optimizer.zero_grad()
        F.mse_loss(gram(net(picture)), gram(net(style)).detach()).backward()
        optimizer.step()

    return step


@program
def discrete_autoencoder_by_gumbel_softmax() -> Step:
    encoder = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 30 * 10)).cuda()
    decoder = nn.Sequential(nn.Linear(30 * 10, 256), nn.ReLU(), nn.Linear(256, 784)).cuda()
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
    images = torch.rand(100, 784, device="cuda")

    def step() -> None:
        logits = encoder(images).view(-1, 30, 10)
        drawn = F.gumbel_softmax(logits, tau=0.7, hard=True)
        loss = F.binary_cross_entropy_with_logits(decoder(drawn.flatten(1)), images, reduction="sum")
        posterior = logits.softmax(dim=-1)
        loss = loss + (posterior * (posterior * 10 + 1e-20).log()).sum()
        optimizer.zero_grad()
        (loss / len(images)).backward()
        optimizer.step()

    return step


@program
def weights_made_by_a_hypernetwork() -> Step:
    """A convolution of its own for each image, all of a batch in one by groups."""
    hyper, head = nn.Linear(32, 8 * 3 * 9).cuda(), nn.Linear(8, 10).cuda()
    optimizer = torch.optim.RMSprop([*hyper.parameters(), *head.parameters()], lr=1e-3, momentum=0.9, centered=True)
    images, codes = torch.randn(32, 3, 32, 32, device="cuda"), torch.randn(32, 32, device="cuda")
    labels = torch.arange(32, device="cuda") % 10

    def step() -> None:
        kernels = hyper(codes).view(32 * 8, 3, 3, 3)
        made = F.conv2d(images.reshape(1, 32 * 3, 32, 32), kernels, padding=1, groups=32).view(32, 8, 32, 32)
        optimizer.zero_grad()
        F.cross_entropy(head(F.silu(made).mean(dim=(2, 3))), labels).backward()
        optimizer.step()

    return step


@program
def images_as_sines_with_their_gradients() -> Step:
    """SIREN, arXiv 2006.09661: pictures fitted by their gradients and Laplacians."""

    class Sine(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(30 * x)

    layers = [layer for width in (2, 64, 64) for layer in (nn.Linear(width, 64), Sine())]
    net = nn.Sequential(*layers, nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    axis = torch.linspace(-1, 1, 64, device="cuda")
    places = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), dim=-1).view(-1, 2)
    target = torch.randn(4096, 2, device="cuda")

    def step() -> None:
        at = places.clone().requires_grad_(True)
        value = net(at)
        gradient = torch.autograd.grad(value, at, torch.ones_like(value), create_graph=True)[0]
        laplacian = torch.zeros_like(value)
        for dim in range(2):
            one = gradient[:, dim : dim + 1]
            laplacian += torch.autograd.grad(one, at, torch.ones_like(one), create_graph=True)[0][:, dim : dim + 1]
        optimizer.zero_grad()
        (F.mse_loss(gradient, target) + 1e-4 * laplacian.pow(2).mean()).backward()
        optimizer.step()

    return step
