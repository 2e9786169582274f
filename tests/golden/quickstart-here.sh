#!/bin/bash
#SBATCH --job-name=quickstart
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=00:10:00
#SBATCH --output=runs/quickstart/r1/batch.log
#SBATCH --error=runs/quickstart/r1/batch.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR2@120

# The job quickstart, run r1, written by hpcddp: to change it, change the job file.
# sbatch reads the lines above. bash runs the lines below, on the first node of the job. Text in single quotes is literal
# on purpose, dollar signs included, a list may have one item, and some functions are called by traps alone.
# shellcheck disable=SC2016,SC2043,SC2317

# In a local run the process id of this shell is the job id. The first INT or TERM makes the tasks save and end. Another
# one, 5 s later or more, kills them.
export HPCDDP_LOCAL_JOB_ID=$$
hpcddp_interrupted=
hpcddp_cancelled=()
# hpcddp_kill_tasks DIRECTORY...: kills the tasks of these attempts and what they have started, as Slurm does at the end
# of a step.
hpcddp_kill_tasks() {
  local process

  while IFS=/ read -r _ _ process _; do
    [[ $process == "$hpcddp_tasks" || $process == "$$" ]] || kill -KILL "$process"
  done < <(grep -lszxFf <(printf 'HPCDDP_ATTEMPT_DIR=%s\n' "$@") /proc/[0-9]*/environ)
} 2>/dev/null
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

# --- This attempt -----------------------------------------------------------------------------------------------------

# Only the owner may read the run directory. The tasks restore the umask of the submitter, or of environment.setup, before
# they run the user's code.
HPCDDP_UMASK=$(umask)
export HPCDDP_UMASK
umask 077

hpcddp_python=/opt/hpcddp/bin/python

# Claims the run directory, writes the resolved job there and prints the directory of this attempt. Prints nothing if the
# run has already finished.
HPCDDP_ATTEMPT_DIR=$(
  trap '' HUP INT TERM USR1 USR2
  "$hpcddp_python" -P -m hpcddp.supervise begin --run-root=runs --name=quickstart --run-id=r1 <<'HPCDDP_JOB'
name: quickstart
run_root: runs
profile: null
resources:
  nodes: 1
  min_nodes: null
  spare_nodes: 0
  gpus_per_node: 0
  gpu_type: null
  gres: {}
  tasks_per_node: 2
  cpus_per_task: 1
  mem: null
  mem_per_cpu: null
  mem_per_gpu: null
  time_limit: "00:10:00"
  partition: null
  account: null
  qos: null
  constraint: null
  reservation: null
  nodelist: null
  exclude: null
  exclusive: false
  licenses: null
  mail_type: null
  mail_user: null
  sbatch: {}
environment:
  modules: []
  conda: null
  venv: null
  uv: null
  setup: []
  env: {}
  pass_env: []
  python: null
  container: null
  code: live
  stage: null
batch:
  global_batch_size: 64
  max_per_device_batch_size: null
  grad_accum_steps: null
  per_device_batch_size: null
  tail: keep
  split: exact
  order: keyed
  unit: sample
  group: null
learning_rate:
  base: 0.03
  base_global_batch_size: null
  rule: none
  warmup_epochs: 1.0
  schedule: cosine
  milestones: []
  gamma: 0.1
  min: 0.0
train:
  model: resnet18
  model_args: {}
  dataset: digits
  dataset_args: {}
  num_classes: null
  data_dir: null
  epochs: 5
  optimizer:
    name: sgd
    momentum: 0.9
    weight_decay: 0.0005
    nesterov: false
    betas: [0.9, 0.999]
    eps: 1e-08
  device: null
  precision: fp32
  batch_norm: local
  compile: false
  channels_last: false
  loss: null
  loss_reduction: mean
  label_smoothing: 0.0
  clip_grad_norm: null
  ema_decay: null
  num_workers: null
  eval_every: 1
  nonfinite_loss: stop
  deterministic: false
  noise_scale: false
  replica_check_every: null
  seed: 0
entrypoint: null
command: null
launcher: null
checkpoint:
  every: "10min"
  keep: 3
  best: null
requeue:
  causes: [preemption, time_limit, node_failure]
  signal_lead: "2min"
  command_signal: null
  max_preemptions: null
  max_time_limits: 50
  max_failures: 0
  recovery: auto
  max_attempts_without_progress: 2
  expedite: true
  avoid_failed_nodes: false
  allow_continuation: false
launch:
  rendezvous_timeout: "5min"
  hang_timeout: "5min"
trackers:
  use: null
  project: null
  entity: null
  tracking_uri: null
sweep: null
max_parallel: null
HPCDDP_JOB
) || {
  hpcddp_code=$?
  "$hpcddp_python" -P -c 'import hpcddp.supervise.begin' 2>/dev/null ||
    echo "hpcddp: $hpcddp_python cannot run hpcddp on $HOSTNAME; install hpcddp for it" \
      "(docs/install.md), or choose another interpreter in environment" >&2
  exit "$hpcddp_code"
}
# If the script of an earlier attempt was killed, its tasks still run.
[[ -z $HPCDDP_ATTEMPT_DIR ]] || hpcddp_kill_tasks "${HPCDDP_ATTEMPT_DIR%/*}"/*

# --- Tasks ------------------------------------------------------------------------------------------------------------

# The exit code of a run that has finished already.
hpcddp_code=0
while [[ -n $HPCDDP_ATTEMPT_DIR ]]; do
  export HPCDDP_ATTEMPT_DIR
  # If a signal has already come, no task is started; 143 is the exit code of a process that TERM ended.
  hpcddp_code=143
  if [[ -z $hpcddp_interrupted ]]; then
    # submitit's controller starts one process for each rank, as srun does on a cluster, and sends USR2 before the time
    # limit. The processes ignore USR2 until they have installed a handler.
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

  # Decides what happens next, and prints the result of the attempt. If the tasks are to be started again in this job, it
  # prints the directory of the next attempt. It ignores signals, because Slurm signals the whole job at a requeue.
  HPCDDP_ATTEMPT_DIR=$(
    trap '' HUP INT TERM USR1 USR2
    "$hpcddp_python" -P -m hpcddp.supervise end --may-restart --code "$hpcddp_code" "${hpcddp_cancelled[@]}"
  )
  hpcddp_code=$?
done
exit "$hpcddp_code"
