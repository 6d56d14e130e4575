#!/bin/sh
# A real Slurm on this machine, by hand: cluster.sh install | up [NODES] | down. See cluster.py.
set -eu
cd "$(dirname "$0")/../.."
case ${1:-} in
  install)
    export DEBIAN_FRONTEND=noninteractive
    exec apt-get install -y -q --no-install-recommends slurmctld slurmd slurm-client slurmdbd munge mariadb-server
    ;;
  *) exec python3 -m tests.slurm.cluster "$@" ;;
esac
