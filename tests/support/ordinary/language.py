"""Language models from scratch: loaders that crop, masks, losses that are read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from support.ordinary import Step, program

VOCAB, BLOCK, BATCH, WIDTH = 4096, 128, 8, 256


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.ln_1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, time, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(batch, time, width))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.h = nn.ModuleList(Block(dropout=dropout) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


@program
def nanogpt() -> Step:
    data = np.arange(100_000, dtype=np.uint16) % VOCAB
    model = GPT().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=False)

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        ix = torch.randint(len(data) - BLOCK, (BATCH,))
        x = torch.stack([torch.from_numpy(data[i : i + BLOCK].astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + BLOCK].astype(np.int64)) for i in ix])
        return x.pin_memory().to("cuda", non_blocking=True), y.pin_memory().to("cuda", non_blocking=True)

    x, y = get_batch()
    running = -1.0

    def step() -> None:
        nonlocal x, y, running
        for _ in range(2):
            with torch.amp.autocast("cuda", dtype=torch.bfloat16):
                _, loss = model(x, y)
                loss = loss / 2
            x, y = get_batch()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        lossf = loss.item() * 2
        running = lossf if running == -1.0 else 0.9 * running + 0.1 * lossf

    return step


@program
def mingpt_crops() -> Step:
    text = torch.randint(0, VOCAB, (50_000,))
    model = GPT(2, dropout=0.1).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step() -> None:
        start = torch.randint(0, len(text) - BLOCK - 1, (1,)).item()
        chunk = text[start : start + BLOCK + 1].cuda()
        _, loss = model(chunk[None, :-1], chunk[None, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


@program
def evaluation_between() -> Step:
    model = GPT(2).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    best = math.inf
    ids = torch.randint(0, VOCAB, (BATCH, BLOCK), device="cuda")

    @torch.no_grad()
    def estimate_loss() -> float:
        model.eval()
        losses = torch.zeros(3)
        for k in range(3):
            losses[k] = model(ids, ids)[1].item()
        model.train()
        return losses.mean()

    def step() -> None:
        nonlocal best
        loss = model(ids, ids)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found = estimate_loss()
        if found < best:
            best = found

    return step


@program
def masked_lm() -> Step:
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 4, 512, batch_first=True, dropout=0.0), 2
    ).cuda()
    embed, head = nn.Embedding(VOCAB, WIDTH).cuda(), nn.Linear(WIDTH, VOCAB).cuda()
    parameters = [*encoder.parameters(), *embed.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def mask_tokens(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        labels = inputs.clone()
        masked = torch.bernoulli(torch.full(labels.shape, 0.15)).bool()
        labels[~masked] = -100
        replaced = torch.bernoulli(torch.full(labels.shape, 0.8)).bool() & masked
        inputs[replaced] = 3
        random = torch.bernoulli(torch.full(labels.shape, 0.5)).bool() & masked & ~replaced
        words = torch.randint(VOCAB, labels.shape, dtype=torch.long)
        inputs[random] = words[random]
        return inputs, labels

    def step() -> None:
        ids, labels = mask_tokens(torch.randint(5, VOCAB, (BATCH, BLOCK)))
        logits = head(encoder(embed(ids.cuda())))
        loss = F.cross_entropy(logits.view(-1, VOCAB), labels.cuda().view(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program(asks=True)
def masked_lm_of_chosen_positions() -> Step:
    embed, head = nn.Embedding(VOCAB, WIDTH).cuda(), nn.Linear(WIDTH, VOCAB).cuda()
    optimizer = torch.optim.AdamW([*embed.parameters(), *head.parameters()], lr=1e-4)

    def step() -> None:
        ids = torch.randint(5, VOCAB, (BATCH, BLOCK))
        chosen = torch.rand(BATCH, BLOCK) < 0.15
        labels = ids[chosen].cuda()
        hidden = embed(ids.masked_fill(chosen, 3).cuda())
        loss = F.cross_entropy(head(hidden[chosen.cuda()]), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program
def padded_batches_of_a_loader() -> Step:
    sentences = [torch.randint(1, VOCAB, (int(length),)) for length in torch.randint(10, 100, (32,))]

    def collate(batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        padded = nn.utils.rnn.pad_sequence(batch, batch_first=True)
        return padded, padded != 0

    loader = torch.utils.data.DataLoader(sentences, batch_size=8, shuffle=True, collate_fn=collate)
    embed = nn.Embedding(VOCAB, WIDTH, padding_idx=0).cuda()
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 512, batch_first=True), 2).cuda()
    head = nn.Linear(WIDTH, 2).cuda()
    optimizer = torch.optim.Adam([*embed.parameters(), *encoder.parameters(), *head.parameters()], lr=1e-4)

    def step() -> None:
        for ids, mask in loader:
            ids, mask = ids.cuda(), mask.cuda()
            hidden = encoder(embed(ids), src_key_padding_mask=~mask)
            pooled = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
            loss = F.cross_entropy(head(pooled), torch.zeros(len(ids), dtype=torch.long, device="cuda"))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


@program
def seq2seq_transformer() -> Step:
    model = nn.Transformer(WIDTH, 4, 2, 2, 512, batch_first=True).cuda()
    source, target = nn.Embedding(VOCAB, WIDTH).cuda(), nn.Embedding(VOCAB, WIDTH).cuda()
    generator = nn.Linear(WIDTH, VOCAB).cuda()
    parameters = [p for part in (model, source, target, generator) for p in part.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-4, betas=(0.9, 0.98), eps=1e-9)

    def step() -> None:
        src = torch.randint(0, VOCAB, (8, 40), device="cuda")
        tgt = torch.randint(0, VOCAB, (8, 33), device="cuda")
        tgt_in, tgt_out = tgt[:, :-1], tgt[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(tgt_in.size(1), device="cuda")
        padding = src == 0
        hidden = model(
            source(src), target(tgt_in), tgt_mask=mask, src_key_padding_mask=padding, memory_key_padding_mask=padding
        )
        loss = F.cross_entropy(generator(hidden).reshape(-1, VOCAB), tgt_out.reshape(-1), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


class Experts(nn.Module):
    def __init__(self, count: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.gate, self.chosen = nn.Linear(WIDTH, count, bias=False), chosen
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 512), nn.SiLU(), nn.Linear(512, WIDTH)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1, x.size(-1))
        weights, picked = torch.topk(self.gate(flat), self.chosen)
        weights = F.softmax(weights, dim=1, dtype=torch.float).to(x.dtype)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            token, nth = torch.where(picked == index)
            out[token] += weights[token, nth, None] * expert(flat[token])
        return out.view_as(x)


@program(asks=True)
def mixture_of_experts_by_loop() -> Step:
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), Experts(), nn.Linear(WIDTH, VOCAB)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, VOCAB, (4, 64), device="cuda")

    def step() -> None:
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program(asks=True)
def switch_routing_by_argmax() -> Step:
    embed, gate, head = nn.Embedding(VOCAB, WIDTH).cuda(), nn.Linear(WIDTH, 4).cuda(), nn.Linear(WIDTH, VOCAB).cuda()
    experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)).cuda()
    parameters = [p for part in (embed, gate, experts, head) for p in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    ids = torch.randint(0, VOCAB, (256,), device="cuda")

    def step() -> None:
        hidden = embed(ids)
        scores = gate(hidden).softmax(-1)
        best, expert = scores.max(dim=-1)
        out = hidden.clone()
        for index in range(4):
            mask = expert == index
            if mask.any():
                out[mask] = experts[index](hidden[mask]) * best[mask].unsqueeze(-1)
        load = F.one_hot(expert, 4).float().mean(0) @ scores.mean(0)
        (F.cross_entropy(head(out), ids) + 0.01 * load).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class RMSNormBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.wq, self.wk, self.wv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64)
        self.wo = nn.Linear(WIDTH, WIDTH)
        self.w1, self.w2, self.w3 = nn.Linear(WIDTH, 704), nn.Linear(704, WIDTH), nn.Linear(WIDTH, 704)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, _ = x.shape
        y = self.norm(x)
        q = self.wq(y).view(batch, time, 4, 64).transpose(1, 2)
        k, v = (w(y).view(batch, time, 1, 64).transpose(1, 2) for w in (self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(y.transpose(1, 2).reshape(batch, time, WIDTH))
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


def _rms(dtype: torch.dtype) -> Step:
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), *(RMSNormBlock() for _ in range(4)), nn.RMSNorm(WIDTH),
                          nn.Linear(WIDTH, VOCAB, bias=False)).to("cuda", dtype)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, VOCAB, (BATCH, BLOCK), device="cuda")

    def step() -> None:
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


@program
def llama_like_with_rms_norm_bf16() -> Step:
    return _rms(torch.bfloat16)


@program
def llama_like_with_rms_norm_fp32() -> Step:
    return _rms(torch.float32)


@program
def document_masks() -> Step:
    model, head = Block().cuda(), nn.Linear(WIDTH, VOCAB).cuda()
    embed = nn.Embedding(VOCAB, WIDTH).cuda()
    parameters = [p for part in (model, head, embed) for p in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def step() -> None:
        ids = torch.randint(0, 64, (2, BLOCK))
        documents = (ids == 0).cumsum(1)
        mask = (documents[:, :, None] == documents[:, None, :]).tril().cuda()
        hidden = embed(ids.cuda())
        q, k, v = model.qkv(hidden).view(2, BLOCK, 3, 4, 64).permute(2, 0, 3, 1, 4)
        hidden = hidden + F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None]).transpose(1, 2).flatten(2)
        loss = F.cross_entropy(head(hidden).flatten(0, 1), ids.cuda().flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program(asks=True)
def sampling_while_training() -> Step:
    model = GPT(2).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    ids = torch.randint(0, VOCAB, (BATCH, BLOCK), device="cuda")

    @torch.no_grad()
    def sample(count: int) -> list[int]:
        idx = torch.zeros((1, 1), dtype=torch.long, device="cuda")
        for _ in range(count):
            logits = model(idx)[0][:, -1, :]
            kept, _ = torch.topk(logits, 50)
            logits[logits < kept[:, [-1]]] = -float("inf")
            idx = torch.cat((idx, torch.multinomial(F.softmax(logits, dim=-1), num_samples=1)), dim=1)
        return idx[0].tolist()

    def step() -> None:
        loss = model(ids, ids)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert len(sample(8)) == 9

    return step
