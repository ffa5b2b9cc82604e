# Prints what pybuild/facts/host.py reads of a machine: `>NAME` and the lines of each file and answer, `|` before each line.
# For any POSIX shell; files are read with nothing else. Run as `sh facts.sh [QUESTION]`: without one, everything.
# $PYBUILD_ROOT is for tests: files are read below it, programs' answers from the recorded ones there.

LC_ALL=C
export LC_ALL
# Programs that a shell without a login doesn't find; the user's own PATH comes first.
own_path=$PATH
PATH=$PATH:/usr/sbin:/sbin:/usr/lib/wsl/lib:/run/current-system/sw/bin:/nix/var/nix/profiles/default/bin
PATH=$PATH:${HOME:-/nonexistent}/.nix-profile/bin:/usr/local/cuda/bin
export PATH

lines() {
  while IFS= read -r line || [ -n "$line" ]; do
    printf '|%s\n' "$line"
  done
}

file() {
  if [ -f "$ROOT$1" ] && [ -r "$ROOT$1" ]; then
    printf '>%s\n' "$1"
    lines 2>/dev/null <"$ROOT$1"
  fi
}

# The cgroup folder $1, and all above it up to $2.
upwards() {
  folder=$1
  while :; do
    for name in memory.max memory.high memory.current memory.limit_in_bytes memory.usage_in_bytes memory.stat \
      cpu.max cpu.cfs_quota_us cpu.cfs_period_us; do
      file "$folder/$name"
    done
    case $folder in
    "$2" | "" | /) return ;;
    esac
    folder=${folder%/*}
  done
}

# Each cgroup of this shell in each mount of a cgroup hierarchy: more than cgroup.py takes, and never less.
cgroups() {
  printf '>/proc/self/mountinfo\n'
  while IFS= read -r line; do
    case $line in
    *" - cgroup"*) printf '|%s\n' "$line" ;;
    esac
  done <"$ROOT/proc/self/mountinfo"
  while read -r _ _ _ root point rest; do
    case $rest in
    *"- cgroup"*) ;;
    *) continue ;;
    esac
    while IFS=: read -r _ _ path; do
      case $path in
      *..*) path=/ ;;
      "$root" | "$root"/*) path=${path#"$root"} ;;
      esac
      case $path in
      /?*) [ -d "$ROOT$point$path" ] && upwards "$point$path" "$point" ;;
      esac
    done <"$ROOT/proc/self/cgroup"
    upwards "$point" "$point"
  done <"$ROOT/proc/self/mountinfo"
}

machine() {
  uname -m
}

# name, compute capability, driver; without the capability where nvidia-smi is too old for it.
gpus() {
  nvidia-smi --query-gpu=name,compute_cap,driver_version --format=csv,noheader 2>/dev/null ||
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
}

# Of each CUDA toolkit: PATH=the folder, REAL=it without links, then what nvcc prints. NVCC=the one on PATH.
toolkits() {
  # What torch and CMake would find.
  if nvcc=$(PATH=$own_path && command -v nvcc); then
    printf 'NVCC=%s\n' "$nvcc"
    nvcc=${nvcc%/bin/nvcc}
  fi
  seen=:
  for folder in "${CUDA_HOME:-}" "${CUDA_PATH:-}" "$nvcc" /usr/local/cuda-* /usr/local/cuda /opt/cuda-* /opt/cuda \
    /usr/lib/cuda; do
    folder=${folder%/}
    # nvcc may be a script or a link that stands beside no toolkit (/usr/local/bin/nvcc); conda has the headers in targets.
    for header in "$folder"/include/cuda_runtime.h "$folder"/targets/*/include/cuda_runtime.h; do
      [ -f "$header" ] && break
    done
    if [ -x "$folder/bin/nvcc" ] && [ -f "$header" ] && real=$(cd -P "$folder" && pwd -P); then
      printf 'PATH=%s\nREAL=%s\n' "$folder" "$real"
      case $seen in
      *":$real:"*) ;;
      *) "$folder/bin/nvcc" --version ;;
      esac
      seen=$seen$real:
    fi
  done
}

python() {
  for folder in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}"; do
    if [ -n "$folder" ] && [ -x "$folder/bin/python" ]; then
      found=$folder/bin/python
      break
    fi
    found=$(command -v python3) || found=
  done
  if [ -n "$found" ]; then
    "$found" -c '
import importlib.util, os, sys
print(sys.executable)
print(".".join(map(str, sys.version_info[:3])))
sys.path = [path for path in sys.path if path]
spec = importlib.util.find_spec("torch")
if spec and spec.origin:
    with open(os.path.join(os.path.dirname(spec.origin), "version.py")) as file:
        print(file.read())
'
  fi
}

nix() {
  command nix --version &&
    { command nix --extra-experimental-features nix-command config show 2>/dev/null ||
      command nix --extra-experimental-features nix-command show-config; }
  [ -S /nix/var/nix/daemon-socket/socket ] && printf 'daemon-socket = true\n'
}

disk() {
  folder=/nix/store
  while ! [ -d "$folder" ]; do
    folder=${folder%/*}
    folder=${folder:-/}
  done
  printf '%s\n' "$folder"
  df -Pk "$folder"
}

answer() {
  if [ -n "$ROOT" ]; then
    [ -f "$ROOT/answers/$1" ] || return
    printf '>?%s\n' "$1"
    lines <"$ROOT/answers/$1"
  else
    printf '>?%s\n' "$1"
    "$1" 2>/dev/null </dev/null | lines
  fi
}

ROOT=${PYBUILD_ROOT:-}
if [ $# -gt 0 ]; then
  answer "$1"
  exit
fi
for path in /proc/meminfo /proc/version /proc/pressure/memory /proc/sys/vm/overcommit_memory \
  /proc/sys/kernel/hostname /proc/sys/kernel/osrelease /etc/os-release /sys/devices/system/cpu/online \
  /proc/self/status /proc/self/cgroup /proc/driver/nvidia/version; do
  file "$path"
done
for path in "$ROOT"/proc/driver/nvidia/gpus/*/information; do
  file "${path#"$ROOT"}"
done
for path in "$ROOT"/sys/bus/virtio/drivers/virtio_mem/virtio* "$ROOT"/sys/bus/vmbus/drivers/hv_balloon/*-*; do
  if [ -e "$path" ]; then
    printf '>%s\n' "${path#"$ROOT"}"
  fi
done
cgroups
for question in machine gpus toolkits python nix disk; do
  answer "$question"
done
printf '>?end\n'
