"""Trains the GPT of examples/train_gpt.c in PyTorch and prints its tokens per second; DDP over gloo beyond one rank.

python3 tools/bench_torch_gpt.py RANKS STEPS

4 layers, 4 heads, width 128, context 128, vocabulary 256, pre-norm, learned positions, GELU (tanh), untied output;
8 sequences a rank and step, AdamW, one thread a rank.
"""
import os
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

LAYERS, HEADS, WIDTH, CONTEXT, VOCABULARY, BATCH = 4, 4, 128, 128, 256, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mask = torch.triu(torch.ones(CONTEXT, CONTEXT, dtype=torch.bool), 1)

    def attend(self, x):
        b, t, c = x.shape
        q, k, v = (z.view(b, t, HEADS, c // HEADS).transpose(1, 2) for z in self.qkv(x).split(c, dim=2))
        if hasattr(F, "scaled_dot_product_attention"):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (c // HEADS) ** -0.5
            y = scores.masked_fill(self.mask[:t, :t], float("-inf")).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(b, t, c))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.back(F.gelu(self.wide(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def train(rank, ranks, steps, port):
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = GPT()
    if ranks > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randint(0, VOCABULARY, (steps + 3, BATCH, CONTEXT + 1))
    for step in range(steps + 3):
        if step == 3:  # the first three warm up
            if ranks > 1:
                dist.barrier()
            begin = time.monotonic()
        logits = model(data[step, :, :-1])
        loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), data[step, :, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if ranks > 1:
        dist.barrier()
    if rank == 0:
        rate = ranks * steps * BATCH * CONTEXT / (time.monotonic() - begin)
        print("torch=%s ranks=%d tokens_per_s=%.0f" % (torch.__version__, ranks, rate))


def main():
    ranks, steps = int(sys.argv[1]), int(sys.argv[2])
    if ranks == 1:
        train(0, 1, steps, 0)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(train, args=(ranks, steps, port), nprocs=ranks)


if __name__ == "__main__":
    main()
