#!/bin/bash
#BSUB -J small
#BSUB -n 1
#BSUB -R "span[ptile=1]"
#BSUB -o "/tmp/lsf-%J.log"
#BSUB -rn

cd -- /tmp || exit 1
export PACELINE_SECRET="${PACELINE_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d " \n")}"
MASTER_ADDR=${LSB_MCPU_HOSTS%% *}
export MASTER_ADDR

set -m
told= ranks=
trap 'told=yes; [ -z "$ranks" ] || kill -USR1 "$ranks"' USR1 USR2
trap 'kill -TERM "$ranks"' TERM
mpiexec -np 1 -ppn 1 paceline train digits &
ranks=$!
[ -z "$told" ] || kill -USR1 "$ranks"
while wait "$ranks"; code=$?; kill -0 "$ranks" 2>/dev/null; do :; done
exit "$code"
