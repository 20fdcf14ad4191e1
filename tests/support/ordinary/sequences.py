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


@program
def conditional_random_field_tagger() -> Step:
    """The forward algorithm over padded sentences, and Viterbi's path of each."""
    embedding, scorer = nn.Embedding(500, 64).cuda(), nn.Linear(64, 9).cuda()
    transitions = nn.Parameter(torch.zeros(9, 9, device="cuda"))
    optimizer = torch.optim.Adam([*embedding.parameters(), *scorer.parameters(), transitions], lr=0.01)
    words = torch.arange(16 * 30, device="cuda").view(16, 30) % 500
    tags = words % 9
    mask = torch.arange(30, device="cuda")[None] < (10 + torch.arange(16, device="cuda") % 20)[:, None]

    def step() -> None:
        scores = scorer(embedding(words))  # batch, time, tags
        alpha = scores[:, 0]
        for time in range(1, scores.shape[1]):
            reached = torch.logsumexp(alpha[:, :, None] + transitions[None] + scores[:, time, None], dim=1)
            alpha = torch.where(mask[:, time, None], reached, alpha)
        own = scores.gather(2, tags[..., None]).squeeze(-1)
        moves = transitions[tags[:, :-1], tags[:, 1:]]
        gold = (own * mask).sum(dim=1) + (moves * mask[:, 1:]).sum(dim=1)
        optimizer.zero_grad()
        (torch.logsumexp(alpha, dim=1) - gold).mean().backward()
        optimizer.step()
        with torch.no_grad():
            best, paths = scores[:, 0], []
            for time in range(1, scores.shape[1]):
                best, back = (best[:, :, None] + transitions).max(dim=1)
                best = best + scores[:, time]
                paths.append(back)
            tag = best.argmax(dim=1, keepdim=True)
            for back in reversed(paths):
                tag = back.gather(1, tag)

    return step


@program
def beam_search_beside_training() -> Step:
    encoder, decoder = nn.Embedding(200, 128).cuda(), nn.Embedding(200, 128).cuda()
    mix, head = nn.MultiheadAttention(128, 4, batch_first=True).cuda(), nn.Linear(128, 200).cuda()
    modules = nn.ModuleList([encoder, decoder, mix, head])
    optimizer = torch.optim.Adam(modules.parameters())
    source, target = (torch.arange(8 * 12, device="cuda").view(8, 12) * step % 200 for step in (3, 7))

    def logits_of(memory: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        causal = torch.ones(tokens.shape[1], memory.shape[1], dtype=torch.bool, device="cuda").triu(1)
        query = decoder(tokens)
        return head(query + mix(query, memory, memory, attn_mask=causal, need_weights=False)[0])

    def step() -> None:
        optimizer.zero_grad()
        logits = logits_of(encoder(source), target[:, :-1])
        F.cross_entropy(logits.transpose(1, 2), target[:, 1:]).backward()
        optimizer.step()
        with torch.no_grad():
            memory = encoder(source).repeat_interleave(4, dim=0)
            beams = torch.zeros(32, 1, dtype=torch.long, device="cuda")
            scores = torch.full((8, 4), float("-inf"), device="cuda")
            scores[:, 0] = 0
            for _ in range(6):
                following = logits_of(memory, beams)[:, -1].log_softmax(dim=-1).view(8, 4, -1)
                scores, chosen = (scores[..., None] + following).view(8, -1).topk(4, dim=-1)
                origin = (chosen // 200 + 4 * torch.arange(8, device="cuda")[:, None]).view(-1)
                beams = torch.cat([beams[origin], (chosen % 200).view(-1, 1)], dim=1)

    return step


@program
def forecasts_by_student_distributions() -> Step:
    """As DeepAR's, arXiv 1704.04110: cells unrolled, likelihoods by distributions, samples drawn behind."""
    cell, head = nn.LSTMCell(4, 64).cuda(), nn.Linear(64, 3).cuda()
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()])
    series = torch.randn(32, 24, 4, device="cuda")

    def spread(hidden: torch.Tensor) -> torch.distributions.StudentT:
        degrees, mean, scale = head(hidden).unbind(dim=-1)
        return torch.distributions.StudentT(2 + F.softplus(degrees), mean, F.softplus(scale) + 1e-3)

    def step() -> None:
        state, losses = (series.new_zeros(32, 64), series.new_zeros(32, 64)), []
        for time in range(series.shape[1] - 1):
            state = cell(series[:, time], state)
            losses.append(-spread(state[0]).log_prob(series[:, time + 1, 0]))
        optimizer.zero_grad()
        torch.stack(losses, dim=1).mean().backward()
        optimizer.step()
        with torch.no_grad():
            spread(state[0]).sample((20,)).quantile(0.9, dim=0)

    return step


@program
def lists_ranked_by_sorted_likelihoods() -> Step:
    """ListMLE and an approximate NDCG over padded lists."""
    net = nn.Sequential(nn.Linear(46, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 1)).cuda()
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.01)
    features = torch.randn(64, 40, 46, device="cuda")
    relevance = (torch.arange(64 * 40, device="cuda").view(64, 40) * 13 % 5).float()
    padded = torch.arange(40, device="cuda")[None] >= (20 + torch.arange(64, device="cuda") % 20)[:, None]

    def step() -> None:
        scores = net(features).squeeze(-1).masked_fill(padded, float("-inf"))
        order = relevance.masked_fill(padded, -1).argsort(dim=-1, descending=True)
        inside = ~padded.gather(1, order)
        ranked = scores.gather(1, order).masked_fill(~inside, -1e9)
        behind = ranked.flip(-1).logcumsumexp(dim=-1).flip(-1)
        loss = ((behind - ranked) * inside).sum(dim=-1).mean()
        places = 1 + torch.sigmoid(ranked[:, None] - ranked[:, :, None]).sum(dim=-1)
        gains = (2 ** relevance.gather(1, order) - 1) * inside
        loss = loss - (gains / torch.log2(1 + places)).sum(dim=-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step
