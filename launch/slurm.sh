#!/bin/bash
# A run on several machines under Slurm, continued until it is complete:
#   sbatch launch/slurm.sh configs/quickstart.py --run.dir runs/mine
# Set machines, GPUs and time to your own. docs/scale.md explains each part.
#SBATCH --job-name=jaxformer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log

srun python train.py "$@"
status=$?

# 138: stopped by SIGUSR1 and saved; 137: a process was killed; 3: a process was lost.
case $status in
3 | 137 | 138)
    if [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
    ;;
esac
exit "$status"
