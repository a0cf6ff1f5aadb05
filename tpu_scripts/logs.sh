#!/usr/bin/env bash
# Show what the run prints, from its beginning, until it ends; each line with its worker in front. Ctrl-C ends the showing only.
#
#   logs.sh --name my-tpu --zone us-west4-a --worker 0
#
#   --worker N|all            default all
#   --lines N                 begin with the last N lines; default: all there are
#   --name, --zone, --project, --dry-run   as for create.sh
#
# The exit status is 0 if the run on every worker that is shown ended with 0.

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

opt_worker=all opt_lines=''
parse "$@"
[[ ${#rest[@]} -eq 0 ]] || refuse "it runs no command of yours; see launch.sh"
check_place
check worker "all|$NUMBER" all
check_if_given lines "$NUMBER" 100
needs_gcloud

from=${opt_lines:-+1}
# shellcheck disable=SC2016 # expanded on the worker
show=$LIVING'cd '$RUN' && [ -s pid ] || { echo "$(hostname): nothing was launched here" >&2; exit 3; }
pid=$(cat pid)
while living -p $$ && living -p "$pid"; do sleep 0.5; done &
tail -n '$from' --pid=$! -F log 2>/dev/null | sed -u "s/^/[$(hostname)] /"
if [ -s status ]; then exit "$(cat status)"; fi
echo "$(hostname): the run ended without a status: the machine or its session was ended" >&2; exit 4'
on_workers "$opt_worker" "$show"
