"""The same as vision_transformer.rs in PyTorch, on one rank."""

import math
import sys

import torch
import torch.nn.functional as F
from torch import nn

SIDE, PATCH, CLASSES, BATCH = 16, 4, 8, 32
PATCHES = (SIDE // PATCH) ** 2


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )
        self.heads = heads

    def forward(self, x):
        b, t, c = x.shape
        qkv = self.qkv(self.norm_1(x)).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm_2(x))


class Vit(nn.Module):
    def __init__(self, width, heads, layers):
        super().__init__()
        self.patches = nn.Linear(PATCH * PATCH, width)
        self.positions = nn.Parameter(torch.randn(PATCHES, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x):
        x = self.patches(x) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def gratings(samples):
    """Gratings in noise: the class is the direction of the waves."""
    labels = torch.randint(CLASSES, (samples,))
    angle = math.pi * labels / CLASSES
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    dx, dy = angle.cos()[:, None, None], angle.sin()[:, None, None]
    waves = (x * dx + y * dy + 6.3 * torch.rand(samples, 1, 1)).sin()
    images = (waves + torch.rand(samples, SIDE, SIDE) - 0.5)[:, None]
    return F.unfold(images, PATCH, stride=PATCH).transpose(1, 2), labels


def train(steps):
    torch.manual_seed(1)
    model = Vit(width=32, heads=4, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    for step in range(steps):
        pixels, labels = gratings(BATCH)
        loss = F.cross_entropy(model(pixels), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 30 == 0:
            print(f"{step + 1:4}  {loss.item():.6f}")
    with torch.no_grad():
        pixels, labels = gratings(256)
        return F.cross_entropy(model(pixels), labels).item()


if __name__ == "__main__":
    loss = train(int(sys.argv[1]) if len(sys.argv) > 1 else 150)
    print(f"loss on 256 other samples: {loss:.4f}")
