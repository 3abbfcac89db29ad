#!/usr/bin/env bash
# Time ferrotron's collectives, Gloo's (through PyTorch) and Open MPI's alternately on this machine, and print
# the medians and the median of each round's ratio: TCP against TCP, shared memory against shared memory.
#
#   PYTHON=python3 benches/peers/collectives.sh [-n ROUNDS] [-r "2 4"] [-m MAX_BYTES]
#
# Needs cargo, and for what is compared: a Python with PyTorch in $PYTHON, and mpicc and mpirun (Debian:
# openmpi-bin, libopenmpi-dev). What is missing is left out and named.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
rounds=3 counts="2 4" max=268435456
while getopts n:r:m:h flag; do
    case $flag in
    n) rounds=$OPTARG ;;
    r) counts=$OPTARG ;;
    m) max=$OPTARG ;;
    *) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
    esac
done
python=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

ours=$(cargo bench -p ferrotron-parallel --bench collectives --no-run --message-format=json 2>/dev/null |
    "$python" -c 'import json, sys; print([p["executable"] for p in map(json.loads, sys.stdin) if p.get("executable")][-1])')
mpi=()
if command -v mpicc >/dev/null && command -v mpirun >/dev/null; then
    mpicc -O2 benches/peers/mpi_collectives.c -o "$scratch/mpi_collectives"
    mpi=(mpirun --oversubscribe --bind-to none --mca pml ob1)
else
    echo "without Open MPI: there is no mpicc or no mpirun"
fi
gloo=no
if "$python" -c 'import torch' 2>/dev/null; then gloo=yes; else echo "without Gloo: $python has no torch"; fi

echo "machine: $(nproc) cores, $(awk -F': ' '/model name/ { print $2; exit }' /proc/cpuinfo), Linux $(uname -r)"
echo "ferrotron: transport tcp, transport auto (shared memory); progress thread for each rank, default settings"
[ ${#mpi[@]} -eq 0 ] || echo "Open MPI: $(mpirun --version | head -n 1), --mca pml ob1 --bind-to none; btl self,tcp over lo; btl self,vader ($(ompi_info --parsable --param btl vader --level 9 | awk -F: '/single_copy_mechanism:value/ { print "single copy " $NF }'))"
[ $gloo = no ] || echo "Gloo: PyTorch $("$python" -c 'import torch; print(torch.__version__)'), interface lo"
echo "f32; median of $rounds rounds of 7 samples; in place but for all_gather and reduce_scatter of Gloo and reduce_scatter of Open MPI"

measure() { # name command...
    local name=$1
    shift
    "$@" 2>"$scratch/stderr" | grep '^{' >>"$scratch/rows.$name" || { echo "$name failed:"; cat "$scratch/stderr"; exit 1; }
}

for ranks in $counts; do
    for ((round = 0; round < rounds; round++)); do
        measure tcp.ferrotron "$ours" "$ranks" tcp "$max"
        [ ${#mpi[@]} -eq 0 ] || measure tcp.openmpi "${mpi[@]}" -n "$ranks" --mca btl self,tcp \
            --mca btl_tcp_if_include lo "$scratch/mpi_collectives" "$max"
        [ $gloo = no ] || measure tcp.gloo "$python" benches/peers/gloo_collectives.py "$ranks" "$max"
        measure shared.ferrotron "$ours" "$ranks" auto "$max"
        [ ${#mpi[@]} -eq 0 ] || measure shared.openmpi "${mpi[@]}" -n "$ranks" --mca btl self,vader \
            "$scratch/mpi_collectives" "$max"
    done
done

"$python" - "$scratch" <<'PYTHON'
import json, statistics, sys
from pathlib import Path

rows = {}
for file in Path(sys.argv[1]).glob("rows.*"):
    _, kind, who = file.name.split(".")
    for line in file.read_text().splitlines():
        row = json.loads(line)
        key = (kind, row["op"], row["ranks"], row["bytes"])
        rows.setdefault(key, {}).setdefault(who, []).append(row["seconds"])
print(f"\n{'':8}{'operation':16}{'ranks':>5}{'bytes':>11}{'ferrotron us':>14}{'openmpi us':>12}{'gloo us':>12}{'best / ours':>13}")
for key in sorted(rows, key=lambda key: (key[0], key[2], ["all_reduce", "all_gather", "reduce_scatter"].index(key[1]), key[3])):
    median = {who: statistics.median(times) * 1e6 for who, times in rows[key].items()}
    cells = "".join(f"{median[who]:12.1f}" if who in median else f"{'-':>12}" for who in ("openmpi", "gloo"))
    # By rounds: a machine that is slower for a while is so for all of them.
    others = [times for who, times in rows[key].items() if who != "ferrotron"]
    ratios = [min(theirs) / ours for ours, *theirs in zip(rows[key]["ferrotron"], *others) if theirs]
    ratio = f"{statistics.median(ratios):12.2f}x" if ratios else ""
    print(f"{key[0]:8}{key[1]:16}{key[2]:5}{key[3]:11}{median['ferrotron']:14.1f}{cells}{ratio}")
PYTHON
