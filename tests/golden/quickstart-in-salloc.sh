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

# The job quickstart, run r1, rendered by hpcddp. To change it, change the job and render it again.
# How it went: hpcddp why r1
# sbatch reads the lines above. bash runs the lines below, on the first node of the job: they begin an attempt of the run,
# start its tasks, wait for them, and decide what happens next.
# shellcheck disable=SC2016,SC2043,SC2317  # literal text in single quotes, lists of one item, functions for traps alone

# In a local run the process id of this shell is the job id.
export HPCDDP_LOCAL_JOB_ID=$$

# The first INT or TERM makes the tasks save and end. Another one, 5 s later or more, kills them.
hpcddp_interrupted=
hpcddp_cancelled=()
hpcddp_stop() {
  local step
  hpcddp_interrupted=yes
  if [[ ! -v hpcddp_stopped ]]; then
    hpcddp_stopped=$SECONDS
    hpcddp_cancelled=(--cancelled)
    # srun kills its tasks at once when it receives TERM. scancel signals the tasks alone; the allocation stays.
    if read -r step <"$HPCDDP_ATTEMPT_DIR/step"; then
      scancel --signal=TERM "$step"
    elif [[ -v hpcddp_tasks ]]; then
      kill -TERM "$hpcddp_tasks"
    fi
  elif [[ -v hpcddp_tasks ]] && ((SECONDS - hpcddp_stopped >= 5)); then
    kill -TERM "$hpcddp_tasks"
  fi
} 2>/dev/null
trap hpcddp_stop INT TERM

# --- This attempt -----------------------------------------------------------------------------------------------------

# The interpreter of this script and of its tasks. Every node of the job must have it at this path, with hpcddp.
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
  "$hpcddp_python" -P -m hpcddp.supervise begin --run-root=runs --name=quickstart --run-id=r1 <<'HPCDDP_JOB'
hpcddp_version: VERSION
name: quickstart
resources:
  tasks_per_node: 2
  time_limit: "00:10:00"
batch:
  global_batch_size: 64
learning_rate:
  base: 0.03
  warmup_epochs: 1.0
  schedule: cosine
train:
  model: resnet18
  dataset: digits
  epochs: 5
  optimizer:
    momentum: 0.9
    weight_decay: 0.0005
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
  if [[ -z $hpcddp_interrupted ]]; then
    # One task is one rank, or one launcher. Each task ignores USR2 until it has installed a handler (the imports take
    # seconds), and writes to its own log. srun's --output is not used, because it changes paths with a percent sign. No
    # task ends because another has ended before it (--wait). The id of the step is kept: the tasks are started again in
    # this job only if this step has ended. Each task runs:
    #   the built-in training of resnet18 on digits
    srun --nodes=1 --ntasks=2 --ntasks-per-node=2 --cpus-per-task=1 \
      --distribution=block --kill-on-bad-exit=1 --wait=0 --unbuffered \
      sh -c 'trap "" USR2
        [ "$SLURM_PROCID" != 0 ] || echo "$SLURM_JOB_ID.$SLURM_STEP_ID" >"$HPCDDP_ATTEMPT_DIR/step"
        exec "$0" "$@" >>"$HPCDDP_ATTEMPT_DIR/rank-$SLURM_PROCID.log" 2>&1' \
      "$hpcddp_python" -P -u -m hpcddp.task &
    hpcddp_tasks=$!
    # watch ends srun if it still waits when all tasks have ended, which it does if a slurmstepd was killed.
    # It also sends srun USR2 some time before the end, as Slurm does for a job of its own. srun passes it on to the tasks.
    (trap '' HUP INT TERM USR1 USR2; exec "$hpcddp_python" -P -m hpcddp.supervise watch --pid "$hpcddp_tasks" --warn) &
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
