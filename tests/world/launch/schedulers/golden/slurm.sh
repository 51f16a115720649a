#!/bin/bash
#SBATCH --job-name=quartznet
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=6
#SBATCH --time=1-12:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --mem=65536M
#SBATCH --partition=gpu
#SBATCH --account=speech
#SBATCH --output="/home/ada/it's here/runs/quartz net/batch/slurm-%j.log"
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --constraint=a100

cd -- '/home/ada/it'"'"'s here' || exit 1
export NCCL_DEBUG=INFO
export NOTE='two words, $HOME'
module load cuda
export PACELINE_SECRET="${PACELINE_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d " \n")}"

told= ranks=
trap 'told=yes; [ -z "$ranks" ] || kill -USR1 "$ranks"' USR1
trap 'kill -TERM "$ranks"' TERM
srun --kill-on-bad-exit=1 --cpus-per-task=6 /opt/py/bin/python -m paceline train asr --out 'runs/quartz net' --resume auto &
ranks=$!
[ -z "$told" ] || kill -USR1 "$ranks"
while wait "$ranks"; code=$?; kill -0 "$ranks" 2>/dev/null; do :; done
if [ -n "$told" ] && [ "$code" -eq 0 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
