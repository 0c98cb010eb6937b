#!/usr/bin/env bash
# What must hold on a CUDA device, in at most five minutes on one GPU: the self-checks there, and the `small` preset's
# updates in one process and in a rank under torchrun (nccl; DDP and FSDP2), as a table with tokens/s and MFU.
# Exit status: 0 all well, 1 a check failed, 2 no CUDA device here.
#
#     benchmarks/gpu_check.sh            PYTHON=python3 MICRO=32 benchmarks/gpu_check.sh
set -u
cd "$(dirname "$0")/.."
python="${PYTHON:-python}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_check: PyTorch finds no CUDA device here, so nothing was checked"
    exit 2
fi
failed=0
timeout 90 "$python" -m modicum doctor || { echo "gpu_check: the self-checks failed"; failed=1; }
timeout 200 "$python" benchmarks/ranks.py --device cuda --ranks 1 --preset small --optimizer muon \
    --batch 128 --micro "${MICRO:-32}" --length 1024 --updates 8 ||
    { echo "gpu_check: training failed or ran out of time"; failed=1; }
exit $failed
