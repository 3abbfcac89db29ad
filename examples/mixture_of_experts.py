"""The same as mixture_of_experts.rs in PyTorch, on one rank."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, LENGTH, TOP, BATCH = 256, 32, 2, 16


def rotary(x):  # (B, H, T, D)
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * 10_000 ** (-torch.arange(half) / half)
    (a, b), cos, sin = x.chunk(2, -1), angles.cos().to(x), angles.sin().to(x)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.heads = heads

    def forward(self, x):
        b, t, c = x.shape
        qkv = self.qkv(x).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(b, t, c))


class Expert(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.proj(F.silu(gate) * up)


class Experts(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, 2 * width) for _ in range(experts))

    def forward(self, x):
        probabilities = self.router(x).softmax(-1)  # (B, T, E)
        gates, chosen = probabilities.topk(TOP)  # (B, T, 2)
        gates = (gates / gates.sum(-1, keepdim=True)).flatten(0, 1)
        shares = F.one_hot(chosen, len(self.experts)).to(x).mean((1, 2))  # (B, E)
        balance = (shares * probabilities.mean(1)).sum(-1).mean() * len(self.experts)
        tokens, chosen = x.flatten(0, 1), chosen.flatten(0, 1)
        y = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == e)
            if len(row) > 0:
                y = y.index_add(0, row, expert(tokens[row]) * gates[row, slot, None])
        return y.view_as(x), balance


class Block(nn.Module):
    def __init__(self, width, heads, experts):
        super().__init__()
        self.norm_1 = nn.RMSNorm(width, 1e-5)
        self.attn = Attention(width, heads)
        self.norm_2 = nn.RMSNorm(width, 1e-5)
        self.experts = Experts(width, experts)

    def forward(self, x):
        x = x + self.attn(self.norm_1(x))
        y, balance = self.experts(self.norm_2(x))
        return x + y, balance


class MoeLm(nn.Module):
    def __init__(self, width, heads, layers, experts):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width, heads, experts) for _ in range(layers))
        self.norm = nn.RMSNorm(width, 1e-5)
        self.head = nn.Linear(width, VOCAB, bias=False)
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=0.02)

    def forward(self, tokens):
        x, balances = self.embedding(tokens), []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        return self.head(self.norm(x)), sum(balances) / len(balances)


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(steps):
    torch.manual_seed(1)
    text = (Path(__file__).parent.parent / "README.md").read_bytes()
    held_out = len(text) // 10
    text, unseen = torch.tensor(list(text)).split([len(text) - held_out, held_out])
    model = MoeLm(width=32, heads=4, layers=2, experts=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1))
        tokens = text[starts + torch.arange(LENGTH + 1)]
        logits, balance = model(tokens[:, :-1])
        loss = cross_entropy(logits, tokens[:, 1:])
        optimizer.zero_grad()
        (loss + 0.01 * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"{step + 1:4}  {loss.item():.6f}  {balance.item():.6f}")
    with torch.no_grad():
        windows = unseen.unfold(0, LENGTH + 1, LENGTH)
        return cross_entropy(model(windows[:, :-1])[0], windows[:, 1:]).item()


if __name__ == "__main__":
    loss = train(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
    print(f"cross-entropy of the unseen text: {loss:.4f}")
