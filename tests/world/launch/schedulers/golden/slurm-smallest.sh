#!/bin/bash
#SBATCH --job-name=small
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --output="/tmp/slurm-%j.log"
#SBATCH --open-mode=append
#SBATCH --no-requeue

cd -- /tmp || exit 1
export PACELINE_SECRET="${PACELINE_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d " \n")}"

told= ranks=
trap 'told=yes; [ -z "$ranks" ] || kill -USR1 "$ranks"' USR1
trap 'kill -TERM "$ranks"' TERM
srun --kill-on-bad-exit=1 paceline train digits &
ranks=$!
[ -z "$told" ] || kill -USR1 "$ranks"
while wait "$ranks"; code=$?; kill -0 "$ranks" 2>/dev/null; do :; done
exit "$code"
