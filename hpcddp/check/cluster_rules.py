"""Rules about the cluster: its limits as a profile or Slurm states them, and what Slurm itself answers."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from hpcddp.check.finding import Example, Hit, Rule, Severity, Subject, split_message
from hpcddp.jobfile.cluster import ClusterFacts
from hpcddp.run.files import user_and_groups
from hpcddp.site.facts import ask_site, read_site
from hpcddp.site.rules import broken_site_rules, is_about
from hpcddp.slurm.commands import SlurmCommandError


def _limits(subject: Subject) -> Iterator[Hit]:
    """Yield requests that no partition, QOS or account of the cluster grants."""
    facts = _facts(subject)
    if subject.spec is not None and facts is not None:
        for key, sentence in broken_site_rules(subject.spec, facts):
            said, fix = split_message(sentence)
            yield Hit(key=key, problem=f"{key} {said}", fix=fix)


def _facts(subject: Subject) -> ClusterFacts | None:
    """Return the facts about the cluster: those of the job's profile, else those that Slurm states now."""
    cluster = None if subject.request is None else subject.request.job.cluster
    if cluster is not None and is_about(cluster, subject.environment):
        return cluster
    if not subject.has_slurm:
        return None
    user, groups = user_and_groups()
    try:
        answers = ask_site(subject.environment, user=user)
    except SlurmCommandError:
        return None
    return read_site(answers, user=user, groups=groups, today=f"{datetime.now().astimezone():%Y-%m-%d}")


def _overriding_variables(subject: Subject) -> Iterator[Hit]:
    """Yield variables that sbatch reads as options; ``hpcddp submit`` does not pass them on."""
    if subject.request is not None or subject.problems:
        return
    for name, value in sorted(subject.environment.items()):
        if name.startswith("SBATCH_"):
            yield Hit(problem=f"{name} is {value!r} in this shell", fix=f"call unset {name} before sbatch")


def _refused(subject: Subject) -> Iterator[Hit]:
    """Yield why Slurm would refuse the script."""
    if subject.answer is not None and subject.answer.refusal is not None:
        yield Hit(problem=subject.answer.refusal, fix="change the request, or ask the cluster's administrators")


_SCRIPT = "#!/bin/bash\n#SBATCH --time=0:10:00\nsrun python train.py\n"

RULES = (
    Rule(
        code="beyond-the-cluster",
        severity=Severity.ERROR,
        otherwise="Slurm refuses the job, or keeps it pending for ever",
        sources=("slurm.conf(5), EnforcePartLimits", "sacctmgr(1)"),
        find=_limits,
        bad=Example("name: a\nresources: {partition: no-such-partition}\ncommand: [python, train.py]\n"),
        good=Example("name: a\ncommand: [python, train.py]\n"),
    ),
    Rule(
        code="variable-overrides",
        severity=Severity.WARNING,
        otherwise="sbatch takes the value of the variable in place of the one in the script",
        sources=("sbatch(1), INPUT ENVIRONMENT VARIABLES",),
        find=_overriding_variables,
        bad=Example(_SCRIPT, environment={"SBATCH_TIMELIMIT": "5"}, given="in a shell with SBATCH_TIMELIMIT=5"),
        good=Example(_SCRIPT),
    ),
    Rule(
        code="slurm-refuses",
        severity=Severity.ERROR,
        otherwise="sbatch refuses the script",
        sources=("sbatch(1), --test-only",),
        find=_refused,
        bad=Example("#!/bin/bash\n#SBATCH --ntasks=1000000\nsrun python train.py\n"),
        good=Example("#!/bin/bash\n#SBATCH --ntasks=1\nsrun python train.py\n"),
    ),
)
"""The rules about the cluster."""
