"""A two-layer transformer over bytes and one step of its training, for bench/training.py and the
Python package's test_training.py. It knows neither the attention implementations nor the data."""

import torch
import torch.nn.functional as F
from torch import nn

LEARNING_RATE = 1e-3


class Block(nn.Module):
    """`attend` is a function (q, k, v, causal=...) -> out on (batch, seqlen, heads, dim)
    tensors."""

    def __init__(self, width, heads, attend):
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.projection(self.attend(q, k, v, causal=True).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class Transformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width, heads, seqlen, attend):
        super().__init__()
        self.byte, self.position = nn.Embedding(256, width), nn.Embedding(seqlen, width)
        self.blocks = nn.Sequential(*(Block(width, heads, attend) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, text):
        x = self.byte(text) + self.position.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Training:
    """A model and its optimizer. The initial weights do not depend on `attend`. A 16-bit dtype
    runs by autocast over fp32 weights."""

    def __init__(self, attend, device, dtype, width, heads, seqlen):
        torch.manual_seed(0)
        self.model = Transformer(width, heads, seqlen, attend).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.device, self.dtype = device, dtype

    def step(self, text):
        """Learns from (batch, seqlen + 1) bytes as int64. Returns the loss before the update, as
        a tensor without a synchronisation."""
        with torch.autocast(self.device, self.dtype, enabled=self.dtype != torch.float32):
            scores = self.model(text[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1).float(), text[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()
