#!/usr/bin/env bash
# Time a training step of ferrotron and of PyTorch alternately, and print the medians and their ratio, in each state of the
# machine.
#
#   PYTHON=python3 benches/peers/side_by_side.sh [-n N] [-c] FERROTRON [FLAG ...]
#
#   FERROTRON   the program, for example target/release/ferrotron
#   -n N        rounds, 3 unless told; each round runs ferrotron, PyTorch eager and, with -c, PyTorch compiled
#   -c          time torch.compile as well (its warm-up takes minutes for a large model)
#   FLAG ...    what to time; the same words go to `ferrotron bench` and to torch_gpt.py. Without any: GPT-2 124M,
#               4 sequences of 256. The character model of the README:
#               --vocab-size 65 --hidden-size 128 --num-layers 4 --num-attention-heads 4 --seq-length 64
#               --micro-batch-size 12 --warmup 50 --steps 200
#               Both use all cores, unless --threads N tells otherwise.
#
# The systems take turns within a round, so that a machine that slows down or speeds up meets both alike. A short loop of
# Python before and after each run sorts it: both at 0.75 of the fastest loop's speed or more is "alone", both below, because
# others use the cores, is "shared". A run between the two counts for neither, only in the medians of all runs.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}

usage() {
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" >&2
    exit 2
}

rounds=3 compile=no
while getopts n:ch flag; do
    case $flag in
    n) rounds=$OPTARG ;;
    c) compile=yes ;;
    *) usage ;;
    esac
done
shift $((OPTIND - 1))
[ $# -ge 1 ] || usage
ferrotron=$1
shift
[ -x "$ferrotron" ] || { echo "side_by_side: no program at $ferrotron" >&2; exit 2; }
if [ $# -eq 0 ]; then
    set -- --vocab-size 50304 --hidden-size 768 --num-layers 12 --num-attention-heads 12 --seq-length 256 \
        --micro-batch-size 4 --warmup 2 --steps 5
fi

case " $* " in
*" --threads"[\ =]*) ;;
*) set -- --threads "$(nproc)" "$@" ;;
esac

lines=$(mktemp -d)
trap 'rm -rf "$lines"' EXIT

# Print the seconds of the loop: the median of 15 runs of some milliseconds.
probe() {
    "$python" -S -c '
import statistics, time
def run():
    start = time.perf_counter()
    sum(range(200_000))
    return time.perf_counter() - start
print(statistics.median(run() for _ in range(15)))'
}

# Keep the last line that is a JSON object: a program may print its progress before it.
measure() { # name command...
    local name=$1 before
    shift
    before=$(probe)
    "$@" 2>"$lines/stderr" | grep '^{' | tail -n 1 >"$lines/one" || true
    if [ ! -s "$lines/one" ]; then
        echo "side_by_side: $name printed no JSON line:" >&2
        cat "$lines/stderr" >&2
        exit 1
    fi
    echo "$before $(probe) $(cat "$lines/one")" >>"$lines/$name"
    echo "$name $(cat "$lines/one")"
}

for _ in $(seq "$rounds"); do
    measure ferrotron "$ferrotron" bench "$@"
    measure torch-eager "$python" "$here/torch_gpt.py" "$@"
    if [ $compile = yes ]; then
        measure torch-compiled "$python" "$here/torch_gpt.py" --compile "$@"
    fi
done

"$python" - "$lines" <<'PYTHON'
import json, statistics, sys
from pathlib import Path

ALONE = 0.75
KEYS = ("s_per_step", "tokens_per_s", "gflops", "peak_rss_mb")

def runs(file):
    for line in file.read_text().splitlines():
        before, after, row = line.split(" ", 2)
        yield [float(before), float(after)], json.loads(row)

folder = Path(sys.argv[1])
names = ("ferrotron", "torch-eager", "torch-compiled")
found = {name: list(runs(folder / name)) for name in names if (folder / name).exists()}
fastest = min(probe for rows in found.values() for probes, _ in rows for probe in probes)
belongs = {
    "all": lambda probe: True,
    "alone": lambda probe: fastest / probe >= ALONE,
    "shared": lambda probe: fastest / probe < ALONE,
}
for state, of in belongs.items():
    taken = {name: [row for probes, row in rows if all(map(of, probes))] for name, rows in found.items()}
    medians = {
        name: {key: statistics.median(row[key] for row in rows) for key in KEYS} for name, rows in taken.items() if rows
    }
    if not medians:
        continue
    mine = medians.get("ferrotron")
    title = f"median, {state}"
    print(f"\n{title:16}{'s/step':>12}{'tokens/s':>12}{'GFLOP/s':>10}{'peak MB':>10}{'runs':>6}{'speed-up':>10}{'memory':>8}")
    for name, row in medians.items():
        line = f"{name:16}{row['s_per_step']:12.6f}{row['tokens_per_s']:12.1f}{row['gflops']:10.1f}{row['peak_rss_mb']:10.0f}"
        line += f"{len(taken[name]):6}"
        if mine:
            # How many times faster ferrotron is, and what part of the other's memory it needs.
            faster, memory = row["s_per_step"] / mine["s_per_step"], mine["peak_rss_mb"] / row["peak_rss_mb"]
            line += f"{faster:9.2f}x{memory:7.2f}x"
        print(line)
PYTHON
