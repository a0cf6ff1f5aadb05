#!/usr/bin/env bash
# Delete the TPU and its queued resource. What is on its boot disk is lost.
#
#   delete.sh --name my-tpu --zone us-west4-a
#
#   --yes                     do not ask
#   --name, --zone, --project, --dry-run   as for create.sh

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

opt_yes=off
parse "$@"
[[ ${#rest[@]} -eq 0 ]] || refuse "it runs no command of yours; see launch.sh"
check_place
needs_gcloud
if [[ $opt_yes == off && $opt_dry_run == off ]]; then
  printf 'Delete the TPU %s in %s, and what is on its disk? [y/N] ' "$opt_name" "$opt_zone" >&2
  read -r answer || answer=''
  [[ $answer == y || $answer == yes ]] || {
    say 'nothing was deleted'
    exit 1
  }
fi
run gcloud compute tpus queued-resources delete "$opt_name" "${place[@]}" --force --quiet
