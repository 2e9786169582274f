#!/bin/bash
#SBATCH --job-name=example
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=1
#SBATCH --output=runs/example/r1/batch.log
#SBATCH --error=runs/example/r1/batch.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR2@120

# The job example, run r1, rendered by hpcddp. To change it, change the job and render it again.
# How it went: hpcddp why r1
# sbatch reads the lines above. bash runs the lines below, on the first node of the job: they begin an attempt of the run,
# start its tasks, wait for them, and decide what happens next.
# shellcheck disable=SC2016,SC2043,SC2317  # literal text in single quotes, lists of one item, functions for traps alone

# In a local run the process id of this shell is the job id.
export HPCDDP_LOCAL_JOB_ID=$$

# hpcddp_kill_tasks DIRECTORY...: kills the tasks of these attempts and what they have started, as Slurm does at the end
# of a step.
hpcddp_kill_tasks() {
  local process

  while IFS=/ read -r _ _ process _; do
    [[ $process == "$hpcddp_tasks" || $process == "$$" ]] || kill -KILL "$process"
  done < <(grep -lszxFf <(printf 'HPCDDP_ATTEMPT_DIR=%s\n' "$@") /proc/[0-9]*/environ)
} 2>/dev/null

# The first INT or TERM makes the tasks save and end. Another one, 5 s later or more, kills them.
hpcddp_interrupted=
hpcddp_cancelled=()
hpcddp_stop() {
  hpcddp_interrupted=yes
  if [[ ! -v hpcddp_stopped ]]; then
    hpcddp_stopped=$SECONDS
    hpcddp_cancelled=(--cancelled)
    [[ -v hpcddp_tasks ]] && kill -TERM "$hpcddp_tasks"
  elif [[ -v hpcddp_tasks ]] && ((SECONDS - hpcddp_stopped >= 5)); then
    hpcddp_kill_tasks "$HPCDDP_ATTEMPT_DIR"
  fi
} 2>/dev/null
trap hpcddp_stop INT TERM

# --- Environment ------------------------------------------------------------------------------------------------------

# An exit in the lines below, even exit 0, must not look like a finished job.
hpcddp_on_exit() {
  local code=$?
  if [[ ! -v hpcddp_ready ]]; then
    echo "hpcddp: a module, an activation or environment.setup ended the script with exit code $code; no task was started" >&2
    ((code)) || code=70
  fi
  exit "$code"
}
trap hpcddp_on_exit EXIT

# hpcddp_missing PROBLEM REMEDY: prints an error message and exits with 2.
hpcddp_missing() {
  hpcddp_ready=no
  echo "hpcddp: $1 on $HOSTNAME; $2" >&2
  exit 2
}

# environment.modules. A batch shell reads no profile, so the module command may not be defined yet.
for hpcddp_file in "$MODULESHOME/init/bash" /etc/profile.d/{z00_lmod,lmod,modules}.sh; do
  command -v module >/dev/null && break
  # shellcheck source=/dev/null
  [[ -r $hpcddp_file ]] && source "$hpcddp_file"
done
command -v module >/dev/null || hpcddp_missing 'environment.modules needs the module command, which was not found' \
  'submit from a shell in which module works, or source its init file in environment.setup and load the modules there'
module load apptainer || hpcddp_missing 'environment.modules names apptainer, which cannot be loaded' \
  'correct the name (module avail lists the modules)'
hpcddp_ready=yes

# environment.env
export HF_HOME=/data/hub

# environment.pass_env: Slurm passes these variables from the shell of the submission. Their values are not written here.
for hpcddp_variable in WANDB_API_KEY; do
  [[ -v $hpcddp_variable ]] && continue
  echo "hpcddp: environment.pass_env names $hpcddp_variable, which is not set; export it before you submit the job" >&2
  exit 2
done

# environment.container. The tasks run in the container; this script does not.
type -P apptainer >/dev/null || hpcddp_missing \
  'environment.container.runtime is apptainer, which was not found' \
  'load its module in environment.modules, or write the name of the program there (apptainer, singularity)'
[[ $PWD != *[,:^]* ]] || hpcddp_missing "the directory of submission is $PWD, which apptainer cannot mount" \
  'submit from a directory without a comma, colon or ^ in its path'
# These values take precedence over those in the image.
for hpcddp_variable in HF_HOME WANDB_API_KEY; do
  export "APPTAINERENV_$hpcddp_variable=${!hpcddp_variable}"
done
[[ -e /images/pytorch.sif ]] || hpcddp_missing 'environment.container.image is /images/pytorch.sif, which was not found' \
  'put it on a file system that every node sees, or correct the path'

# --- This attempt -----------------------------------------------------------------------------------------------------

# The interpreter of this script. Every node of the job must have it at this path, with hpcddp.
hpcddp_python=/opt/hpcddp/bin/python

# Only the owner may read the run directory. The tasks restore the umask of the submitter, or of environment.setup, before
# they run the user's code.
HPCDDP_UMASK=$(umask)
export HPCDDP_UMASK
umask 077

