#!/usr/bin/env bash
# The demo with its latents in a local Alluxio: through a FUSE mount, or through the S3 API where there is no FUSE.
#   tools/alluxio/demo.sh [RUN_FOLDER [--section.key VALUE ...]]
set -euo pipefail
cd "$(dirname "$0")/../.."
run="${1:-runs/demo-alluxio}"
folder="$(mktemp -d)"
stop() { tools/alluxio/cluster.py stop "$folder" && rm -rf "$folder"; }
trap stop EXIT

options=()
{ [ -e /dev/fuse ] && command -v fusermount3 >/dev/null; } || options+=(--no-fuse)
addresses="$(tools/alluxio/cluster.py start "$folder" "${options[@]}")"
address() { python -c 'import json, sys; print(json.loads(sys.argv[1])[sys.argv[2]] or "")' "$addresses" "$1"; }
mkdir "$(address ufs)/demo"
root="$(address mount)"
tools/demo.sh "$run" --latents.path "${root:-$(address s3)}/demo/latents" \
    --storage.alluxio_metrics "[$(address metrics)]" "${@:2}"
python -c 'import json, sys; print("storage:", json.load(open(sys.argv[1]))["storage"])' "$run/summary.json"
