#!/bin/bash
#SBATCH --job-name=everything.1_x-y
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=2
#SBATCH --gpus-per-node=a100:2
#SBATCH --cpus-per-task=8
#SBATCH --mem-per-gpu=40G
#SBATCH --time=1-02:00:00
#SBATCH --partition=gpu,long
#SBATCH --account="it's \"ours\""
#SBATCH --qos=high
#SBATCH --constraint="a100&(nvme|ssd)"
#SBATCH --reservation="R#1"
#SBATCH --nodelist="gpu[01-04,07]"
#SBATCH --exclude=gpu02
#SBATCH --exclusive
#SBATCH --mail-type=END,TIME_LIMIT_90
#SBATCH --mail-user="a b@c.d"
#SBATCH --licenses=matlab:1
#SBATCH --overcommit
#SBATCH --switches=1
#SBATCH --wckey="a b@c.d"
#SBATCH --output="run root/50%%/everything.1_x-y/r1/batch.log"
#SBATCH --error="run root/50%%/everything.1_x-y/r1/batch.log"
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --signal=USR2@300

# The job everything.1_x-y, run r1, rendered by hpcddp. To change it, change the job and render it again.
# How it went: hpcddp why r1
# sbatch reads the lines above. bash runs the lines below, on the first node of the job: they begin an attempt of the run,
# start its tasks, wait for them, and decide what happens next.
# shellcheck disable=SC2016,SC2043,SC2317  # literal text in single quotes, lists of one item, functions for traps alone

# Slurm sends USR2 some time before the time limit, and TERM before it takes the nodes. The tasks save and end; this
# shell stays and decides what happens next. It survives the signals of scancel --full and --batch too.
hpcddp_interrupted=
trap hpcddp_interrupted=yes HUP INT TERM USR1 USR2

# --- Environment ------------------------------------------------------------------------------------------------------