# begin claims the run directory, writes the whole job there and prints the directory of this attempt; it prints nothing if
# the run has already finished. It reads the fields of the job that differ from the defaults of the version that is named.
HPCDDP_ATTEMPT_DIR=$(
  trap '' HUP INT TERM USR1 USR2
  "$hpcddp_python" -P -m hpcddp.supervise begin --run-root=runs --name=example --run-id=r1 <<'HPCDDP_JOB'
hpcddp_version: VERSION
name: example
resources:
  nodes: 2
  gpus_per_node: 4
environment:
  modules: [apptainer]
  pass_env: [WANDB_API_KEY]
  container:
    image: /images/pytorch.sif
    runtime: apptainer
    mounts: ["/scratch/imagenet:/data:ro"]
batch:
  global_batch_size: 64
train:
  model: resnet18
  dataset: imagefolder
  data_dir: /data/train
HPCDDP_JOB
) || {
  # begin has said why it failed, unless the interpreter cannot run hpcddp.
  hpcddp_code=$?
  "$hpcddp_python" -P -c 'import hpcddp.supervise.begin' 2>/dev/null ||
    echo "hpcddp: $hpcddp_python cannot run hpcddp on $HOSTNAME; install hpcddp for it" \
      "(docs/install.md), or choose another interpreter in environment" >&2
  exit "$hpcddp_code"
}
# If the script of an earlier attempt was killed, its tasks still run.
[[ -z $HPCDDP_ATTEMPT_DIR ]] || hpcddp_kill_tasks "${HPCDDP_ATTEMPT_DIR%/*}"/*

# --- Tasks ------------------------------------------------------------------------------------------------------------

# The command that starts one task in the container. Its interpreter comes first in PATH, and ignores USR2 until the task
# installs a handler. The directory of submission and the run directory have the same paths in the container.
hpcddp_run=${HPCDDP_ATTEMPT_DIR%/*/*}
hpcddp_inside='trap "" USR2
case $0 in */*) export PATH="${0%/*}:$PATH" ;; esac
if ! "$0" -P -c "import hpcddp.task.work"; then
  echo "hpcddp: this task cannot start: $0 in the container cannot run hpcddp; install hpcddp in the image, or write \
another interpreter of it as environment.container.python"
  exit 2
fi
exec "$0" "$@"'
# A device file of the task's node names the vendor of its GPUs. A container gets those of one vendor.
hpcddp_exec='
for file in /dev/nvidia[0-9]* /dev/nvhost-gpu /dev/nvgpu /dev/dxg; do [ ! -e "$file" ] || exec "$0" exec --nv "$@"; done
for file in /dev/kfd; do [ ! -e "$file" ] || exec "$0" exec --rocm "$@"; done
exec "$0" exec --nv "$@"'
hpcddp_task=(
  sh -c "$hpcddp_exec" apptainer --no-eval --pwd "$PWD" --bind "$PWD" --bind "$hpcddp_run"
  --bind /scratch/imagenet:/data:ro
  /images/pytorch.sif sh -c "$hpcddp_inside" python3 -P -u -m hpcddp.task
)

# submitit's controller reads the command of a task from a variable, with each word in single quotes.
hpcddp_log='exec "$0" "$@" >>"$HPCDDP_ATTEMPT_DIR/rank-$SUBMITIT_LOCAL_GLOBALID.log" 2>&1'
hpcddp_task=(sh -c "$hpcddp_log" "${hpcddp_task[@]}")
hpcddp_quote="'\\''"
SUBMITIT_LOCAL_COMMAND=$(printf "'%s' " "${hpcddp_task[@]//\'/"$hpcddp_quote"}")
export SUBMITIT_LOCAL_COMMAND

# One turn for each attempt in this job. 0 is the exit code of a run that has finished already.
hpcddp_code=0
while [[ -n $HPCDDP_ATTEMPT_DIR ]]; do
  export HPCDDP_ATTEMPT_DIR
  # If a signal has already come, no task is started; 143 is the exit code of a process that TERM ended.
  hpcddp_code=143
  if [[ -z $hpcddp_interrupted ]]; then
    # submitit's controller starts one process for each rank, as srun does on a cluster, and sends USR2 before the time
    # limit. The processes ignore USR2 until they have installed a handler. Each runs:
    #   the built-in training of resnet18 on imagefolder
    trap '' USR2
    "$hpcddp_python" -P -m submitit.local._local "${HPCDDP_ATTEMPT_DIR%/*/*}/submitit" &
    hpcddp_tasks=$!
    # The signal may have come before the process id was known.
    [[ -n $hpcddp_interrupted ]] && kill -TERM "$hpcddp_tasks"

    # A signal interrupts wait, so wait again until no signal came. No other command runs in this loop: bash could lose a
    # signal there.
    hpcddp_interrupted=yes
    while [[ -n $hpcddp_interrupted ]]; do
      hpcddp_interrupted=
      wait "$hpcddp_tasks"
      hpcddp_code=$?
    done
    hpcddp_kill_tasks "$HPCDDP_ATTEMPT_DIR"
  fi
  unset hpcddp_tasks

  # end decides what happens next, and prints the result of the attempt. If the tasks are to be started again in this job, it
  # prints the directory of the next attempt. It ignores signals, because Slurm signals the whole job at a requeue.
  HPCDDP_ATTEMPT_DIR=$(
    trap '' HUP INT TERM USR1 USR2
    "$hpcddp_python" -P -m hpcddp.supervise end --may-restart --code "$hpcddp_code" "${hpcddp_cancelled[@]}"
  )
  hpcddp_code=$?
done
exit "$hpcddp_code"
