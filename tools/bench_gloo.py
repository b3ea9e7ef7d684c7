"""Times all-reduce of float32 by gloo through PyTorch and prints microseconds, the median of seven runs.

python3 tools/bench_gloo.py RANKS BYTES
"""
import os
import socket
import sys
import time

import torch
import torch.distributed as dist


def median_us(count):
    data = torch.zeros(count)
    repeats = 300 if count <= 1 << 16 else 10 if count <= 1 << 20 else 3
    times = []
    for _ in range(8):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(repeats):
            dist.all_reduce(data)
        times.append((time.perf_counter() - begin) / repeats * 1e6)
    return sorted(times[1:])[3]


def run(rank, ranks, port, count):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    us = median_us(count)
    if rank == 0:
        print(f"us={us:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks, count = int(sys.argv[1]), int(sys.argv[2]) // 4
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(run, (ranks, port, count), nprocs=ranks)
