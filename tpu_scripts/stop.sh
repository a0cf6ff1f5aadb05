#!/usr/bin/env bash
# End the run on every worker: SIGINT, as Ctrl-C, and SIGKILL after a while. The TPU stays.
#
#   stop.sh --name my-tpu --zone us-west4-a
#
#   --grace-seconds N         from asking until killing; default 60
#   --name, --zone, --project, --dry-run   as for create.sh

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

opt_grace_seconds=60
parse "$@"
[[ ${#rest[@]} -eq 0 ]] || refuse "it runs no command of yours; see launch.sh"
check_place
check grace-seconds "$NUMBER" 60
needs_gcloud

# The session that launch.sh started, by its id: nothing else on the worker is touched.
# shellcheck disable=SC2016 # expanded on the worker
stop=$LIVING'cd '$RUN' 2>/dev/null && [ -s pid ] || exit 0
pid=$(cat pid); living -p "$pid" -s "$pid" || exit 0
pkill -INT -s "$pid"
for _ in $(seq '$((10 * opt_grace_seconds))'); do living -p "$pid" -s "$pid" || break; sleep 0.1; done
pkill -KILL -s "$pid"
[ -s status ] || echo 137 > status'
on_workers all "$stop"
