#!/bin/bash
#SBATCH --job-name=quickstart
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.out
#SBATCH --error=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR2@120

# The job quickstart, rendered by hpcddp. To change it, change the job and render it again.
# sbatch reads the lines above. bash runs the lines below, on the first node of the job: they begin an attempt of the run,
# start its tasks, wait for them, and decide what happens next.
# shellcheck disable=SC2016,SC2043,SC2317  # literal text in single quotes, lists of one item, functions for traps alone

# If sbatch was called in another job, these variables are those of that job, and srun would take them for options.
unset "${!SBATCH_@}" "${!SUBMITIT_@}" "${!TORCHELASTIC_@}" "${!HPCDDP_@}" \
  SLURM_ACCOUNT SLURM_ACCTG_FREQ SLURM_BCAST SLURM_BCAST_EXCLUDE SLURM_BURST_BUFFER SLURM_CLUSTER_CONSTRAINT \
  SLURM_COMPRESS SLURM_CONSOLIDATE_SEGMENTS SLURM_CONSTRAINT SLURM_CORE_SPEC SLURM_CPUS_PER_GPU SLURM_CPU_BIND \
  SLURM_CPU_BIND_LIST SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_VERBOSE SLURM_CPU_FREQ_REQ SLURM_DELAY_BOOT SLURM_DEPENDENCY \
  SLURM_DISABLE_STATUS SLURM_DISTRIBUTION SLURM_DIST_PLANESIZE SLURM_EPILOG SLURM_EXACT SLURM_EXCLUSIVE \
  SLURM_EXPORT_ENV SLURM_EXTERNAL_LAUNCHER SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_SOCKET SLURM_GPUS_PER_TASK \
  SLURM_GPU_BIND SLURM_GPU_FREQ SLURM_GRES SLURM_GRES_FLAGS SLURM_HINT SLURM_KILL_BAD_EXIT SLURM_LABELIO \
  SLURM_MEM_BIND SLURM_MEM_BIND_LIST SLURM_MEM_BIND_PREFER SLURM_MEM_BIND_SORT SLURM_MEM_BIND_TYPE \
  SLURM_MEM_BIND_VERBOSE SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE SLURM_MPI_TYPE SLURM_NCORES_PER_SOCKET \
  SLURM_NETWORK SLURM_NO_KILL SLURM_NSOCKETS_PER_NODE SLURM_NTASKS_PER_CORE SLURM_NTASKS_PER_GPU \
  SLURM_NTASKS_PER_SOCKET SLURM_NTASKS_PER_TRES SLURM_OOM_KILL_STEP SLURM_OPEN_MODE SLURM_OVERCOMMIT SLURM_OVERLAP \
  SLURM_PARTITION SLURM_POWER SLURM_PROFILE SLURM_PROLOG SLURM_QOS SLURM_REMOTE_CWD SLURM_REQ_SWITCH SLURM_RESERVATION \
  SLURM_RESV_PORTS SLURM_SEND_LIBS SLURM_SIGNAL SLURM_SPREAD_JOB SLURM_SPREAD_SEGMENTS SLURM_SRUN_MULTI \
  SLURM_STDERRMODE SLURM_STDINMODE SLURM_STDOUTMODE SLURM_TASK_EPILOG SLURM_TASK_PROLOG SLURM_THREADS \
  SLURM_THREADS_PER_CORE SLURM_THREAD_SPEC SLURM_TIMELIMIT SLURM_TRES_BIND SLURM_TRES_PER_TASK SLURM_UNBUFFEREDIO \
  SLURM_USE_MIN_NODES SLURM_WAIT SLURM_WAIT4SWITCH SLURM_WCKEY SLURM_WORKING_DIR

# Slurm sends USR2 some time before the time limit, and TERM before it takes the nodes. The tasks save and end; this
# shell stays and decides what happens next. It survives the signals of scancel --full and --batch too.
hpcddp_interrupted=
trap hpcddp_interrupted=yes HUP INT TERM USR1 USR2

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
  "$hpcddp_python" -P -m hpcddp.supervise begin --run-root=runs --name=quickstart <<'HPCDDP_JOB'
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
