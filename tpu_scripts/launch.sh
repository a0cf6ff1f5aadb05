#!/usr/bin/env bash
# Start a command on every worker of the TPU, and show what it prints. The run goes on when this script ends.
#
#   launch.sh --name my-tpu --zone us-west4-a -- -m torch_compat train.py --lr 3e-4
#
# What follows -- are the arguments of Python, in ~/xlatrain/code of each worker (see setup.sh).
#
#   --env NAME=VALUE,...      variables for the run; they can be seen in the process list: no secrets
#   --plan FILE               a plan of `xlatrain preflight`, for a run that chooses no strategy; its path on the workers, from
#                             ~/xlatrain/code: keep it in the folder that setup.sh gets as --source
#   --resume-since SECONDS    continue from the newest checkpoint saved since that time (seconds since 1970), if there is one
#   --detach                  do not show what it prints (logs.sh does)
#   --name, --zone, --project, --dry-run   as for create.sh

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

opt_env='' opt_plan='' opt_resume_since='' opt_detach=off
parse "$@"
check_place
[[ ${#rest[@]} -gt 0 ]] || refuse 'say what to run, for example -- -m torch_compat train.py --lr 3e-4'
check_if_given plan '[A-Za-z0-9_./~-]+' plan/plan.json
check_if_given resume-since '[1-9][0-9]{8,10}' 1767225600
check_if_given env '[A-Za-z_][A-Za-z0-9_]*=[^,]*(,[A-Za-z_][A-Za-z0-9_]*=[^,]*)*' JAX_LOG_COMPILES=1
needs_gcloud

variables=(PYTHONUNBUFFERED=1)
[[ -z $opt_resume_since ]] || variables+=("XLATRAIN_RESUME_SINCE=$opt_resume_since")
[[ -z $opt_plan ]] || variables+=("XLATRAIN_PLAN=$opt_plan")
if [[ -n $opt_env ]]; then
  IFS=, read -ra given <<<"$opt_env"
  variables+=("${given[@]}")
fi
# shellcheck disable=SC2088,SC2016 # the worker's home and variables
program="$(quoted env "${variables[@]}") \"\$HOME/$VENV/bin/python\" $(quoted "${rest[@]}")"
# The status is written whole, by a rename; an interrupt ends the program, and the shell then writes its status.
session="trap : INT; cd \"\$HOME/$CODE\"; $program; echo \$? > \"\$HOME/$RUN/ending\"; mv \"\$HOME/$RUN/ending\" \"\$HOME/$RUN/status\""
# A session of its own: it outlives the connection, and stop.sh ends all of it. What a shell starts in the background ignores
# SIGINT, and so would Python.
leader='import os, signal, sys
os.setsid()
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp("bash", ["bash", "-c", sys.argv[1]])'
start="${LIVING}mkdir -p $RUN $CODE && cd $RUN"
# shellcheck disable=SC2016 # expanded on the worker
start+=' && if [ -s pid ] && [ ! -s status ] && living -p "$(cat pid)" -s "$(cat pid)"; then'
# shellcheck disable=SC2016 # expanded on the worker
start+=' echo "$(hostname): a run is going on; end it with stop.sh" >&2; exit 3; fi'
start+=" && rm -f status && { python3 -c $(quoted "$leader" "$session") > log 2>&1 < /dev/null & echo \$! > pid; }"
on_workers all "$start"
if [[ $opt_detach == off ]]; then
  same_place
  "$HERE/logs.sh" "${passed[@]}"
fi
