"""Times in PyTorch what tools/bench_cuda.cu times in dtrain, and prints the same lines.

python3 tools/bench_cuda_peers.py [BYTES [RUNS]]

The first line is the ceiling, a copy from device to device. Vectors rotate through memory of at least four times the
L2. Runs are queued ahead, and two events time each. PyTorch's calls may allocate from its cache. top-k takes numbers
that are not negative, because torch.topk does not compare magnitudes. reduce_8 is seven torch.add; its bytes are those
that a reduction must move. Without PyTorch or a GPU the script says so and exits with 0.
"""
import statistics
import sys

try:
    import torch
except ImportError as error:
    print("not run: %s" % error)
    sys.exit(0)
if not torch.cuda.is_available():
    print("not run: PyTorch %s sees no GPU" % torch.__version__)
    sys.exit(0)

BYTES = int(sys.argv[1]) if len(sys.argv) > 1 else 1 << 28
RUNS = int(sys.argv[2]) if len(sys.argv) > 2 else 31
WARM, ROUND = 5, 20
COUNT = BYTES // 4
K = max(1, -(-COUNT // 100))
GPU = torch.cuda.get_device_properties(0)
L2 = getattr(GPU, "L2_cache_size", 64 << 20)
VECTORS = 4 * L2 // BYTES // ROUND * ROUND + ROUND
POOL = [torch.empty(COUNT, device="cuda") for _ in range(VECTORS)]
ceiling = None


def timed(run, vectors):
    """Returns the median time in microseconds of run(x), x being the next so many of the pool."""
    begin, end = ([torch.cuda.Event(enable_timing=True) for _ in range(RUNS)] for _ in range(2))
    at = 0
    for r in range(-WARM, RUNS):
        x = [POOL[(at + i) % VECTORS] for i in range(vectors)]
        at = (at + vectors) % VECTORS
        if r >= 0:
            begin[r].record()
        run(x)
        if r >= 0:
            end[r].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(begin, end)) * 1e3


def line(op, peer, run, vectors, per_element, positive=False):
    global ceiling
    for x in POOL:
        x.normal_()
        if positive:
            x.abs_()
    us = timed(run, vectors)
    rate = per_element * COUNT * 1e-3 / us
    ceiling = ceiling or rate
    print("op=%s peer=%s us=%.2f bytes_per_element=%.4g GBps=%.1f of_copy=%.3f"
          % (op, peer, us, per_element, rate, rate / ceiling), flush=True)


def sum_of_8(x):
    torch.add(x[0], x[1], out=x[8])
    for part in x[2:8]:
        torch.add(x[8], part, out=x[8])


def adamw(copy):
    """A run is a step of the next of several optimizers, which have parameters, gradients and state of their own."""
    made = []
    for at in range(0, VECTORS, 4):
        param = torch.nn.Parameter(POOL[at])
        param.grad = POOL[at + 1]
        made.append(torch.optim.AdamW([param], lr=1e-6, fused=True))
        made[-1].step()
    turn = [0]

    def run(_):
        optimizer = made[turn[0] % len(made)]
        turn[0] += 1
        optimizer.step()
        if copy:
            optimizer.param_groups[0]["params"][0].to(torch.bfloat16)
    return run


def residual_topk(x):
    torch.add(x[0], x[1], out=x[0])
    torch.topk(x[0], K, sorted=False)


print("# %s, PyTorch %s, %d vectors of %d float32" % (GPU.name, torch.__version__, VECTORS, COUNT))
with torch.no_grad():
    line("memcpy", "copy_", lambda x: x[1].copy_(x[0]), 2, 8)
    line("scale", "mul_", lambda x: x[0].mul_(1.0001), 1, 8)
    line("reduce_2", "torch.add", lambda x: torch.add(x[0], x[1], out=x[2]), 4, 12)
    line("reduce_8", "torch.add", sum_of_8, 10, 36)
    line("cast_bf16", "tensor.to", lambda x: x[0].to(torch.bfloat16), 1, 6)
    line("squares", "vector_norm", lambda x: torch.linalg.vector_norm(x[0]), 1, 4)
    line("adamw", "fused_AdamW", adamw(False), 4, 28)
    line("adamw_bf16", "fused_AdamW+to", adamw(True), 4, 30)
    line("topk", "torch.topk", lambda x: torch.topk(x[0], K, sorted=False), 1, 4.08, positive=True)
    line("topk_add", "torch.add+topk", residual_topk, 2, 12.08, positive=True)
    line("memcpy", "copy_", lambda x: x[1].copy_(x[0]), 2, 8)
