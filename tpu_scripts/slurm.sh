#!/usr/bin/env bash
# Run on the nodes of a SLURM cluster: write the batch script and submit it. A failed run is queued again, from the newest checkpoint.
#
#   slurm.sh --name my-run --nodes 2 --gpus-per-node 8 -- -m torch_compat train.py
#
#   --nodes N                 one process runs on each, with all of its GPUs
#   --gpus-per-node N         default: none are asked for
#   --partition NAME, --time LIMIT   as for sbatch
#   --max-restarts N          default 3
#   --python PATH             on the nodes, with xlatrain installed; default python3
#   --dry-run                 print the batch script and the command, submit nothing
#
# It runs in the current folder, which the nodes must share. Then: squeue --me; tail -f my-run-JOB.log; scancel JOB

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

opt_nodes='' opt_gpus_per_node=0 opt_partition='' opt_time='' opt_max_restarts=3 opt_python=python3
parse "$@"
check name '[A-Za-z][A-Za-z0-9_-]{0,62}' my-run
check nodes '[1-9][0-9]{0,4}' 2
check gpus-per-node "$NUMBER" 8
check max-restarts "$NUMBER" 3
check_if_given partition '[A-Za-z0-9_,-]+' gpu
check_if_given time '[0-9:-]+' 1-00:00:00
[[ -z $opt_zone && -z $opt_project ]] || refuse '--zone and --project are of Google Cloud'
[[ ${#rest[@]} -gt 0 ]] || refuse 'say what to run, for example -- -m torch_compat train.py --lr 3e-4'
needs sbatch 'run this on a login node of the cluster'

options=(--print slurm --name "$opt_name" --nodes "$opt_nodes" --max-restarts "$opt_max_restarts" --python "$opt_python")
options+=(--gpus-per-node "$opt_gpus_per_node")
[[ -z $opt_partition ]] || options+=(--partition "$opt_partition")
[[ -z $opt_time ]] || options+=(--time "$opt_time")
script=$(from_checkout "$opt_python" -m xlatrain.cli launch "${options[@]}" "${rest[@]}")
[[ $opt_dry_run == off ]] || printf '%s\n' "$script"
run sbatch <<<"$script"
