"""Loads one 1 GiB file with the Python package safetensors and with dtrain, in turns, each time into new memory.

python3 tools/bench_safetensors.py build/bench
"""
import os
import statistics
import subprocess
import sys
import tempfile
import time

import numpy
import safetensors.numpy

RUNS = 7
with tempfile.TemporaryDirectory(prefix="dtrain-bench-") as directory:
    path = os.path.join(directory, "file")
    safetensors.numpy.save_file({"layer.%d" % i: numpy.full(1 << 22, i, numpy.float32) for i in range(64)}, path)
    theirs, ours = [], []
    for run in range(-1, RUNS):
        begin = time.perf_counter()
        tensors = safetensors.numpy.load_file(path)
        took = time.perf_counter() - begin
        del tensors
        line = subprocess.run([sys.argv[1], "file_load", "runs=7"], env=dict(os.environ, BENCH_FILE=path),
                              capture_output=True, text=True, check=True).stdout
        if run >= 0:
            theirs.append(took * 1e6)
            ours.append(float(dict(item.split("=") for item in line.split())["us"]))
    us, limit_us = statistics.median(ours), statistics.median(theirs)
    print("op=file_load transport=none ranks=1 bytes=%d against=python huge=0 us=%.3f algbw_GBps=%.4f limit_us=%.3f "
          "limit_GBps=%.4f of_limit=%.3f" % (1 << 30, us, (1 << 30) * 1e-3 / us, limit_us, (1 << 30) * 1e-3 / limit_us,
                                             statistics.median(t / o for t, o in zip(theirs, ours))))
