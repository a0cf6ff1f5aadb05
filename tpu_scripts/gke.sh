#!/usr/bin/env bash
# Run on TPU slices of GKE, as a JobSet: print or submit its manifest, show its logs, delete it.
#
#   gke.sh --name my-run --image REGISTRY/my-image:1 --accelerator v5e --topology 4x4 -- -m torch_compat train.py
#   gke.sh --name my-run --logs
#   gke.sh --name my-run --delete
#
# The cluster needs the JobSet controller and a TPU node pool of that accelerator and topology. Checkpoints must go to storage that
# outlives a pod. With xpk instead, see docs/pods.md.
#
#   --image IMAGE             with your script and xlatrain in it (see Dockerfile)
#   --accelerator NAME        v4, v5e, v5p, v6e or tpu7x
#   --topology SHAPE          chips along each axis of a slice, for example 4x4
#   --slices N                default 1
#   --chips-per-host N        default 4, or all of a smaller slice
#   --max-restarts N          default 3, from the newest checkpoint
#   --namespace NAME          default: the one kubectl is set to
#   --python PATH             a Python here with xlatrain, which makes the manifest; default python3
#   --logs | --delete         of a run that was submitted
#   --dry-run                 print the manifest and the command, submit nothing

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

opt_image='' opt_accelerator='' opt_topology='' opt_slices=1 opt_chips_per_host='' opt_max_restarts=3 opt_namespace=''
opt_python=python3 opt_logs=off opt_delete=off
parse "$@"
check name '[a-z]([-a-z0-9]{0,38}[a-z0-9])?' my-run
check_if_given namespace '[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?' default
[[ -z $opt_zone && -z $opt_project ]] || refuse '--zone and --project are those of the cluster that kubectl is set to'
kubectl=(kubectl)
[[ -z $opt_namespace ]] || kubectl+=("--namespace=$opt_namespace")
needs kubectl 'install it and run: gcloud container clusters get-credentials CLUSTER'

if [[ $opt_logs == on || $opt_delete == on ]]; then
  [[ $opt_logs == off || $opt_delete == off ]] || refuse 'choose one of --logs and --delete'
  [[ ${#rest[@]} -eq 0 && -z $opt_image ]] || refuse '--logs and --delete start nothing'
  if [[ $opt_logs == on ]]; then
    run "${kubectl[@]}" logs --follow --prefix --max-log-requests=1000 "--selector=jobset.sigs.k8s.io/jobset-name=$opt_name"
  else
    run "${kubectl[@]}" delete jobset "$opt_name"
  fi
  exit
fi

[[ ${#rest[@]} -gt 0 ]] || refuse 'say what to run, for example -- -m torch_compat train.py --lr 3e-4'
check image '[A-Za-z0-9][A-Za-z0-9._/:@-]*' us-docker.pkg.dev/my-project/images/train:1
check accelerator 'v4|v5e|v5p|v6e|tpu7x' v5e
check topology '[1-9][0-9]*x[1-9][0-9]*(x[1-9][0-9]*)?' 4x4
check slices '[1-9][0-9]{0,3}' 1
check max-restarts "$NUMBER" 3
check_if_given chips-per-host '[1-9]' 4
options=(--print jobset --name "$opt_name" --image "$opt_image" --accelerator "$opt_accelerator" --topology "$opt_topology")
options+=(--slices "$opt_slices" --max-restarts "$opt_max_restarts")
[[ -z $opt_chips_per_host ]] || options+=(--chips-per-host "$opt_chips_per_host")
manifest=$(from_checkout "$opt_python" -m xlatrain.cli launch "${options[@]}" "${rest[@]}")
[[ $opt_dry_run == off ]] || printf '%s\n' "$manifest"
run "${kubectl[@]}" apply --filename=- <<<"$manifest"
