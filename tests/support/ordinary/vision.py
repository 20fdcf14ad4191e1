"""Classifiers, segmentation, detection, self-supervised vision."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn

from support.ordinary import Step, program


def _convnet(classes: int = 10) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes),
    )  # fmt: skip


class Patches(nn.Module):
    def __init__(self, size: int = 64, patch: int = 8, width: int = 192, depth: int = 3) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, patch, stride=patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.pos = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 3, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.cut(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), 1) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x)[:, 0])


@program
def cifar_tutorial() -> Step:
    net = _convnet().to("cuda")
    images, classes = torch.randn(64, 3, 32, 32), torch.arange(64) % 10
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, classes), batch_size=16, shuffle=True)
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)

    def step() -> None:
        running = 0.0
        for i, (inputs, labels) in enumerate(loader, 0):
            inputs, labels = inputs.to("cuda"), labels.to("cuda")
            optimizer.zero_grad()
            loss = criterion(net(inputs), labels)
            loss.backward()
            optimizer.step()
            running += loss.item()
            if i % 2 == 1:
                print(end=f"{running / 2:.3f}"[:0])

    return step


@program
def imagenet_example_with_accuracy() -> Step:
    net = _convnet(100).cuda()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
    images, target = torch.randn(16, 3, 64, 64), (torch.arange(16) % 100)
    best = 0.0

    def accuracy(output: torch.Tensor, target: torch.Tensor, topk: tuple[int, ...]) -> list[torch.Tensor]:
        with torch.no_grad():
            _, pred = output.topk(max(topk), 1, True, True)
            correct = pred.t().eq(target.view(1, -1).expand(max(topk), -1))
            return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / len(target)) for k in topk]

    def step() -> None:
        nonlocal best
        x, y = images.cuda(non_blocking=True), target.cuda(non_blocking=True)
        output = net(x)
        loss = F.cross_entropy(output, y)
        acc1, _ = accuracy(output, y, topk=(1, 5))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if acc1[0].item() > best:
            best = acc1[0].item()

    return step


@program
def mnist_example() -> Step:
    net = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
                        nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5),
                        nn.Linear(128, 10), nn.LogSoftmax(1)).cuda()  # fmt: skip
    optimizer = torch.optim.Adadelta(net.parameters(), lr=1.0)
    data, target = torch.randn(64, 1, 28, 28).cuda(), (torch.arange(64) % 10).cuda()

    def step() -> None:
        optimizer.zero_grad()
        F.nll_loss(net(data), target).backward()
        optimizer.step()
        with torch.no_grad():
            output = net(data)
            F.nll_loss(output, target, reduction="sum").item()
            pred = output.argmax(dim=1, keepdim=True)
            pred.eq(target.view_as(pred)).sum().item()

    return step


@program
def vit_fp16_scaler_fused_adamw() -> Step:
    model = Patches().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda")
    x, y = torch.randn(32, 3, 64, 64, device="cuda"), torch.arange(32, device="cuda") % 10

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


@program
def mixup_and_cutmix() -> Step:
    net = _convnet().cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    x, y = torch.randn(32, 3, 32, 32).cuda(), (torch.arange(32) % 10).cuda()

    def step() -> None:
        lam = random.betavariate(1.0, 1.0)
        index = torch.randperm(x.size(0)).cuda()
        mixed = lam * x + (1 - lam) * x[index]
        if random.random() < 0.5:
            cut = int(32 * (1 - lam) ** 0.5)
            row, column = torch.randint(0, 32 - cut + 1, (1,)).item(), torch.randint(0, 32 - cut + 1, (1,)).item()
            mixed[:, :, row : row + cut, column : column + cut] = x[index, :, row : row + cut, column : column + cut]
        out = net(mixed)
        (lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[index])).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program
def random_augmentations_on_the_host() -> Step:
    net = _convnet().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, nesterov=True, momentum=0.9)
    images = torch.rand(16, 3, 40, 40)

    def augmented(image: torch.Tensor) -> torch.Tensor:
        top, left = torch.randint(0, 9, size=(1,)).item(), torch.randint(0, 9, size=(1,)).item()
        image = image[:, top : top + 32, left : left + 32]
        if torch.rand(1) < 0.5:
            image = image.flip(-1)
        if torch.rand(1).item() < 0.3:
            image = image.mean(0, keepdim=True).expand_as(image)
        return (image - 0.5) / 0.5

    def step() -> None:
        batch = torch.stack([augmented(image) for image in images]).cuda()
        F.cross_entropy(net(batch), torch.arange(16, device="cuda") % 10).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program
def unet_segmentation() -> Step:
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down1, self.down2 = self.double(3, 16), self.double(16, 32)
            self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
            self.last, self.out = self.double(32, 16), nn.Conv2d(16, 4, 1)

        def double(self, a: int, b: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
                                 nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))  # fmt: skip

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = self.down1(x)
            b = self.down2(F.max_pool2d(a, 2))
            return self.out(self.last(torch.cat((a, self.up(b)), 1)))

    net = UNet().cuda()
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-5, momentum=0.9)
    x, masks = torch.randn(4, 3, 64, 64).cuda(), (torch.arange(4 * 64 * 64) % 4).view(4, 64, 64).cuda()

    def dice(probabilities: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        both = 2 * (probabilities * truth).sum((-1, -2))
        total = probabilities.sum((-1, -2)) + truth.sum((-1, -2))
        total = torch.where(total == 0, both, total)
        return 1 - ((both + 1e-6) / (total + 1e-6)).mean()

    def step() -> None:
        out = net(x)
        truth = F.one_hot(masks, 4).permute(0, 3, 1, 2).float()
        loss = F.cross_entropy(out, masks) + dice(F.softmax(out, 1).float(), truth)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

    return step


@program
def segmentation_with_ignored_pixels_and_upsampling() -> Step:
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=4, padding=1), nn.GroupNorm(8, 32), nn.SiLU(), nn.Conv2d(32, 21, 1)
    )
    net = net.cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x = torch.randn(2, 3, 128, 128).cuda()
    y = (torch.arange(2 * 128 * 128) % 21).view(2, 128, 128)
    y[y == 20] = 255

    def step() -> None:
        out = F.interpolate(net(x), size=(128, 128), mode="bilinear", align_corners=False)
        target = y.cuda()
        loss = F.cross_entropy(out, target, ignore_index=255)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        valid = target != 255
        (out.argmax(1)[valid] == target[valid]).float().mean().item()

    return step


@program
def interpolation_modes() -> Step:
    net = nn.Conv2d(3, 8, 3, padding=1).cuda()
    optimizer = torch.optim.Adam(net.parameters())
    x = torch.randn(2, 3, 32, 32).cuda()

    def step() -> None:
        hidden = net(x)
        total = hidden.new_zeros(())
        for mode in ("nearest", "bilinear", "bicubic", "area"):
            total = total + F.interpolate(hidden, scale_factor=2, mode=mode).square().mean()
        total.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program
def spatial_transformer() -> Step:
    net = nn.Sequential(
        nn.Conv2d(1, 8, 7), nn.ReLU(), nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.Linear(128, 6)
    ).cuda()
    head = nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).cuda()
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.01)
    x = torch.randn(32, 1, 28, 28).cuda()

    def step() -> None:
        grid = F.affine_grid(net(x).view(-1, 2, 3), x.size(), align_corners=False)
        moved = F.grid_sample(x, grid, align_corners=False)
        F.cross_entropy(head(moved), torch.arange(32, device="cuda") % 10).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program(asks=True)
def detector_with_thresholds_and_nms() -> Step:
    net = nn.Sequential(nn.Conv2d(3, 32, 3, stride=8, padding=1), nn.ReLU(), nn.Conv2d(32, 5, 1)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x = torch.randn(2, 3, 128, 128).cuda()

    def nms(boxes: torch.Tensor, scores: torch.Tensor, most: float) -> list[int]:
        order, kept = scores.argsort(descending=True), []
        while order.numel() > 0:
            i = order[0]
            kept.append(i.item())
            if order.numel() == 1:
                break
            corner = torch.maximum(boxes[i, :2], boxes[order[1:], :2])
            other = torch.minimum(boxes[i, 2:], boxes[order[1:], 2:])
            overlap = (other - corner).clamp(min=0).prod(1)
            order = order[1:][overlap <= most]
        return kept

    def step() -> None:
        out = net(x).flatten(2).transpose(1, 2)
        (out[..., 4].sigmoid().log().mean().neg() + out[..., :4].abs().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for image in net(x).flatten(2).transpose(1, 2):
                scores = image[:, 4].sigmoid()
                keep = scores > 0.5
                boxes = image[keep, :4]
                nms(boxes[:20], scores[keep][:20], 0.5)

    return step


@program
def hungarian_matching_by_numpy() -> Step:
    head = nn.Linear(64, 4 + 11).cuda()
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-4)
    queries = torch.randn(2, 20, 64).cuda()
    targets = [(torch.arange(5).cuda(), torch.rand(5, 4).cuda()), (torch.arange(3).cuda(), torch.rand(3, 4).cuda())]

    def step() -> None:
        out = head(queries)
        loss = out.new_zeros(())
        for image, (classes, boxes) in zip(out, targets, strict=True):
            with torch.no_grad():
                cost = torch.cdist(image[:, :4], boxes, p=1) - image[:, 4:].softmax(-1)[:, classes]
                rows = cost.cpu().numpy().argmin(axis=0)
            loss = loss + F.l1_loss(image[rows, :4], boxes) + F.cross_entropy(image[rows, 4:], classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program
def masked_autoencoder() -> Step:
    model = Patches().cuda()
    decoder = nn.Linear(192, 192).cuda()
    optimizer = torch.optim.AdamW([*model.parameters(), *decoder.parameters()], lr=1e-4)
    images = torch.randn(16, 3, 64, 64, device="cuda")

    def step() -> None:
        x = model.cut(images).flatten(2).transpose(1, 2)
        batch, count, width = x.shape
        keep = count // 4
        noise = torch.rand(batch, count, device=x.device)
        shuffle = torch.argsort(noise, dim=1)
        restore = torch.argsort(shuffle, dim=1)
        kept = torch.gather(x, 1, shuffle[:, :keep].unsqueeze(-1).repeat(1, 1, width))
        mask = torch.ones([batch, count], device=x.device)
        mask[:, :keep] = 0
        mask = torch.gather(mask, 1, restore)
        for block in model.blocks:
            kept = block(kept)
        full = torch.cat((kept, kept.new_zeros(batch, count - keep, width)), 1)
        full = torch.gather(full, 1, restore.unsqueeze(-1).repeat(1, 1, width))
        loss = ((decoder(full) - x.detach()) ** 2).mean(-1)
        loss = (loss * mask).sum() / mask.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program
def simclr() -> Step:
    net = _convnet(64).cuda()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-4)
    images = torch.randn(32, 3, 32, 32).cuda()

    def step() -> None:
        features = F.normalize(net(torch.cat((images, images.flip(-1)))), dim=1)
        labels = torch.cat([torch.arange(32) for _ in range(2)])
        labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float().cuda()
        similarity = features @ features.T
        mask = torch.eye(labels.shape[0], dtype=torch.bool).cuda()
        labels = labels[~mask].view(labels.shape[0], -1)
        similarity = similarity[~mask].view(similarity.shape[0], -1)
        positives = similarity[labels.bool()].view(labels.shape[0], -1)
        negatives = similarity[~labels.bool()].view(similarity.shape[0], -1)
        logits = torch.cat([positives, negatives], dim=1) / 0.07
        F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long).cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program
def byol_with_a_moving_target() -> Step:
    import copy

    online = nn.Sequential(_convnet(64), nn.Linear(64, 64)).cuda()
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.SGD(online.parameters(), lr=0.05, momentum=0.9)
    images = torch.randn(16, 3, 32, 32).cuda()

    def step() -> None:
        predicted = online(images)
        with torch.no_grad():
            wanted = target(images.flip(-1))
        loss = 2 - 2 * F.cosine_similarity(predicted, wanted, dim=-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(online.parameters(), target.parameters(), strict=True):
                q.data.mul_(0.99).add_(p.data, alpha=0.01)

    return step


@program
def resnet_channels_last_bf16() -> Step:
    net = _convnet().to("cuda", memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(16, 3, 64, 64).to("cuda", memory_format=torch.channels_last)

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(x), torch.arange(16, device="cuda") % 10)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program
def momentum_contrast_with_a_queue() -> Step:
    """He et al., arXiv 1911.05722: keys of earlier batches are negatives; the encoder of keys follows by momentum."""

    def encoder() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
                             nn.Flatten(), nn.Linear(512, 128)).cuda()  # fmt: skip

    query_net, key_net = encoder(), encoder()
    key_net.load_state_dict(query_net.state_dict())
    for parameter in key_net.parameters():
        parameter.requires_grad_(False)
    queue = F.normalize(torch.randn(128, 4096, device="cuda"), dim=0)
    place = torch.zeros(1, dtype=torch.long)
    optimizer = torch.optim.SGD(query_net.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    images = torch.randn(64, 3, 32, 32, device="cuda")

    def step() -> None:
        query = F.normalize(query_net(images), dim=1)
        with torch.no_grad():
            for ours, theirs in zip(query_net.parameters(), key_net.parameters(), strict=True):
                theirs.data = theirs.data * 0.999 + ours.data * 0.001
            shuffled = torch.randperm(len(images), device="cuda")
            key = F.normalize(key_net(images[shuffled]), dim=1)[torch.argsort(shuffled)]
        positive = torch.einsum("nc,nc->n", query, key).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", query, queue.clone().detach())
        logits = torch.cat([positive, negative], dim=1) / 0.07
        loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device="cuda"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        begin = int(place)
        queue[:, begin : begin + len(key)] = key.T
        place[0] = (begin + len(key)) % queue.shape[1]

    return step


@program
def capsules_with_dynamic_routing() -> Step:
    """Sabour et al., arXiv 1710.09829."""

    class Capsules(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.primary = nn.Conv2d(1, 64, 9), nn.Conv2d(64, 64, 9, 2)
            self.weight = nn.Parameter(0.01 * torch.randn(1, 288, 10, 16, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            primary = squash(self.primary(F.relu(self.stem(x))).view(len(x), 8, -1).transpose(1, 2))
            votes = (self.weight @ primary[:, :, None, :, None]).squeeze(-1)  # batch, primary, classes, 16
            agreement = torch.zeros(*votes.shape[:3], 1, device=x.device)
            for turn in range(3):
                pose = squash((agreement.softmax(dim=2) * votes).sum(dim=1, keepdim=True))
                if turn < 2:
                    agreement = agreement + (votes * pose).sum(dim=-1, keepdim=True)
            return pose.squeeze(1)

    def squash(x: torch.Tensor) -> torch.Tensor:
        square = x.pow(2).sum(dim=-1, keepdim=True)
        return square / (1 + square) * x / (square.sqrt() + 1e-8)

    net = Capsules().cuda()
    optimizer = torch.optim.Adam(net.parameters())
    images, labels = torch.rand(32, 1, 28, 28, device="cuda"), torch.arange(32, device="cuda") % 10

    def step() -> None:
        lengths = net(images).norm(dim=-1)
        target = torch.eye(10, device="cuda").index_select(0, labels)
        loss = target * F.relu(0.9 - lengths) ** 2 + 0.5 * (1 - target) * F.relu(lengths - 0.1) ** 2
        optimizer.zero_grad()
        loss.sum(dim=1).mean().backward()
        optimizer.step()

    return step


@program
def volumes_in_patches_by_a_three_dimensional_unet() -> Step:
    def double(source: int, target: int) -> nn.Sequential:
        parts: list[nn.Module] = []
        for inputs in (source, target):
            parts += [nn.Conv3d(inputs, target, 3, padding=1), nn.InstanceNorm3d(target, affine=True), nn.LeakyReLU()]
        return nn.Sequential(*parts)

    down, middle, up = double(1, 8).cuda(), double(8, 16).cuda(), double(24, 8).cuda()
    head = nn.Conv3d(8, 3, 1).cuda()
    parts = nn.ModuleList([down, middle, up, head])
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.01, momentum=0.99, nesterov=True)
    volume = torch.randn(1, 1, 48, 48, 48, device="cuda")
    labels = (torch.arange(48**3, device="cuda") % 3).view(1, 1, 48, 48, 48)

    def patches(of: torch.Tensor) -> torch.Tensor:
        for dim in (2, 3, 4):
            of = of.unfold(dim, 24, 24)
        return of.permute(0, 2, 3, 4, 1, 5, 6, 7).reshape(-1, of.shape[1], 24, 24, 24)

    def step() -> None:
        x, y = patches(volume), patches(labels)
        left = down(x)
        right = F.interpolate(middle(F.max_pool3d(left, 2)), scale_factor=2, mode="trilinear", align_corners=False)
        logits = head(up(torch.cat([left, right], dim=1)))
        one_hot = torch.zeros_like(logits).scatter_(1, y, 1)
        probabilities = logits.softmax(dim=1)
        overlap = (probabilities * one_hot).sum(dim=(2, 3, 4))
        total = (probabilities + one_hot).sum(dim=(2, 3, 4))
        loss = F.cross_entropy(logits, y.squeeze(1)) + 1 - ((2 * overlap + 1e-5) / (total + 1e-5)).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parts.parameters(), 12)
        optimizer.step()

    return step


@program
def stochastic_depth_with_scaled_layers() -> Step:
    class Block(nn.Module):
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.rate, self.scale = rate, nn.Parameter(1e-5 * torch.ones(96))
            self.norm, self.wide, self.narrow = nn.LayerNorm(96), nn.Linear(96, 384), nn.Linear(384, 96)
            self.depthwise = nn.Conv2d(96, 96, 7, padding=3, groups=96)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
            y = (self.scale * self.narrow(F.gelu(self.wide(y)))).permute(0, 3, 1, 2)
            kept = x.new_empty(len(x), 1, 1, 1).bernoulli_(1 - self.rate).div_(1 - self.rate)
            return x + y * kept

    net = nn.Sequential(nn.Conv2d(3, 96, 4, 4), *[Block(0.1 * depth) for depth in range(4)],
                        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10)).cuda()  # fmt: skip
    optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3)
    images, labels = torch.randn(32, 3, 64, 64, device="cuda"), torch.arange(32, device="cuda") % 10

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(images), labels, label_smoothing=0.1)
        loss.backward()
        optimizer.step()

    return step


@program
def faces_by_angular_margins_and_centers() -> Step:
    """ArcFace, arXiv 1801.07698, beside a center loss whose centers move without gradients."""
    backbone = nn.Sequential(nn.Conv2d(3, 32, 3, 2), nn.PReLU(32), nn.Flatten(), nn.Linear(32 * 15 * 15, 64)).cuda()
    weight = nn.Parameter(torch.randn(500, 64, device="cuda"))
    centers = torch.zeros(500, 64, device="cuda")
    optimizer = torch.optim.SGD([*backbone.parameters(), weight], lr=0.1, momentum=0.9, weight_decay=5e-4)
    images, labels = torch.randn(64, 3, 32, 32, device="cuda"), torch.arange(64, device="cuda") * 7 % 500

    def step() -> None:
        features = backbone(images)
        cosine = F.linear(F.normalize(features), F.normalize(weight)).clamp(-1 + 1e-7, 1 - 1e-7)
        margin = torch.zeros_like(cosine).scatter_(1, labels[:, None], 0.5)
        loss = F.cross_entropy(64 * torch.cos(torch.acos(cosine) + margin), labels)
        loss = loss + 0.01 * (features - centers[labels]).pow(2).sum(dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            counts = torch.bincount(labels, minlength=500).clamp(min=1)
            centers.index_add_(0, labels, 0.5 * (features - centers[labels]) / counts[labels][:, None])

    return step
