#!/usr/bin/env bash
# Check this project on a machine with one GPU and measure what projections need from it, within 8 minutes.
#
#   scripts/gpu_check.sh [--dry-run] [--device cuda|cpu] [--out DIR]
#
# Four parts, each with a limit in seconds; the next one runs even if one fails or runs out of time:
#   1. the tests that need a GPU;
#   2. a table of kernel times: Qwen3-1.7B, and Qwen3-32B at TP 8, with Muon, SOAP, Shampoo, basis rotation and AdamW;
#   3. rank replay: the slowest rank's optimizer step of both models under Canzona and ASC;
#   4. what basis rotation costs over AdamW, from the table.
# The results are small files in DIR (results/gpu/DEVICE), to be committed.
# --device cpu runs the same with a tiny model, to try the script; --dry-run prints the commands and runs nothing.
# Exit code: 0 if every part succeeded, 1 if one did not, 2 if there is no GPU or the options are wrong.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    echo "error: $1: write scripts/gpu_check.sh [--dry-run] [--device cuda|cpu] [--out DIR]" >&2
    exit 2
}

dry=false
device=cuda
out=
while [ $# -gt 0 ]; do
    case $1 in
        --dry-run) dry=true ;;
        --device) [ $# -gt 1 ] || usage "--device needs a value"; device=$2; shift ;;
        --out) [ $# -gt 1 ] || usage "--out needs a value"; out=$2; shift ;;
        *) usage "unknown option $1" ;;
    esac
    shift
done
[ "$device" = cuda ] || [ "$device" = cpu ] || usage "device $device is unknown"

python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3

name=cpu
if [ "$device" = cuda ]; then
    if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
        name=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)
    elif [ "$dry" = false ]; then
        echo "error: no GPU here (nvidia-smi finds none): run this on a machine with one, or add --device cpu" >&2
        exit 2
    else
        name=gpu
    fi
fi
slug=$(printf '%s' "$name" | tr '[:upper:]' '[:lower:]' | tr -cs 'a-z0-9' '-' | sed 's/^-*//; s/-*$//')
out=${out:-results/gpu/$slug}
optimizers=(muon soap shampoo basis-rotation)
failed=()

part() { # NAME LIMIT COMMAND...
    local what=$1 limit=$2
    shift 2
    if [ "$dry" = true ]; then
        printf 'timeout %s' "$limit"
        printf ' %q' "$@"
        printf '\n'
        return
    fi
    echo "== $what (at most $limit s)"
    if ! timeout --kill-after=10 "$limit" "$@"; then
        echo "== $what failed or ran out of time" >&2
        failed+=("$what")
    fi
}

replay() { # NAME LIMIT MODEL DP TP STRATEGY MORE...
    local what=$1 limit=$2 model=$3 dp=$4 tp=$5 strategy=$6
    shift 6
    part "replay $what, $strategy" "$limit" "$python" -m impl replay --model "$model" --optimizer muon --dp "$dp" \
        --tp "$tp" --strategy "$strategy" --ranks heaviest --device "$device" \
        --out "$out/replay-$what-$strategy.json" "$@"
}

[ "$dry" = true ] || mkdir -p "$out"
# 1. tests: 110 s
part "tests that need a GPU" 110 "$python" -m pytest tests/gpu -q -p no:cacheprovider
# 2. kernels: 60 + 110 s.  The time that the command is given ends before its limit; should one long kernel overrun it,
# the table has the rows measured until then, as they are written while the job runs.
if [ "$device" = cuda ]; then
    part "kernels of Qwen3-1.7B" 60 "$python" -m impl kernels --model qwen3-1.7b --optimizer "${optimizers[@]}" \
        --device cuda --seconds 30 --case-seconds 0.2 --out "$out/kernels.csv"
    part "kernels of Qwen3-32B, TP 8" 110 "$python" -m impl kernels --model qwen3-32b --tp 8 --optimizer \
        "${optimizers[@]}" --device cuda --seconds 70 --case-seconds 0.2 --out "$out/kernels.csv"
else
    part "kernels of Qwen3-tiny" 110 "$python" -m impl kernels --model qwen3-tiny --optimizer "${optimizers[@]}" \
        --device cpu --sequence 64 --seconds 60 --case-seconds 0.01 --out "$out/kernels.csv"
fi
# 3. rank replay: 4 x 40 s
for strategy in canzona asc; do
    if [ "$device" = cuda ]; then
        replay qwen3-1.7b 40 qwen3-1.7b 8 1 "$strategy" --dtype bfloat16
        replay qwen3-32b 40 qwen3-32b 32 8 "$strategy" --dtype bfloat16 --samples 5 \
            --set plan.bucket_elements=400000000
    else
        replay qwen3-tiny 60 qwen3-tiny 2 2 "$strategy" --samples 2 --set plan.bucket_elements=20000
    fi
done
# 4. overhead of rotation: 30 s
part "rotation over AdamW" 30 "$python" scripts/rotation_overhead.py "$out/kernels.csv" "$out/rotation_overhead.csv"
part "provenance" 10 "$python" -c "import json, sys; from impl.harness import provenance as p
json.dump({'date': p.now(), **p.collect()}, open(sys.argv[1], 'w'), indent=1)" "$out/provenance.json"

if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
[ "$dry" = true ] || echo "done: the files in $out are small; commit them"
