#!/bin/sh
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
# A DistributedDataParallel training on two nodes, one torchrun on each. It needs no administrator:
# `creel run` gives the node's ranks a daemon of their own, within the job's limits and mounts, and
# stops it afterwards. The nodes' daemons find each other through torchrun. The 8 processors of a
# task are an example: it needs one to train, one for each worker and about one for the daemon.
#
#     creel slurm show job > job.sh; creel example train_ddp > train_ddp.py; sbatch job.sh
bin=/usr/bin
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun "$bin/creel" run -- "$bin/torchrun" --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node 1 \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$head:29500" \
    train_ddp.py /shared/images
