#!/usr/bin/env bash
# What must hold on a CUDA device, in at most five minutes on one GPU: the self-checks there, a short run that ends
# with the same bits twice, and the `small` preset's updates in one process and in a rank under torchrun (nccl; DDP and
# FSDP2), as a table with tokens/s and MFU.
# Exit status: 0 all well, 1 a check failed, 2 no CUDA device here.
#
#     benchmarks/gpu_check.sh            PYTHON=python3 MICRO=32 benchmarks/gpu_check.sh
set -uo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_check: PyTorch finds no CUDA device here, so nothing was checked"
    exit 2
fi
failed=0
timeout 60 "$python" -m modicum doctor || { echo "gpu_check: the self-checks failed"; failed=1; }
# The same compiled updates twice: what was learnt, and what the optimizer remembers, have the same bits.
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
learnt() {
    timeout "$2" "$python" -m modicum pretrain recipes/quickstart.yaml --set "output=$folder/$1" \
        --set pretrain.steps=20 --set pretrain.compile=on >&2 || return 1
    cd "$folder/$1/quickstart/pretrain/checkpoints/last" && cat model.safetensors training/optimizer.safetensors |
        sha256sum
}
if first="$(learnt first 70)" && second="$(learnt second 40)"; then
    [ "$first" = "$second" ] || { echo "gpu_check: the same run twice did not end with the same bits"; failed=1; }
else
    echo "gpu_check: a short run failed or ran out of time"
    failed=1
fi
timeout 130 "$python" benchmarks/ranks.py --device cuda --ranks 1 --preset small --optimizer muon \
    --batch 128 --micro "${MICRO:-32}" --length 1024 --updates 8 ||
    { echo "gpu_check: training failed or ran out of time"; failed=1; }
exit $failed
