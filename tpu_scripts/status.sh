#!/usr/bin/env bash
# Say how the TPU is, and how the run on it is.
#
#   status.sh --name my-tpu --zone us-west4-a
#
# Prints the state of the queued resource (ABSENT, WAITING_FOR_RESOURCES, ACTIVE, SUSPENDED, FAILED, ...), and where it is ACTIVE
# one line for each worker: "HOST none", "HOST running", "HOST lost" (it ended without a status) or "HOST ended STATUS".
#
#   --wait-until-active       wait for the TPU, and fail if it cannot come; says nothing about the run
#   --poll-seconds N          how often to look while waiting; default 30
#   --name, --zone, --project, --dry-run   as for create.sh

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

opt_wait_until_active=off opt_poll_seconds=30
parse "$@"
[[ ${#rest[@]} -eq 0 ]] || refuse "it runs no command of yours; see launch.sh"
check_place
check poll-seconds "$NUMBER" 30
needs_gcloud

describe=(gcloud compute tpus queued-resources describe "$opt_name" "${place[@]}" '--format=value(state.state)')

# Only an answer "not found" means that there is none: a network error must not look like a lost TPU.
state() {
  local answer
  if answer=$("${describe[@]}" 2>&1); then
    printf '%s\n' "${answer##*$'\n'}"
  elif [[ $answer == *NOT_FOUND* || $answer == *'not found'* ]]; then
    printf 'ABSENT\n'
  else
    say "$answer"
    return 1
  fi
}

# Whether it lives is asked first: it writes its status before it ends.
# shellcheck disable=SC2016 # expanded on the worker
report=$LIVING'cd '$RUN' 2>/dev/null || { echo "$(hostname) none"; exit 0; }
if [ -s pid ] && living -p "$(cat pid)"; then now=running; else now=lost; fi
if [ -s status ]; then echo "$(hostname) ended $(cat status)"
elif [ -s pid ]; then echo "$(hostname) $now"
else echo "$(hostname) none"; fi'

if [[ $opt_dry_run == on ]]; then
  run "${describe[@]}"
  [[ $opt_wait_until_active == on ]] || on_workers all "$report"
  exit 0
fi
said=''
while now=$(state) || exit 1; [[ $opt_wait_until_active == on && $now != ACTIVE ]]; do
  case $now in
    ABSENT | FAILED | SUSPENDING | SUSPENDED | DELETING)
      say "$opt_name is $now and will not become active; ask again with create.sh (after delete.sh, unless it is absent)"
      exit 1
      ;;
  esac
  [[ $now == "$said" ]] || say "$opt_name is $now; waiting"
  said=$now
  sleep "$opt_poll_seconds"
done
printf '%s\n' "$now"
[[ $opt_wait_until_active == on || $now != ACTIVE ]] || on_workers all "$report" 2>/dev/null
