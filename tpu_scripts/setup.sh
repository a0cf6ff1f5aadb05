#!/usr/bin/env bash
# Copy xlatrain, and your script's folder, to every worker, and install both with jax[tpu] there. In a checkout of xlatrain its
# packages are copied; where it was installed from a wheel, give that wheel.
#
#   setup.sh --name my-tpu --zone us-west4-a --source ~/my-experiment
#
#   --source FOLDER           a folder of yours: lands in ~/xlatrain/code on the workers, where launch.sh starts. Of a git
#                             repository what git tracks, as it is in the working tree; else everything in it. Default: nothing
#   --wheel FILE              of xlatrain, instead of a checkout's packages
#   --requirements FILE       a requirements file in that folder to install too
#   --python VERSION          default 3.12; the system's own Python may be older than xlatrain needs, so uv brings one
#   --name, --zone, --project, --dry-run   as for create.sh

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

PARTS=(pyproject.toml setup.py README.md xlatrain torch_compat tpu_scripts examples)
opt_source='' opt_wheel='' opt_requirements='' opt_python=3.12
parse "$@"
[[ ${#rest[@]} -eq 0 ]] || refuse "it runs no command of yours; see launch.sh"
check_place
check python '3\.1[1-3]' 3.12
[[ -z $opt_source || -d $opt_source ]] || refuse "--source $opt_source is no folder"
[[ -z $opt_wheel || -f $opt_wheel ]] || refuse "there is no file $opt_wheel"
[[ -z $opt_wheel || ${opt_wheel##*/} =~ ^xlatrain-[A-Za-z0-9_.+-]+\.whl$ ]] || refuse "--wheel $opt_wheel is no wheel of xlatrain"
[[ -n $opt_wheel ]] || in_checkout ||
  refuse "$HERE is not in a checkout of xlatrain; give its wheel: --wheel xlatrain-VERSION-py3-none-any.whl"
[[ -z $opt_requirements || -n $opt_source ]] || refuse '--requirements is a file in the folder of --source, which is not given'
[[ -z $opt_requirements || -f $opt_source/$opt_requirements ]] || refuse "there is no file $opt_source/$opt_requirements"
check_if_given requirements '[A-Za-z0-9_./-]+' requirements.txt
needs_gcloud

# pack FOLDER ARCHIVE: what git tracks of it; without git all of it.
pack() {
  if git -C "$1" rev-parse --git-dir >/dev/null 2>&1; then
    [[ $opt_dry_run == on ]] && {
      printf 'git -C %s ls-files -z | tar -C %s --null -T - -czf %s\n' "$(quoted "$1")" "$(quoted "$1")" "$(quoted "$2")"
      return
    }
    [[ -n $(git -C "$1" ls-files | head -n 1) ]] || refuse "git tracks no file in $1: git add yours, or take another folder"
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
if [[ -n $opt_wheel ]]; then
  files=("$opt_wheel")
  package="./${opt_wheel##*/}[tpu]"
else
  # What a wheel is made of and no more: a checkout has environments and results in it.
  run tar -C "$HERE/.." --exclude=__pycache__ -czf "$archives/xlatrain.tar.gz" "${PARTS[@]}"
  files=("$archives/xlatrain.tar.gz")
  package='./xlatrain/source[tpu]'
fi
if [[ -n $opt_source ]]; then
  pack "$opt_source" "$archives/code.tar.gz"
  files+=("$archives/code.tar.gz")
fi
run gcloud compute tpus tpu-vm scp "${files[@]}" "$opt_name:" "${place[@]}" --worker=all

unpack="set -e; mkdir -p $CODE xlatrain/source"
[[ -n $opt_wheel ]] || unpack+="; tar -xzf xlatrain.tar.gz -C xlatrain/source"
[[ -z $opt_source ]] || unpack+="; tar -xzf code.tar.gz -C $CODE"
install="python3 -m pip install -q --user uv"
# Python, then the packages; the CPU build of torch, as the chips are JAX's.
install+=" && python3 -m uv venv -q --allow-existing --python $opt_python $VENV"
install+=" && python3 -m uv pip install -q --torch-backend=cpu --python $VENV '$package'"
[[ -z $opt_requirements ]] || install+=" -r '$CODE/$opt_requirements'"
on_workers all "$unpack && $install && $VENV/bin/python -c 'import xlatrain, jax; print(xlatrain.__version__, jax.__version__)'"
