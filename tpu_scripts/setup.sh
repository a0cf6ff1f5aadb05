#!/usr/bin/env bash
# Copy this repository, and your script's folder, to every worker, and install xlatrain with jax[tpu] there.
#
#   setup.sh --name my-tpu --zone us-west4-a --source ~/my-experiment
#
#   --source FOLDER           a folder of yours: lands in ~/xlatrain/code on the workers, where launch.sh starts. Of a git
#                             repository what git tracks, as it is in the working tree; else everything in it. Default: nothing
#   --requirements FILE       a requirements file in that folder to install too
#   --python VERSION          default 3.12; the system's own Python may be older than xlatrain needs, so uv brings one
#   --name, --zone, --project, --dry-run   as for create.sh

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

opt_source='' opt_requirements='' opt_python=3.12
parse "$@"
[[ ${#rest[@]} -eq 0 ]] || refuse "it runs no command of yours; see launch.sh"
check_place
check python '3\.1[1-3]' 3.12
[[ -z $opt_source || -d $opt_source ]] || refuse "--source $opt_source is no folder"
[[ -z $opt_requirements || -n $opt_source ]] || refuse '--requirements is a file in the folder of --source, which is not given'
[[ -z $opt_requirements || -f $opt_source/$opt_requirements ]] || refuse "there is no file $opt_source/$opt_requirements"
check_if_given requirements '[A-Za-z0-9_./-]+' requirements.txt
needs_gcloud

# pack FOLDER ARCHIVE
pack() {
  if git -C "$1" rev-parse --git-dir >/dev/null 2>&1; then
    [[ $opt_dry_run == on ]] && {
      printf 'git -C %s ls-files -z | tar -C %s --null -T - -czf %s\n' "$(quoted "$1")" "$(quoted "$1")" "$(quoted "$2")"
      return
    }
    # Of what git tracks, what is there: a file may be deleted in the working tree.
    (cd "$1" && git ls-files -z | while IFS= read -r -d '' file; do [[ ! -e $file && ! -L $file ]] || printf '%s\0' "$file"; done |
      tar --null -T - -czf "$2")
  else
    run tar -C "$1" -czf "$2" .
  fi
}

if [[ $opt_dry_run == on ]]; then archives=/tmp/xlatrain-setup; else
  archives=$(mktemp -d)
  trap 'rm -rf "$archives"' EXIT
fi
files=("$archives/xlatrain.tar.gz")
pack "$HERE/.." "$archives/xlatrain.tar.gz"
if [[ -n $opt_source ]]; then
  pack "$opt_source" "$archives/code.tar.gz"
  files+=("$archives/code.tar.gz")
fi
run gcloud compute tpus tpu-vm scp "${files[@]}" "$opt_name:" "${place[@]}" --worker=all

unpack="set -e; mkdir -p $CODE xlatrain/source; tar -xzf xlatrain.tar.gz -C xlatrain/source"
[[ -z $opt_source ]] || unpack+="; tar -xzf code.tar.gz -C $CODE"
install="python3 -m pip install -q --user uv"
# Python, then the packages; the CPU build of torch, as the chips are JAX's.
install+=" && python3 -m uv venv -q --allow-existing --python $opt_python $VENV"
install+=" && python3 -m uv pip install -q --torch-backend=cpu --python $VENV './xlatrain/source[tpu]'"
[[ -z $opt_requirements ]] || install+=" -r '$CODE/$opt_requirements'"
on_workers all "$unpack && $install && $VENV/bin/python -c 'import xlatrain, jax; print(xlatrain.__version__, jax.__version__)'"
