# shellcheck shell=bash disable=SC2034 # the scripts use what is set here
# What the scripts of this folder share: options, checks, and running or only printing a command. Sourced, not run; Bash 3.2 or later.
#
# A script declares its options before it calls `parse`: opt_zone='' takes a value, opt_spot=off is a switch.

set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
SELF=${0##*/}

# On each worker, below its home: the code, its environment, and the state of the run.
CODE=xlatrain/code
VENV=xlatrain/venv
RUN=xlatrain/run

# For a shell on a worker: living -p PID -s SESSION, either or both. What has ended and only waits to be asked for its status does
# not live: `kill -0` finds it, for ever in a container whose first process never asks.
# shellcheck disable=SC2016 # expanded on the worker
LIVING='living() { ps -o stat= "$@" | grep -q "^[^Z]"; }
'

# Options of every script.
opt_name='' opt_zone='' opt_project='' opt_dry_run=off

say() { printf '%s: %s\n' "$SELF" "$*" >&2; }

# The command line was wrong: 2, as for other programs.
refuse() {
  say "$*; see $SELF --help"
  exit 2
}

# The comment at the top of the script.
usage() { sed -n '2,/^$/{s/^# \{0,1\}//;p;}' "$HERE/$SELF"; }

# parse "$@": sets the declared options. What follows `--` is left in the array `rest`.
parse() {
  rest=()
  local name variable
  while [[ $# -gt 0 ]]; do
    case $1 in
      -h | --help)
        usage
        exit 0
        ;;
      --)
        shift
        rest=(${1+"$@"})
        return
        ;;
      --[a-z]*) ;;
      *) refuse "unexpected argument '$1' (a command to run goes behind --)" ;;
    esac
    name=${1#--}
    name=${name%%=*}
    variable=opt_${name//-/_}
    [[ $name =~ ^[a-z-]+$ && -n ${!variable+set} ]] || refuse "there is no option --$name"
    if [[ ${!variable} == off || ${!variable} == on ]]; then
      [[ $1 != *=* ]] || refuse "--$name takes no value"
      printf -v "$variable" on
    elif [[ $1 == *=* ]]; then
      printf -v "$variable" %s "${1#*=}"
    else
      [[ $# -gt 1 && $2 != --* ]] || refuse "--$name needs a value"
      printf -v "$variable" %s "$2"
      shift
    fi
    shift
  done
}

# check NAME PATTERN EXAMPLE: the option is given, and looks as it should.
check() {
  local variable=opt_${1//-/_}
  [[ -n ${!variable} ]] || refuse "--$1 is required, for example --$1 $3"
  [[ ${!variable} =~ ^($2)$ ]] || refuse "--$1 ${!variable} is not valid; for example --$1 $3"
}

# check_if_given NAME PATTERN EXAMPLE
check_if_given() {
  local variable=opt_${1//-/_}
  [[ -z ${!variable} ]] || check "$@"
}

# Whether this folder lies in xlatrain's repository, and not in an installed package.
in_checkout() { grep -q '^name = "xlatrain"$' "$HERE/../pyproject.toml" 2>/dev/null; }

# from_checkout COMMAND: run it with the repository's packages, if this is one, so that they need not be installed here.
from_checkout() {
  if in_checkout; then PYTHONPATH="$HERE/..${PYTHONPATH:+:$PYTHONPATH}" "$@"; else "$@"; fi
}

NUMBER='0|[1-9][0-9]{0,8}'

# Where the TPU is.
check_place() {
  check name '[a-z]([-a-z0-9]{0,61}[a-z0-9])?' my-tpu
  check zone '[a-z]+-[a-z]+[0-9]+-[a-z]' us-west4-a
  check_if_given project '[a-z][-a-z0-9.:]{4,98}[a-z0-9]' my-project
  place=("--zone=$opt_zone")
  [[ -z $opt_project ]] || place+=("--project=$opt_project")
}

needs() {
  [[ $opt_dry_run == on ]] || command -v "$1" >/dev/null || {
    say "needs $1 on PATH: $2"
    exit 127
  }
}

needs_gcloud() { needs gcloud 'install the Google Cloud CLI and run: gcloud auth login'; }

# A command as one can type it.
quoted() {
  local word line=''
  for word; do
    if [[ $word =~ ^[A-Za-z0-9_./:=@%+,-]+$ ]]; then line+=" $word"; else line+=" '${word//\'/\'\\\'\'}'"; fi
  done
  printf '%s\n' "${line# }"
}

# Run a command, and say so; with --dry-run only print it.
run() {
  if [[ $opt_dry_run == on ]]; then
    quoted "$@"
  else
    printf '+ %s\n' "$(quoted "$@")" >&2
    "$@"
  fi
}

# on_workers WORKER SCRIPT: run a shell script on one worker, or on all.
on_workers() {
  run gcloud compute tpus tpu-vm ssh "$opt_name" ${place[@]+"${place[@]}"} "--worker=$1" "--command=$2"
}

# The options that name the TPU, for another script of this folder; the switch --dry-run too.
same_place() {
  passed=(--name "$opt_name" --zone "$opt_zone")
  [[ -z $opt_project ]] || passed+=(--project "$opt_project")
  [[ $opt_dry_run == off ]] || passed+=(--dry-run)
}
