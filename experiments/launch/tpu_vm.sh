#!/bin/bash
# Trains on all hosts of a TPU VM slice: experiments/launch/tpu_vm.sh NAME ZONE BUCKET [flags of experiments.train]
# The project lies in ~/transformer_jax of every host (gcloud compute tpus tpu-vm scp --recurse --worker=all), and the
# run's folder in the bucket, which every host mounts.
set -euo pipefail
name=$1 zone=$2 bucket=$3
shift 3
printf -v flags ' %q' "$@"
gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="
  set -e
  mkdir -p ~/bucket && { mountpoint -q ~/bucket || gcsfuse --implicit-dirs $bucket ~/bucket; }
  cd transformer_jax && pip install --quiet -e '.[tpu]'
  python -m experiments.train --workdir=\$HOME/bucket/runs/$name$flags"
