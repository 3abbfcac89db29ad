"""Times Gloo's collectives through PyTorch: one JSON line for each operation and size, from rank 0.

    python gloo_collectives.py RANKS MAX_BYTES [PORT]

A sample is the time of some calls one after another, divided by their number; the median of the samples counts.
Sizes are bytes of the whole buffer, in f32. Gloo talks TCP over the loopback interface.
"""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SAMPLES = 7


def rank_main(rank, ranks, max_bytes, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    buffer = torch.zeros(max_bytes // 4)
    small = torch.zeros(max_bytes // 4 // ranks)
    for op in ("all_reduce", "all_gather", "reduce_scatter"):
        size = 4096
        while size <= max_bytes:
            whole = buffer[: size // 4]
            part = small[: size // 4 // ranks]
            if op == "all_reduce":
                call = lambda: dist.all_reduce(whole)
            elif op == "all_gather":
                call = lambda: dist.all_gather_into_tensor(whole, part)
            else:
                call = lambda: dist.reduce_scatter_tensor(part, whole)
            calls = 200 if size <= 1 << 16 else 20 if size <= 4 << 20 else 5 if size <= 16 << 20 else 1
            samples = []
            for sample in range(-1, SAMPLES):  # the first is for warming up
                dist.barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                if sample >= 0:
                    samples.append((time.perf_counter() - start) / calls)
            if rank == 0:
                row = {"op": op, "ranks": ranks, "bytes": size, "seconds": statistics.median(samples)}
                print(json.dumps(row), flush=True)
            size *= 4
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks, max_bytes = int(sys.argv[1]), int(sys.argv[2])
    port = int(sys.argv[3]) if len(sys.argv) > 3 else 29611
    mp.start_processes(rank_main, args=(ranks, max_bytes, port), nprocs=ranks, start_method="spawn")
