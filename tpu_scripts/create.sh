#!/usr/bin/env bash
# Ask for a TPU through a queued resource, and wait until it is there.
#
#   create.sh --name my-tpu --zone us-west4-a --accelerator-type v5litepod-16 --spot
#
#   --name NAME               the TPU's name; its queued resource has the same
#   --zone ZONE               where
#   --accelerator-type TYPE   v5litepod-16, v6e-8, v5p-32, v4-16, ... (tpu7x: on GKE only, see gke.sh)
#   --runtime-version VERSION the TPU software; default: the one for the type
#   --spot | --reserved       cheap and preemptible | from your reservation; default: on demand
#   --valid-for DURATION      give up when there is none within that time, for example 6h; default: wait for ever
#   --network NAME, --subnetwork NAME, --service-account EMAIL, --data-disk SOURCE (of an existing disk, read-only)
#   --internal-ips            no external addresses
#   --no-wait                 return when the request is accepted
#   --project PROJECT         default: the one gcloud is set to
#   --dry-run                 print the commands, run none

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

opt_accelerator_type='' opt_runtime_version='' opt_valid_for='' opt_network='' opt_subnetwork='' opt_service_account=''
opt_data_disk='' opt_spot=off opt_reserved=off opt_internal_ips=off opt_no_wait=off
parse "$@"
[[ ${#rest[@]} -eq 0 ]] || refuse "it runs no command of yours; see launch.sh"
check_place
[[ $opt_accelerator_type != tpu7x* ]] ||
  refuse "--accelerator-type $opt_accelerator_type: Google's Cloud TPU API does not offer tpu7x; run it on GKE, see gke.sh"
check accelerator-type '(v2|v3|v4|v5p|v5litepod|v6e)-[1-9][0-9]{0,4}' v5litepod-16
check_if_given runtime-version '[a-z0-9][-a-z0-9.]{0,98}' v2-alpha-tpuv5-lite
check_if_given valid-for '[1-9][0-9]*[smhd]' 6h
check_if_given network '[-a-z0-9./]+' default
check_if_given subnetwork '[-a-z0-9./]+' default
check_if_given service-account '[-a-z0-9]+@[-a-z0-9.]+' trainer@my-project.iam.gserviceaccount.com
check_if_given data-disk 'projects/[-a-z0-9.:]+/zones/[-a-z0-9]+/disks/[-a-z0-9]+' projects/my-project/zones/us-west4-a/disks/data
[[ $opt_spot == off || $opt_reserved == off ]] || refuse 'choose one of --spot and --reserved'
needs_gcloud

if [[ -z $opt_runtime_version ]]; then
  case $opt_accelerator_type in
    v5litepod-*) opt_runtime_version=v2-alpha-tpuv5-lite ;;
    v5p-*) opt_runtime_version=v2-alpha-tpuv5 ;;
    v6e-*) opt_runtime_version=v2-alpha-tpuv6e ;;
    *) opt_runtime_version=tpu-ubuntu2204-base ;;
  esac
fi
request=("--node-id=$opt_name" "--accelerator-type=$opt_accelerator_type" "--runtime-version=$opt_runtime_version")
[[ $opt_spot == off ]] || request+=(--spot)
[[ $opt_reserved == off ]] || request+=(--reserved)
[[ $opt_internal_ips == off ]] || request+=(--internal-ips)
[[ -z $opt_valid_for ]] || request+=("--valid-until-duration=$opt_valid_for")
[[ -z $opt_network ]] || request+=("--network=$opt_network")
[[ -z $opt_subnetwork ]] || request+=("--subnetwork=$opt_subnetwork")
[[ -z $opt_service_account ]] || request+=("--service-account=$opt_service_account")
[[ -z $opt_data_disk ]] || request+=("--data-disk=source=$opt_data_disk,mode=read-only")

run gcloud compute tpus queued-resources create "$opt_name" ${place[@]+"${place[@]}"} "${request[@]}"
if [[ $opt_no_wait == off ]]; then
  same_place
  "$HERE/status.sh" "${passed[@]}" --wait-until-active
fi
