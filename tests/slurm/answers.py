"""Output of Slurm's commands on made-up clusters."""

from __future__ import annotations

from pathlib import Path

from hpcddp.site.facts import Answers

RECORDED = Path(__file__).parent / "site"

# The lines that differ between versions of Slurm, written after their manuals; 22.05 alone is recorded.
OLD = Answers(
    config="""\
Configuration data as of 2021-03-01T10:00:00
AccountingStorageEnforce = associations,limits,qos
AccountingStorageType   = accounting_storage/slurmdbd
AuthInfo                = (null)
ClusterName             = hpc1
DefMemPerCPU            = 2000
DisableRootJobs         = Yes
EnforcePartLimits       = ALL
JobRequeue              = 0
JobSubmitPlugins        = lua
KillWait                = 30 sec
MaxArraySize            = 10001
PreemptMode             = CANCEL
PreemptType             = preempt/qos
SelectType              = select/cons_res
SelectTypeParameters    = CR_CORE_MEMORY
SLURM_VERSION           = 20.11.9
SlurmctldParameters     = (null)

Slurmctld(primary) at head1 is UP
Slurmctld(backup) at head2 is UP
""",
    partitions="""\
PartitionName=batch AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A \
DefaultTime=01:00:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED \
MaxTime=3-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=c[001-100] PriorityJobFactor=1 PriorityTier=1 \
RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=CANCEL State=UP TotalCPUs=6400 TotalNodes=100 \
SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED
PartitionName=gpu.v100 AllowGroups=ALL DenyAccounts=guests AllowQos=normal,long AllocNodes=ALL Default=NO QoS=N/A \
DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=120 Hidden=NO MaxNodes=4 MaxTime=1-00:00:00 MinNodes=0 \
LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=g[1-4] PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO \
OverSubscribe=NO OverTimeLimit=NONE PreemptMode=CANCEL State=UP TotalCPUs=160 TotalNodes=4 \
SelectTypeParameters=NONE JobDefaults=DefMemPerGPU=32000,DefCpuPerGPU=8 DefMemPerCPU=4000 MaxMemPerNode=UNLIMITED
""",
    nodes="""\
batch|90|allocated|64|257000|(null)|avx2,ib
batch|8|mixed|64|257000|(null)|avx2,ib
batch|2|down*|64|257000|(null)|avx2,ib
gpu.v100|3|idle|40|515000|gpu:v100:4(S:0-1)|ib
gpu.v100|1|drained|40|515000|gpu:v100:4(S:0-1)|ib
""",
    associations="lab|normal,long\ngrant|normal\n",
    default_account="lab\n",
)
NEW = Answers(
    config="""\
Configuration data as of 2026-11-21T10:00:00
AccountingStorageEnforce = associations,limits,qos,safe
AccountingStorageType   = accounting_storage/slurmdbd
AuthInfo                = (null)
ClusterName             = hpc1
DefMemPerCPU            = 3900
EnforcePartLimits       = NO
JobRequeue              = 1
JobSubmitPlugins        = lua
KillWait                = 60 sec
MaxArraySize            = 1001
PreemptMode             = REQUEUE
PreemptParameters       = (null)
PreemptType             = preempt/partition_prio
SelectType              = select/cons_tres
SelectTypeParameters    = CR_CORE_MEMORY
SLURM_VERSION           = 23.11.10
SlurmctldParameters     = enable_configless

Slurmctld(primary) at head1 is UP
""",
    partitions="""\
PartitionName=cpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A \
DefaultTime=01:00:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED \
MaxTime=2-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED MaxCPUsPerSocket=UNLIMITED Nodes=c[001-100] \
PriorityJobFactor=1 PriorityTier=10 RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF \
State=UP TotalCPUs=6400 TotalNodes=100 SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED \
MaxMemPerNode=UNLIMITED TRES=cpu=6400,mem=25700000M,node=100,billing=6400
PartitionName=a100 AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A DefaultTime=NONE \
DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=4 MaxTime=1-00:00:00 MinNodes=0 LLN=NO \
MaxCPUsPerNode=UNLIMITED MaxCPUsPerSocket=UNLIMITED Nodes=g[1-8] PriorityJobFactor=1 PriorityTier=10 RootOnly=NO \
ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF State=UP TotalCPUs=1024 TotalNodes=8 \
SelectTypeParameters=NONE JobDefaults=DefMemPerGPU=120000 DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED \
TRES=cpu=1024,mem=8240000M,node=8,billing=1024,gres/gpu=32,gres/gpu:a100=32
PartitionName=preemptible AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A \
DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=90 Hidden=NO MaxNodes=UNLIMITED MaxTime=7-00:00:00 \
MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED MaxCPUsPerSocket=UNLIMITED Nodes=g[1-8] PriorityJobFactor=1 \
PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=REQUEUE State=UP \
TotalCPUs=1024 TotalNodes=8 SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED \
MaxMemPerNode=UNLIMITED TRES=cpu=1024,mem=8240000M,node=8,billing=1024,gres/gpu=32,gres/gpu:a100=32
PartitionName=reserved AllowGroups=ALL AllowAccounts=bio AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A \
DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED \
MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED MaxCPUsPerSocket=UNLIMITED Nodes=b[1-2] PriorityJobFactor=1 \
PriorityTier=10 RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF State=UP TotalCPUs=256 \
TotalNodes=2 SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED \
TRES=cpu=256,mem=2060000M,node=2,billing=256
""",
    nodes="""\
cpu|60|mixed|64|257000|(null)|avx2
cpu|40|allocated|64|257000|(null)|avx2
a100|7|mixed|128|1030000|gpu:a100:4(S:0-1)|nvlink
a100|1|drained|128|1030000|gpu:a100:4(S:0-1)|nvlink
preemptible|7|mixed|128|1030000|gpu:a100:4(S:0-1)|nvlink
preemptible|1|drained|128|1030000|gpu:a100:4(S:0-1)|nvlink
reserved|2|idle|128|1030000|(null)|(null)
""",
    associations="lab|normal\ngrant|normal\n",
    default_account="lab\n",
)
NEWER = Answers(
    config="""\
Configuration data as of 2024-09-01T10:00:00
AccountingStorageEnforce = none
AccountingStorageType   = (null)
AuthInfo                = cred_expire=20
ClusterName             = ki
JobSubmitPlugins        = (null)
KillWait                = 30 sec
MaxArraySize            = 1001
MaxBatchRequeue         = 5
PreemptMode             = REQUEUE
PreemptParameters       = send_user_signal,youngest_first
PreemptType             = preempt/partition_prio
SelectType              = select/cons_tres
SelectTypeParameters    = CR_CORE_MEMORY
SLURM_VERSION           = 24.05.3

Cgroup Support Configuration:
AllowedRAMSpace         = 100.0%
ConstrainRAMSpace       = yes

MPI Plugins Configuration:
PMIxEnv                 = (null)
""",
    partitions="""\
PartitionName=main AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A DefaultTime=NONE \
DisableRootJobs=NO ExclusiveUser=NO ExclusiveTopo=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime=2-00:00:00 \
MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED MaxCPUsPerSocket=UNLIMITED Nodes=dgx[1-6] PriorityJobFactor=1 \
PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=REQUEUE State=UP TotalCPUs=1280 \
TotalNodes=6 SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED \
TRES=cpu=1280,mem=8000000M,node=6,billing=1280,gres/gpu=40,gres/gpu:a100=24,gres/gpu:h100=16 TRESBillingWeights=CPU=1.0
""",
    nodes="""\
main|4|planned|256|2000000|gpu:h100:4(S:0-7)|(null)
main|2|idle~|128|1000000|gpu:a100:6(S:0-1),gpu:a100_1g.5gb:14(S:0-1)|nvlink
""",
)


def recorded() -> Answers:
    """Return what a real Slurm 22.05.8 printed: one partition down, one hidden and for two groups, a node drained."""
    return Answers(**{name: (RECORDED / f"22.05-{name}.txt").read_text() for name in ("config", "partitions", "nodes")})
