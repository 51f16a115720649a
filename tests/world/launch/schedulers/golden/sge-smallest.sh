#!/bin/bash
#$ -S /bin/bash
#$ -N small
#$ -V
#$ -pe mpi 1
#$ -notify
#$ -j y
#$ -o "/tmp/sge-$JOB_ID.log"
#$ -r n

cd -- /tmp || exit 1
export PACELINE_SECRET="${PACELINE_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d " \n")}"
MASTER_ADDR=$(head -n 1 "$PE_HOSTFILE" | cut -d " " -f 1)
export MASTER_ADDR
hosts=$(cut -d " " -f 1 "$PE_HOSTFILE" | sort -u)
[ "$(wc -l <<< "$hosts")" -eq 1 ] || { echo 'error: --nodes 1, but parallel environment mpi gave slots on several hosts:' $hosts >&2; exit 1; }

set -m
told= ranks=
trap 'told=yes; [ -z "$ranks" ] || kill -USR1 "$ranks"' USR1 USR2
trap 'kill -TERM "$ranks"' TERM
mpiexec -np 1 -ppn 1 paceline train digits &
ranks=$!
[ -z "$told" ] || kill -USR1 "$ranks"
while wait "$ranks"; code=$?; kill -0 "$ranks" 2>/dev/null; do :; done
exit "$code"
