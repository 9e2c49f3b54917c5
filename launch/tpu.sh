#!/bin/bash
# A run on all machines of a Cloud TPU slice:
#   launch/tpu.sh TPU-NAME ZONE configs/quickstart.py --run.dir gs://BUCKET/mine
# Each machine has the repository in ~/jaxformer and may write the bucket. docs/scale.md
# explains it.
set -eu
name=$1 zone=$2
shift 2

gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all --command \
    "cd ~/jaxformer && python train.py $(printf '%q ' "$@")"
