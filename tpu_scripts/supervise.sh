#!/usr/bin/env bash
# From nothing to a finished run: create the TPU, set it up, launch, and do so again after a preemption or a failure, from the newest
# checkpoint. Leave it running on a small machine of yours (or in tmux).
#
#   supervise.sh --name my-tpu --zone us-west4-a --accelerator-type v5litepod-16 --spot --source . -- -m torch_compat train.py
#
# Checkpoints must outlive the TPU: let the script write to a mounted bucket or disk (--mount), not to the boot disk.
#
#   --max-preemptions N       default 100
#   --max-restarts N          after failures of the run itself; default 3
#   --resume-since SECONDS    checkpoints saved since then are this run's; default: now
#   --mount COMMAND           a shell command run on every worker after set-up, for example
#                             'mkdir -p ~/runs && gcsfuse my-bucket ~/runs'
#   --delete-at-end           delete the TPU when the run has ended
#   --poll-seconds N          how often to look; default 30
#   --accelerator-type, --runtime-version, --spot, --reserved, --network, --subnetwork, --service-account, --internal-ips
#                             as for create.sh
#   --source, --wheel, --requirements, --python   as for setup.sh
#   --env, --plan             as for launch.sh
#   --name, --zone, --project as for create.sh
#   --dry-run                 print the commands of a run without preemptions

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

opt_max_preemptions=100 opt_max_restarts=3 opt_resume_since='' opt_mount='' opt_delete_at_end=off opt_poll_seconds=30
# shellcheck disable=SC2034 # by name, in forwarded
opt_accelerator_type='' opt_runtime_version='' opt_spot=off opt_reserved=off opt_network='' opt_subnetwork=''
# shellcheck disable=SC2034 # by name, in forwarded
opt_service_account='' opt_internal_ips=off opt_source='' opt_wheel='' opt_requirements='' opt_python=3.12 opt_env='' opt_plan=''
parse "$@"
check_place
check max-preemptions "$NUMBER" 100
check max-restarts "$NUMBER" 3
check poll-seconds "$NUMBER" 30
check_if_given resume-since '[1-9][0-9]{8,10}' 1767225600
[[ ${#rest[@]} -gt 0 ]] || refuse 'say what to run, for example -- -m torch_compat train.py --lr 3e-4'
needs_gcloud
same_place
[[ -n $opt_resume_since ]] || opt_resume_since=$(date +%s)

# forwarded NAME...: the given ones of these options, in the array `options`.
forwarded() {
  options=("${passed[@]}")
  local name variable
  for name; do
    variable=opt_${name//-/_}
    case ${!variable} in
      '' | off) ;;
      on) options+=("--$name") ;;
      *) options+=("--$name=${!variable}") ;;
    esac
  done
}

# These are used as conditions, where `set -e` has no effect: each is a chain of &&.
create() {
  forwarded accelerator-type runtime-version spot reserved network subnetwork service-account internal-ips &&
    "$HERE/create.sh" "${options[@]}" --no-wait
}
setup() {
  forwarded source wheel requirements python &&
    "$HERE/setup.sh" "${options[@]}" &&
    { [[ -z $opt_mount ]] || on_workers all "$opt_mount"; }
}
start() {
  forwarded env plan &&
    "$HERE/launch.sh" "${options[@]}" --resume-since "$opt_resume_since" --detach -- "${rest[@]}"
}
stop() { "$HERE/stop.sh" "${passed[@]}"; }
delete() { "$HERE/delete.sh" "${passed[@]}" --yes; }
finish() {
  [[ $opt_delete_at_end == off ]] || delete
  exit "$1"
}

if [[ $opt_dry_run == on ]]; then
  create
  "$HERE/status.sh" "${passed[@]}" --wait-until-active
  setup
  start
  "$HERE/status.sh" "${passed[@]}"
  finish 0
fi

preemptions=0 restarts=0 failures=0 waited=''

give_up() {
  say "$*; giving up"
  finish 1
}

# trying COMMAND: what fails now and then (a network, a TPU that has just gone) is done again after the next look.
trying() {
  "$@" || {
    ((++failures < 20)) || give_up "'$1' and what came before it failed $failures times in a row"
    say "'$1' failed; looking again"
  }
}

look() {
  local report state
  report=$("$HERE/status.sh" "${passed[@]}") || return
  state=${report%%$'\n'*}
  case $state in
    ABSENT) trying create ;;
    SUSPENDED | FAILED) again "$state" ;;
    ACTIVE) look_at_run "$report" ;;
    *) [[ $waited == "$state" ]] || say "$opt_name is $state; waiting" ;;
  esac
  waited=$state
}

again() {
  ((++preemptions <= opt_max_preemptions)) || give_up "$opt_name is $1, for the ${preemptions}th time"
  say "$opt_name is $1: asking for another (number $preemptions)"
  trying delete # and the next look finds it absent
}

look_at_run() {
  local failed
  failed=$(grep -E ' lost$| ended [1-9][0-9]*$' <<<"$1" | tr '\n' ';') || failed=''
  if [[ -n $failed ]]; then
    say "the run failed: $failed"
    ((++restarts <= opt_max_restarts)) || give_up "it was started again $opt_max_restarts times"
    trying relaunch
  elif grep -q ' none$' <<<"$1"; then
    trying begin
  elif grep -q ' running$' <<<"$1"; then
    failures=0
  elif grep -q ' ended 0$' <<<"$1"; then
    say 'the run has ended well'
    finish 0
  fi
}
relaunch() { stop && start; }
begin() { setup && relaunch; }

# Each look decides by what is there, not by what was done before: this script, too, can be ended and started again.
while true; do
  trying look
  sleep "$opt_poll_seconds"
done