# An exit in the lines below, even exit 0, must not look like a finished job.
hpcddp_on_exit() {
  local code=$?
  if [[ ! -v hpcddp_ready ]]; then
    echo "hpcddp: a module, an activation or environment.setup ended the script with exit code $code; no task was started" >&2
    ((code)) || code=70
  fi
  # Some versions of Slurm run a job that was once preempted again at each of its ends, unless it has Requeue=0.
  [[ ${hpcddp_ready-} == yes || -z ${SLURM_RESTART_COUNT-} ]] || scontrol update "JobId=$SLURM_JOB_ID" Requeue=0
  # The trap that environment.setup has set, in a shell of its own: it does not change the exit code.
  (eval "${hpcddp_exit_trap-}")
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
module load cuda/12.4 || hpcddp_missing 'environment.modules names cuda/12.4, which cannot be loaded' \
  'correct the name (module avail lists the modules)'
module load 'gcc 13' || hpcddp_missing 'environment.modules names gcc 13, which cannot be loaded' \
  'correct the name (module avail lists the modules)'

# A command of environment.setup that fails ends the script, but not one in a function, or in a file that is sourced.
hpcddp_setup_error() {
  local code=$1 command=$2 number=$3 depth=$4 line
  ((depth == hpcddp_depth && BASH_SUBSHELL == 0)) || return 0
  read -r line < <(tail -n "+$number" "${BASH_SOURCE[-1]}")
  if [[ $command == @(source|.)[[:blank:]]* ]] && hpcddp_is_there "${command#*[[:blank:]]}"; then
    # Such files often end with a test that is false.
    echo "hpcddp: warning: environment.setup: $line ended with exit code $code" >&2
    hpcddp_warnings+=("--warning=environment.setup: $line ended with exit code $code")
    return 0
  fi
  hpcddp_ready=no
  echo "hpcddp: environment.setup: $line ended with exit code $code, so that no task was started;" \
    "append || true to it if it may fail" >&2
  exit 70
}

# hpcddp_is_there WORDS: whether source finds the first of them. What a second evaluation could change counts as there.
hpcddp_is_there() {
  [[ $1 == *['`(']* ]] || (eval "set -- $1" && [[ -e $1 || $(type -P -- "$1") ]]) 2>/dev/null
}

# In place of trap for environment.setup, whose traps do not replace those of this script; that for EXIT runs last.
hpcddp_trap() {
  local words
  # shellcheck disable=SC2064
  builtin trap "$@" || return
  ((BASH_SUBSHELL == 0)) || return 0
  eval "words=($(builtin trap -p EXIT))"
  [[ ${words[2]-} == hpcddp_on_exit ]] || hpcddp_exit_trap=${words[2]-}
  builtin trap hpcddp_on_exit EXIT
  builtin trap 'hpcddp_setup_error "$?" "$BASH_COMMAND" "$LINENO" "${#BASH_SOURCE[@]}"' ERR
}

hpcddp_depth=${#BASH_SOURCE[@]} hpcddp_directory=$PWD hpcddp_options=$(shopt -po; shopt -p)
hpcddp_exit_trap='' hpcddp_warnings=()
# By eval, or shellcheck takes every trap of this script for the function.
eval 'trap() { hpcddp_trap "$@"; }'
hpcddp_trap hpcddp_on_exit EXIT

# environment.setup, unchanged from the job file.
source /opt/site/env.sh
if [[ -n $TMPDIR ]]; then
  export CACHE=$TMPDIR/cache
fi

# The lines above may have changed the directory, the options and the traps of the shell. The rest of the script uses
# paths relative to the directory of submission, and checks exit codes itself.
{ eval "$hpcddp_options"; } 2>/dev/null
unset -f trap
IFS=$' \t\n'
cd "$hpcddp_directory" || exit
trap - DEBUG ERR RETURN
trap hpcddp_interrupted=yes HUP INT TERM USR1 USR2
hpcddp_ready=yes

# environment.env
export NCCL_DEBUG=WARN
export GREETING='it'"'"'s $HOME'
export TWO_LINES='first
second'

# environment.pass_env: Slurm passes these variables from the shell of the submission. Their values are not written here.
for hpcddp_variable in WANDB_API_KEY HF_TOKEN; do
  [[ -v $hpcddp_variable ]] && continue
  echo "hpcddp: environment.pass_env names $hpcddp_variable, which is not set; export it before you submit the job" >&2
  exit 2
done

# --- This attempt -----------------------------------------------------------------------------------------------------

# The interpreter of this script and of its tasks. Every node of the job must have it at this path, with hpcddp.
hpcddp_python='/opt/my envs/py/bin/python'

# Only the owner may read the run directory. The tasks restore the umask of the submitter, or of environment.setup, before
# they run the user's code.
HPCDDP_UMASK=$(umask)
export HPCDDP_UMASK
umask 077

# begin claims the run directory, writes the whole job there and prints the directory of this attempt; it prints nothing if
# the run has already finished. It reads the fields of the job that differ from the defaults of the version that is named.
HPCDDP_ATTEMPT_DIR=$(
  trap '' HUP INT TERM USR1 USR2
  "$hpcddp_python" -P -m hpcddp.supervise begin --run-root='run root/50%' --name=everything.1_x-y --run-id=r1 \
    "${hpcddp_warnings[@]}" <<'HPCDDP_JOB'
hpcddp_version: VERSION
name: everything.1_x-y
run_root: "run root/50%"
resources:
  nodes: 3
  gpus_per_node: 2
  gpu_type: a100
  gpu_request: gpus-per-node
  cpus_per_task: 8
  mem_per_gpu: "40G"
  time_limit: "1-02:00:00"
  partition: "gpu,long"
  account: "it's \"ours\""
  qos: high
  constraint: "a100&(nvme|ssd)"
  reservation: "R#1"
  nodelist: "gpu[01-04,07]"
  exclude: gpu02
  exclusive: true
  mail_type: "END,TIME_LIMIT_90"
  mail_user: "a b@c.d"
  sbatch:
    wckey: "a b@c.d"
    switches: "1"
    overcommit: true
    licenses: "matlab:1"
  srun:
    cpu-bind: "mask_cpu:0x3,0xc"
    mpi: pmix
    comment: "it's $HOME"
    exact: true
environment:
  modules: [cuda/12.4, "gcc 13"]
  setup: ["source /opt/site/env.sh", "if [[ -n $TMPDIR ]]; then\n  export CACHE=$TMPDIR/cache\nfi"]
  pass_env: [WANDB_API_KEY, HF_TOKEN]
  python: "/opt/my envs/py/bin/python"
  code: frozen
  stage:
    source: "/data/it's.tar"
    target: "$SLURM_TMPDIR/my data"
batch:
  global_batch_size: 96
train:
  model: resnet18
  model_args:
    note: HPCDDP_JOB
  dataset: digits
requeue:
  causes: [time_limit]
  signal_lead: "5min"
HPCDDP_JOB
) || {
  # begin has said why it failed, unless the interpreter cannot run hpcddp.
  hpcddp_code=$?
  "$hpcddp_python" -P -c 'import hpcddp.supervise.begin' 2>/dev/null ||
    echo "hpcddp: $hpcddp_python cannot run hpcddp on $HOSTNAME; install hpcddp for it" \
      "(docs/install.md), or choose another interpreter in environment" >&2
  exit "$hpcddp_code"
}

# --- Tasks ------------------------------------------------------------------------------------------------------------

# One turn for each attempt in this job. 0 is the exit code of a run that has finished already.
hpcddp_code=0
while [[ -n $HPCDDP_ATTEMPT_DIR ]]; do
  export HPCDDP_ATTEMPT_DIR
  # If a signal has already come, no task is started; 143 is the exit code of a process that TERM ended.
  hpcddp_code=143

  # environment.stage: each node copies the data to a disk of its own, before the tasks start. A node that has the data of
  # an earlier attempt keeps it.
  hpcddp_staged=143
  if [[ -z $hpcddp_interrupted ]]; then
    srun --nodes=3 --ntasks=3 --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=0 \
      "$hpcddp_python" -P -m hpcddp.supervise stage --source='/data/it'"'"'s.tar' --target='$SLURM_TMPDIR/my data' &
    hpcddp_tasks=$!
    wait "$hpcddp_tasks"
    hpcddp_staged=$?
    # A signal interrupts wait before the process has ended.
    while kill -0 "$hpcddp_tasks" 2>/dev/null; do
      wait "$hpcddp_tasks"
      hpcddp_staged=$?
    done
    [[ -n $hpcddp_interrupted || $hpcddp_staged == 0 ]] || hpcddp_code=$hpcddp_staged
  fi
  if [[ -z $hpcddp_interrupted && $hpcddp_staged == 0 ]]; then
    # One task is one rank, or one launcher. Each task ignores USR2 until it has installed a handler (the imports take
    # seconds), and writes to its own log. srun's --output is not used, because it changes paths with a percent sign. No
    # task ends because another has ended before it (--wait). The id of the step is kept: the tasks are started again in
    # this job only if this step has ended. Each task runs:
    #   the built-in training of resnet18 on digits
    srun --nodes=3 --ntasks=6 --ntasks-per-node=2 --cpus-per-task=8 \
      --distribution=block --kill-on-bad-exit=1 --wait=0 --unbuffered \
      '--comment=it'"'"'s $HOME' --cpu-bind=mask_cpu:0x3,0xc --exact --mpi=pmix \
      sh -c 'trap "" USR2
        [ "$SLURM_PROCID" != 0 ] || echo "$SLURM_JOB_ID.$SLURM_STEP_ID" >"$HPCDDP_ATTEMPT_DIR/step"
        exec "$0" "$@" >>"$HPCDDP_ATTEMPT_DIR/rank-$SLURM_PROCID.log" 2>&1' \
      "$hpcddp_python" -P -u -m hpcddp.task &
    hpcddp_tasks=$!
    # watch ends srun if it still waits when all tasks have ended, which it does if a slurmstepd was killed.
    (trap '' HUP INT TERM USR1 USR2; exec "$hpcddp_python" -P -m hpcddp.supervise watch --pid "$hpcddp_tasks") &

    # A signal interrupts wait, so wait again until no signal came. No other command runs in this loop: bash could lose a
    # signal there.
    hpcddp_interrupted=yes
    while [[ -n $hpcddp_interrupted ]]; do
      hpcddp_interrupted=
      wait "$hpcddp_tasks"
      hpcddp_code=$?
    done
  fi

  # end decides what happens next, and prints the result of the attempt. If the tasks are to be started again in this job, it
  # prints the directory of the next attempt. It ignores signals, because Slurm signals the whole job at a requeue.
  HPCDDP_ATTEMPT_DIR=$(
    trap '' HUP INT TERM USR1 USR2
    "$hpcddp_python" -P -m hpcddp.supervise end --may-restart --code "$hpcddp_code"
  )
  hpcddp_code=$?
done
exit "$hpcddp_code"
