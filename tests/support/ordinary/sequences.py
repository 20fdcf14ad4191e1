"""Recurrent networks, taggers, speech."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from support.ordinary import Step, program


def _trained(model: nn.Module, loss_of) -> Step:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()

    return step


@program
def lstm_tagger_with_packing() -> Step:
    model = nn.ModuleDict({"embed": nn.Embedding(1000, 64), "head": nn.Linear(256, 17),
                           "lstm": nn.LSTM(64, 128, batch_first=True, bidirectional=True)}).cuda()  # fmt: skip
    sentences = [torch.randint(1, 1000, (n,)) for n in (31, 24, 18, 9)]
    lengths = torch.tensor([len(s) for s in sentences])
    ids = pad_sequence(sentences, batch_first=True).cuda()

    def loss_of() -> torch.Tensor:
        packed = pack_padded_sequence(model["embed"](ids), lengths, batch_first=True)
        hidden, _ = pad_packed_sequence(model["lstm"](packed)[0], batch_first=True)
        return F.cross_entropy(model["head"](hidden).flatten(0, 1), ids.flatten() % 17, ignore_index=0)

    return _trained(model, loss_of)


@program
def gru_classifier_unsorted() -> Step:
    model = nn.ModuleDict({"embed": nn.Embedding(1000, 64), "gru": nn.GRU(64, 128, num_layers=2, batch_first=True),
                           "head": nn.Linear(128, 5)}).cuda()  # fmt: skip
    lengths = torch.randint(5, 30, (16,))
    ids = torch.randint(1, 1000, (16, 30), device="cuda")

    def loss_of() -> torch.Tensor:
        packed = pack_padded_sequence(model["embed"](ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, last = model["gru"](packed)
        return F.cross_entropy(model["head"](last[-1]), torch.zeros(16, dtype=torch.long, device="cuda"))

    return _trained(model, loss_of)


@program
def word_language_model() -> Step:
    model = nn.ModuleDict({"embed": nn.Embedding(2000, 200), "lstm": nn.LSTM(200, 200, 2, dropout=0.2),
                           "head": nn.Linear(200, 2000)}).cuda()  # fmt: skip
    data = torch.randint(0, 2000, (36, 20), device="cuda")
    state = (torch.zeros(2, 20, 200, device="cuda"), torch.zeros(2, 20, 200, device="cuda"))

    def loss_of() -> torch.Tensor:
        nonlocal state
        state = tuple(part.detach() for part in state)
        out, state = model["lstm"](F.dropout(model["embed"](data[:-1]), 0.2), state)
        return F.cross_entropy(model["head"](out).flatten(0, 1), data[1:].flatten())

    return _trained(model, loss_of)


@program
def lstm_cells() -> Step:
    model = nn.ModuleDict({"cell": nn.LSTMCell(32, 64), "head": nn.Linear(64, 1)}).cuda()
    series = torch.randn(20, 8, 32, device="cuda")

    def loss_of() -> torch.Tensor:
        h, c = torch.zeros(8, 64, device="cuda"), torch.zeros(8, 64, device="cuda")
        outputs = []
        for t in range(series.size(0)):
            h, c = model["cell"](series[t], (h, c))
            outputs.append(model["head"](h))
        return F.mse_loss(torch.stack(outputs), series[..., :1])

    return _trained(model, loss_of)


@program
def gru_cells() -> Step:
    model = nn.ModuleDict({"cell": nn.GRUCell(32, 64), "head": nn.Linear(64, 1)}).cuda()
    series = torch.randn(20, 8, 32, device="cuda")

    def loss_of() -> torch.Tensor:
        h = torch.zeros(8, 64, device="cuda")
        for t in range(series.size(0)):
            h = model["cell"](series[t], h)
        return F.mse_loss(model["head"](h), series[-1, :, :1])

    return _trained(model, loss_of)


@program
def speech_ctc() -> Step:
    model = nn.Sequential(nn.Linear(80, 256), nn.ReLU(), nn.Linear(256, 29)).cuda()
    features = torch.randn(8, 200, 80, device="cuda")
    targets = torch.randint(1, 29, (8, 30), dtype=torch.long, device="cuda")
    input_lengths = torch.full((8,), 200, dtype=torch.long)
    target_lengths = torch.randint(10, 30, (8,), dtype=torch.long)
    criterion = nn.CTCLoss(blank=0, zero_infinity=True)

    def loss_of() -> torch.Tensor:
        logps = model(features).log_softmax(-1).transpose(0, 1)
        return criterion(logps, targets, input_lengths, target_lengths)

    return _trained(model, loss_of)


@program
def speech_ctc_of_concatenated_targets() -> Step:
    model = nn.Sequential(nn.Conv1d(80, 64, 5, padding=2), nn.ReLU(), nn.Conv1d(64, 29, 1)).cuda()
    features = torch.randn(4, 80, 160, device="cuda")
    target_lengths = torch.tensor([12, 17, 9, 21])
    targets = torch.randint(1, 29, (int(target_lengths.sum()),)).cuda()

    def loss_of() -> torch.Tensor:
        logps = model(features).permute(2, 0, 1).log_softmax(-1)
        return F.ctc_loss(logps, targets, torch.tensor([160] * 4), target_lengths)

    return _trained(model, loss_of)


@program
def temporal_convolutions() -> Step:
    layers: list[nn.Module] = []
    for power in range(4):
        padding = 2 * 2**power
        layers += [nn.ConstantPad1d((padding, 0), 0.0), nn.Conv1d(32, 32, 3, dilation=2**power), nn.ReLU()]
    model = nn.Sequential(
        nn.Conv1d(1, 32, 1), *layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 1)
    ).cuda()
    series = torch.randn(16, 1, 256).cuda()
    return _trained(model, lambda: F.smooth_l1_loss(model(series), series.mean(-1)))


@program
def attention_decoder_with_teacher_forcing() -> Step:
    model = nn.ModuleDict({"enc": nn.GRU(64, 64, batch_first=True), "embed": nn.Embedding(200, 64),
                           "dec": nn.GRU(128, 64, batch_first=True), "att": nn.Linear(64, 64),
                           "out": nn.Linear(64, 200)}).cuda()  # fmt: skip
    source, target = torch.randint(200, (8, 12), device="cuda"), torch.randint(200, (8, 10), device="cuda")

    def loss_of() -> torch.Tensor:
        memory, hidden = model["enc"](model["embed"](source))
        token, losses = target[:, :1], []
        force = torch.rand(1).item() < 0.5
        for t in range(1, target.size(1)):
            weights = F.softmax(model["att"](hidden[-1])[:, None] @ memory.transpose(1, 2), dim=-1)
            step, hidden = model["dec"](torch.cat((model["embed"](token), weights @ memory), -1), hidden)
            logits = model["out"](step[:, 0])
            losses.append(F.cross_entropy(logits, target[:, t]))
            token = target[:, t : t + 1] if force else logits.topk(1)[1].detach()
        return torch.stack(losses).mean()

    return _trained(model, loss_of)


@program
def spectrogram_classifier() -> Step:
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
                          nn.Flatten(), nn.Linear(256, 10)).cuda()  # fmt: skip
    waves = torch.randn(8, 8000).cuda()
    window = torch.hann_window(256, device="cuda")

    def loss_of() -> torch.Tensor:
        power = torch.stft(waves, 256, 128, window=window, return_complex=True).abs().pow(2)
        return F.cross_entropy(model(power.log1p()[:, None]), torch.arange(8, device="cuda"))

    return _trained(model, loss_of)
