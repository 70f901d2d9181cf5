#!/usr/bin/env bash
# The whole pipeline on the sample clips: encode, train on two processes that share each sequence, sample, report.
#   tools/demo.sh [RUN_FOLDER [--section.key VALUE ...]]
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# `accelerate launch --cpu` would start one process; this is its way to start two on a CPU.
export ACCELERATE_USE_CPU=true
launch=(accelerate launch --multi_gpu --num_machines 1 --num_processes 2 --mixed_precision no --dynamo_backend no -m ttv_train)
run="${1:-runs/demo}"
config=(--config configs/train/demo.yaml --output_dir "$run" "${@:2}")

rm -rf "$run"
ttv-train encode "${config[@]}"
"${launch[@]}" train "${config[@]}"
"${launch[@]}" sample --config "$run/config.resolved.yaml"
ttv-train report "$run"
