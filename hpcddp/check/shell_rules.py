"""Rules about the shell lines of a script: steps, launchers, signals, exit codes, secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from hpcddp.check.finding import Edit, Example, Hit, Rule, Severity, Subject
from hpcddp.script.directives import Flag, signal_name
from hpcddp.script.launch import Launch, launch_of
from hpcddp.script.parse import Script
from hpcddp.script.shell import Command
from hpcddp.script.syntax import BASH_SYNTAX, script_error
from hpcddp.submission.shell_commands import launcher_of_a_node

# Kinds of commands that start the ranks of one node.
_LAUNCHERS: Final = frozenset({"torchrun", "accelerate"})
_WORK: Final = _LAUNCHERS | {"deepspeed", "mpirun", "python"}
# The module that copies the data to the nodes.
_OWN_STEP: Final = "hpcddp.supervise"


def _launches_of(script: Script) -> list[Launch]:
    """Return the commands that start the work of a script, in order: steps of srun, launchers, Python programs."""
    return [launch for command in script.commands if _is_work(launch := launch_of(command))]


def _is_work(launch: Launch) -> bool:
    if not launch.certainty or any(word.text == _OWN_STEP for word in launch.words):
        return False
    return launch.is_step or launch.kind in _WORK


def _flag_count(script: Script, *names: str) -> int | None:
    """Return the number that a flag of sbatch gives, the smaller one of a range; None without a number."""
    flag = script.last_flag(*names)
    return None if flag is None else _count_in(flag.value)


def _count_in(value: str | None) -> int | None:
    """Return the number at the beginning of a value, such as ``2`` of ``2-4``; None without one."""
    number = (value or "").partition("-")[0].partition(":")[0]
    return int(number) if number.isascii() and number.isdecimal() else None


def _bash_syntax(subject: Subject) -> Iterator[Hit]:
    """Yield the first error in the syntax of a user's script; the script of a job file is hpcddp's own."""
    script = subject.script
    if subject.request is not None or script.interpreter not in BASH_SYNTAX:
        return
    error = script_error(script.text)
    if error is not None:
        yield Hit(
            line=error.line,
            problem=f"the script is not valid bash: {error.message}",
            fix="close each quote, parenthesis, if, loop and here-document that begins in this line or above it",
        )


_CPUS_VARIABLE: Final = "SRUN_CPUS_PER_TASK"
_STATES_CPUS: Final = ("cpus-per-task", "cpus-per-gpu")
_INHERITED_AGAIN: Final = (23, 11)


def _step_cpus(subject: Subject) -> Iterator[Hit]:
    """Yield steps that do not get the CPUs of the job."""
    script = subject.script
    cpus = _flag_count(script, "cpus-per-task")
    if cpus is None or cpus == 1 or _CPUS_VARIABLE in script.text or subject.slurm_version >= _INHERITED_AGAIN:
        return
    for launch in _launches_of(script):
        if not launch.is_step or launch.srun_value(*_STATES_CPUS) is not None or _may_state_cpus(script, launch):
            continue
        line = launch.command.line
        text = script.lines[line - 1]
        fixed = re.sub(r"\bsrun\b", 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK"', text, count=1)
        is_simple = len(re.findall(r"\bsrun\b", text)) == 1
        yield Hit(
            line=line,
            problem=f"srun is not told --cpus-per-task, which is {cpus} for the job",
            fix='write srun --cpus-per-task="$SLURM_CPUS_PER_TASK"',
            edits=(Edit(line=line, lines=(fixed,)),) if is_simple else (),
        )


def _may_state_cpus(script: Script, launch: Launch) -> bool:
    """Return whether a variable among the words of srun may hold the option: ``srun $SRUN_ARGS``."""
    return any(word.expands for word in launch.command.words) and "--cpus-per-" in _shell_text(script)


def _tasks_per_node(script: Script, launch: Launch) -> int | None:
    """Return how many tasks of a step srun starts on each node; None if that is not known."""
    nodes = _count_in(launch.srun_value("nodes")) or _flag_count(script, "nodes") or 1
    of_step = _count_in(launch.srun_value("ntasks-per-node", "tasks-per-node"))
    tasks_of_step = launch.srun_value("ntasks")
    if of_step is not None:
        return of_step
    if tasks_of_step is not None:
        tasks = _count_in(tasks_of_step)
        return None if tasks is None else -(-tasks // nodes)
    of_job = _flag_count(script, "ntasks-per-node", "tasks-per-node")
    if of_job is not None:
        return of_job
    tasks = _flag_count(script, "ntasks")
    return None if tasks is None else -(-tasks // nodes)


def _launcher_in_each_task(subject: Subject) -> Iterator[Hit]:
    """Yield a launcher of the ranks of a node that srun starts several times on each node."""
    script = subject.script
    for launch in _launches_of(script):
        launcher = launcher_of_a_node([word.text for word in launch.words], {}) if launch.is_step else None
        tasks = _tasks_per_node(script, launch)
        if launcher is None or tasks is None or tasks == 1:
            continue
        yield Hit(
            line=launch.command.line,
            problem=f"srun starts {tasks} tasks on each node, and each of them starts {launcher.name}, which starts "
            "the ranks of its node itself",
            fix=f"ask for --ntasks-per-node=1, or let srun start the program without {launcher.name}",
        )


def _launcher_on_one_node(subject: Subject) -> Iterator[Hit]:
    """Yield a launcher that only the first node of several starts."""
    script = subject.script
    nodes = _flag_count(script, "nodes") or 1
    reaches_others = re.search(r"\b(?:srun|mpirun|mpiexec|ibrun|ssh|pdsh|clush|parallel)\b", _shell_text(script))
    if nodes == 1 or reaches_others:
        return
    for launch in _launches_of(script):
        if launch.kind in _LAUNCHERS:
            yield Hit(
                line=launch.command.line,
                problem=f"the job has {nodes} nodes, and {launch.kind} is started on the first one alone, where the "
                "batch script runs",
                fix=f"write srun --ntasks-per-node=1 before {launch.kind}",
            )


def _shell_text(script: Script) -> str:
    """Return the statements of a script, without its comments."""
    return "\n".join(statement.text for statement in script.statements)


_LOCAL_MASTER: Final = re.compile(
    r"(?<![\w-])(?P<name>MASTER_ADDR|--master[-_]addr|--rdzv[-_]endpoint|--main[-_]process[-_]ip)"
    r"(?:=|[ \t]+)['\"]?(?P<host>localhost|127\.0\.0\.1)"
)


def _local_master(subject: Subject) -> Iterator[Hit]:
    """Yield a rendezvous at which each node would wait for itself."""
    nodes = _flag_count(subject.script, "nodes") or 1
    if nodes == 1:
        return
    for number, line in _shell_lines(subject.script):
        if match := _LOCAL_MASTER.search(line):
            yield Hit(
                line=number,
                problem=f"{match['name']} is {match['host']}, and the job has {nodes} nodes",
                fix='write MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            )


def _shell_lines(script: Script) -> Iterator[tuple[int, str]]:
    """Yield the lines of a script that are no comments, with their numbers; a comment behind a command is cut off."""
    comments = {comment.line: comment.column for comment in script.comments}
    for number, line in enumerate(script.lines, 1):
        text = line[: comments.get(number, len(line))]
        if text.strip():
            yield number, text


_FIXED_PORT: Final = re.compile(
    r"(?<![\w-])(?P<name>MASTER_PORT|--master[-_]port|--main[-_]process[-_]port|--rdzv[-_]endpoint)"
    r"(?:=|[ \t]+)['\"]?(?P<host>[^\s'\":=]*:)?(?P<port>[1-9][0-9]{2,4})\b['\"]?"
)
_PORT_OF_THE_JOB: Final = "$((15000 + SLURM_JOB_ID % 15000))"


def _fixed_port(subject: Subject) -> Iterator[Hit]:
    """Yield a port for the rendezvous that another job may have on the same node."""
    script = subject.script
    if script.last_flag("exclusive") is not None:
        return
    for number, line in _shell_lines(script):
        match = _FIXED_PORT.search(line)
        if match is None:
            continue
        text = script.lines[number - 1]
        fixed = f"{text[: match.start()]}MASTER_PORT={_PORT_OF_THE_JOB}{text[match.end() :]}"
        yield Hit(
            line=number,
            problem=f"the ranks meet at port {match['port']} in every job",
            fix=f"write {match['name']}={match['host'] or ''}{_PORT_OF_THE_JOB}, another port in each job",
            edits=(Edit(line=number, lines=(fixed,)),) if match["name"] == "MASTER_PORT" else (),
        )


_SIGNAL: Final = re.compile(r"(?P<to>[BR]+:)?(?P<signal>[A-Za-z0-9]+)(?:@[0-9]+)?")


def _unheard_signal(subject: Subject) -> Iterator[Hit]:
    """Yield a warning before the time limit that reaches nobody who acts on it."""
    flag = subject.script.last_flag("signal")
    match = None if flag is None else _SIGNAL.fullmatch(flag.value or "")
    if flag is None or match is None:
        return
    name = signal_name(match["signal"])
    if "B" in (match["to"] or ""):
        yield from _signal_to_shell(subject.script, flag, name)
    else:
        yield from _signal_to_steps(subject.script, flag, name)


def _signal_to_shell(script: Script, flag: Flag, name: str) -> Iterator[Hit]:
    """Yield why the batch shell does not act on a signal, which reaches it alone."""
    launches = _launches_of(script)
    if any(launch.command.texts[0] == "exec" for launch in launches if launch.command.words):
        # The program takes the place of the shell.
        return
    traps = _traps_for(script, name)
    if not traps:
        to_steps = str(flag.value).rpartition(":")[2]
        yield Hit(
            line=flag.line,
            problem=f"--signal={flag.value} signals the batch shell alone, which has no trap for {name}, and ends",
            fix=f"write --signal={to_steps}, which signals what srun has started, or a trap that passes the signal on",
        )
    elif launches and not any(command.end == "&" for command in script.commands):
        yield Hit(
            line=launches[0].command.line,
            problem=f"bash runs the trap for {name} (line {traps[0].line}) only after this command has ended",
            fix="start it in the background, and wait for it: srun ... & wait $!",
        )


def _signal_to_steps(script: Script, flag: Flag, name: str) -> Iterator[Hit]:
    """Yield why nobody acts on a signal that reaches what srun has started, and not the batch shell."""
    launches = _launches_of(script)
    if launches and not any(launch.is_step or launch.kind == "mpirun" for launch in launches):
        yield Hit(
            line=flag.line,
            problem=f"--signal={flag.value} signals what srun has started, and the batch shell starts the program",
            fix="start the program with srun",
        )
    for trap in _traps_for(script, name):
        if "requeue" in _handler_text(script, trap):
            yield Hit(
                line=trap.line,
                problem=f"the trap for {name} requeues the job, and --signal={flag.value} signals what srun has "
                "started, not the batch shell",
                fix=f"write --signal=B:{flag.value}",
            )


def _traps_for(script: Script, name: str) -> list[Command]:
    """Return the traps of a script for a signal that run something."""
    return [
        command
        for command in script.commands
        if command.texts[:1] == ("trap",)
        and name in {signal_name(word) for word in command.texts[2:]}
        and command.texts[1] not in {"", "-", "--", "-p"}
    ]


def _handler_text(script: Script, trap: Command) -> str:
    """Return what a trap runs: its text, and the functions of the script that it calls."""
    texts = [trap.texts[1]]
    for statement in script.statements:
        name = re.match(r"(?:function\s+)?([A-Za-z_]\w*)", statement.text, re.ASCII)
        if statement.compound == "function" and name and re.search(rf"\b{name[1]}\b", trap.texts[1], re.ASCII):
            texts.append(statement.text)
    return "\n".join(texts)


def _exit_in_grace(subject: Subject) -> Iterator[Hit]:
    """Yield a trap for SIGTERM that lets a preempted job end as if its work was done."""
    script = subject.script
    flag = script.last_flag("requeue", "no-requeue")
    if flag is not None and flag.name == "no-requeue":
        return
    for trap in _traps_for(script, "TERM"):
        text = _handler_text(script, trap)
        if re.search(r"\bexit[ \t]+0\b", text) and "requeue" not in text:
            yield Hit(
                line=trap.line,
                problem="the trap for TERM ends the script with exit code 0",
                fix='let the script wait until Slurm ends it, call scontrol requeue "$SLURM_JOB_ID" in the trap, or '
                "write --no-requeue",
            )


_SECRET: Final = re.compile(
    r"(?:[A-Z0-9]+_)*(?:API_?KEY|TOKEN|SECRET|PASSWORD|PASSWD|ACCESS_KEY(?:_ID)?|SECRET_ACCESS_KEY)", re.ASCII
)
_USED: Final = re.compile(r"\$\{?([A-Z][A-Z0-9_]*)", re.ASCII)
_PLACEHOLDER: Final = re.compile(r"[<>$`{}*]|\.\.\.|your|xxx|here|changeme|secret|token|key", re.IGNORECASE)
_SHORTEST_SECRET: Final = 8


def _assigned(command: Command) -> Iterator[tuple[str, str]]:
    """Yield the variables that a command assigns, and their values."""
    exported = command.words[1:] if command.texts[:1] in {("export",), ("declare",), ("typeset",)} else ()
    for word in (*command.assignments, *exported):
        name, equals, value = word.text.partition("=")
        if equals:
            yield name, value


def _written_secret(subject: Subject) -> Iterator[Hit]:
    """Yield a key or a password that stands in the script."""
    for command in subject.script.commands:
        for name, value in _assigned(command):
            is_text = len(value) >= _SHORTEST_SECRET and _PLACEHOLDER.search(value) is None and "/" not in value
            if _SECRET.fullmatch(name) and is_text:
                yield Hit(
                    line=command.line,
                    problem=f"the value of {name} stands in the script",
                    fix=f"export {name} in the shell that you submit from, which sbatch passes on, or read a file that "
                    "only you can read",
                )


def _traced_secret(subject: Subject) -> Iterator[Hit]:
    """Yield the use of a secret while the shell prints every command."""
    script = subject.script
    is_traced = re.search(r"\s-[a-z]*x", script.shebang or "") is not None
    for command in script.commands:
        if command.texts[:1] == ("set",):
            is_traced = _traces(command, is_traced=is_traced)
        if not is_traced:
            continue
        words = " ".join(word.text for word in (*command.assignments, *command.words))
        used = [name for name in _USED.findall(words) if _SECRET.fullmatch(name)]
        assigned = [name for name, value in _assigned(command) if _SECRET.fullmatch(name) and value]
        for name in dict.fromkeys([*used, *assigned]):
            yield Hit(
                line=command.line,
                problem=f"set -x prints {name} with its value into the log",
                fix="call set +x before this line, and set -x behind it; or leave set -x out",
            )


def _traces(command: Command, *, is_traced: bool) -> bool:
    """Return whether the shell prints commands after a ``set``."""
    for word, following in pairwise((*command.texts[1:], "")):
        if re.fullmatch(r"-[a-wyzA-Z]*x[a-zA-Z]*", word) or (word == "-o" and following == "xtrace"):
            is_traced = True
        elif re.fullmatch(r"\+[a-wyzA-Z]*x[a-zA-Z]*", word) or (word == "+o" and following == "xtrace"):
            is_traced = False
    return is_traced


_RESUMES: Final = re.compile(r"resum|checkpoint|ckpt|restart|restore|snapshot|\blast\b|\blatest\b", re.IGNORECASE)


def _starts_over(subject: Subject) -> Iterator[Hit]:
    """Yield a requeue of a script in which nothing speaks of a checkpoint."""
    script = subject.script
    flag = script.last_flag("requeue", "no-requeue")
    if flag is None or flag.name != "requeue" or _RESUMES.search(script.text) or "hpcddp" in script.text:
        return
    yield Hit(
        line=flag.line,
        problem="--requeue is given, and no line of the script speaks of a checkpoint",
        fix="make sure that the program goes on from its newest checkpoint when it starts again, or write --no-requeue",
    )


def _expedited_exit(subject: Subject) -> Iterator[Hit]:
    """Yield an exit code with which Slurm holds a job that asks for an expedited requeue."""
    script = subject.script
    flag = script.last_flag("requeue")
    if flag is None or flag.value != "expedite":
        return
    for number, line in _shell_lines(script):
        if match := re.search(r"\bexit[ \t]+(\$\?|[\"']?\$\{?\w+\}?[\"']?|[1-9][0-9]*)", line):
            yield Hit(
                line=number,
                problem=f"the script ends with exit {match[1]}, and --requeue=expedite is given",
                fix="end with exit code 0 where the job is to go on, or write --requeue",
            )


def _no_wait(subject: Subject) -> Iterator[Hit]:
    """Yield work in the background for which nothing waits."""
    script = subject.script
    commands = list(script.commands)
    waits = [command.line for command in commands if command.texts[:1] == ("wait",)]
    last_wait = max(waits, default=0)
    in_background = [launch for launch in _launches_of(script) if launch.command.end == "&"]
    ignored = [launch for launch in in_background if launch.command.line > last_wait]
    if ignored and not any(launch.command.end != "&" for launch in _launches_of(script)):
        yield Hit(
            line=ignored[0].command.line,
            problem="the command runs in the background, and the script does not wait for it",
            fix="write wait in the last line",
        )


_FAILS_EARLY: Final = re.compile(r"set\s+(?:\S+\s+)*-(?:[a-zA-Z]*e|o\s+errexit)|trap\s+.*\bERR\b")
_KEEPS_CODES_OF_PIPES: Final = re.compile(r"\bpipefail\b|\bPIPESTATUS\b")
_USES_EXIT_CODE: Final = re.compile(r"\$\?|\bexit\b|\bwait\b[ \t]+\S|\bPIPESTATUS\b|\|\|")


def _lost_exit_code(subject: Subject) -> Iterator[Hit]:
    """Yield work whose exit code the script forgets."""
    script = subject.script
    launches = _launches_of(script)
    yield from _lost_in_a_pipe(script, launches)
    if launches and not _FAILS_EARLY.search(_shell_text(script)):
        yield from _lost_behind(script, launches)


def _lost_in_a_pipe(script: Script, launches: list[Launch]) -> Iterator[Hit]:
    if _KEEPS_CODES_OF_PIPES.search(_shell_text(script)):
        return
    for launch in launches:
        if launch.command.is_piped:
            yield Hit(
                line=launch.command.line,
                problem="a pipe has the exit code of its last command",
                fix="write set -o pipefail above it",
            )


def _lost_behind(script: Script, launches: list[Launch]) -> Iterator[Hit]:
    """Yield the last command of a script, if it follows the work and decides the exit code."""
    statements = [statement for statement in script.statements if statement.compound != "function"]
    works = [number for number, statement in enumerate(statements) if _contains(statement.commands, launches)]
    if not works:
        return
    work = statements[works[-1]]
    behind = statements[works[-1] + 1 :]
    rest = "\n".join(statement.text for statement in behind)
    if not behind or "||" in work.text or _USES_EXIT_CODE.search(rest):
        return
    yield Hit(
        line=behind[-1].line,
        problem=f"the script ends with the exit code of {behind[-1].text.split(maxsplit=1)[0]}, not with that of "
        f"the command in line {work.line}",
        fix="write set -e above that command, or keep its exit code: code=$? behind it, exit $code at the end",
    )


def _contains(commands: tuple[Command, ...], launches: list[Launch]) -> bool:
    return any(launch.command in commands for launch in launches)


def _script(*lines: str) -> str:
    return "\n".join(("#!/bin/bash", *lines, ""))


_TORCHRUN: Final = (
    'torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint="$MASTER_ADDR:$PORT" train.py'
)

RULES = (
    Rule(
        code="bash-syntax",
        severity=Severity.ERROR,
        otherwise="the job starts, runs the lines above the error, and ends there",
        sources=("bash(1), -n",),
        find=_bash_syntax,
        bad=Example(_script("if [ -d data ]; then", "    srun python train.py")),
        good=Example(_script("if [ -d data ]; then", "    srun python train.py", "fi")),
    ),
    Rule(
        code="srun-cpus",
        severity=Severity.WARNING,
        otherwise="with Slurm 22.05 to 23.02 srun counts one CPU for each task; where the site binds tasks to CPUs, "
        "the data loader's workers share it; other versions take the number from the job",
        sources=(
            "sbatch(1) of 22.05, --cpus-per-task",
            "https://github.com/SchedMD/slurm/blob/master/CHANGELOG/slurm-23.11.md",
            "measured on Slurm 22.05.8 and 24.11.5",
            "https://github.com/reframe-hpc/reframe/issues/2655",
            "https://github.com/NOAA-EMC/global-workflow/issues/2044",
        ),
        find=_step_cpus,
        bad=Example(_script("#SBATCH --cpus-per-task=8", "srun python train.py")),
        good=Example(
            _script("#SBATCH --cpus-per-task=8", 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" python train.py')
        ),
    ),
    Rule(
        code="launcher-in-each-task",
        severity=Severity.ERROR,
        otherwise="the node runs as many trainings, or ranks too many, which share its GPUs",
        sources=("https://github.com/interTwin-eu/itwinai/issues/360",),
        find=_launcher_in_each_task,
        bad=Example(_script("#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=4", f"srun {_TORCHRUN}")),
        good=Example(_script("#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", f"srun {_TORCHRUN}")),
    ),
    Rule(
        code="launcher-on-one-node",
        severity=Severity.ERROR,
        otherwise="the other nodes are idle, and a launcher that was told of them waits until it times out",
        sources=("sbatch(1), DESCRIPTION", "https://github.com/Lightning-AI/pytorch-lightning/pull/15011"),
        find=_launcher_on_one_node,
        bad=Example(_script("#SBATCH --nodes=2", _TORCHRUN)),
        good=Example(_script("#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", f"srun {_TORCHRUN}")),
    ),
    Rule(
        code="local-master",
        severity=Severity.ERROR,
        otherwise="the ranks of the other nodes wait for themselves until they time out",
        sources=("https://pytorch.org/docs/stable/distributed.html#environment-variable-initialization",),
        find=_local_master,
        bad=Example(_script("#SBATCH --nodes=2", "export MASTER_ADDR=localhost", "srun python train.py")),
        good=Example(
            _script(
                "#SBATCH --nodes=2",
                'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
                "srun python train.py",
            )
        ),
    ),
    Rule(
        code="fixed-port",
        severity=Severity.WARNING,
        otherwise="the second job on a node ends with EADDRINUSE, or joins the ranks of the first",
        sources=(
            "https://github.com/catalyst-team/catalyst/pull/716",
            "https://github.com/NVIDIA/enroot/issues/243",
        ),
        find=_fixed_port,
        bad=Example(_script("#SBATCH --gres=gpu:2", "export MASTER_PORT=29500", "srun python train.py")),
        good=Example(_script("#SBATCH --gres=gpu:2", f"export MASTER_PORT={_PORT_OF_THE_JOB}", "srun python train.py")),
    ),
    Rule(
        code="unheard-signal",
        severity=Severity.WARNING,
        otherwise="nothing saves before the time limit, although Slurm warns the job",
        sources=(
            "sbatch(1), --signal",
            "bash(1), SIGNALS",
            "https://github.com/martius-lab/cluster_utils/pull/84",
        ),
        find=_unheard_signal,
        bad=Example(_script("#SBATCH --signal=B:USR1@120", "srun python train.py")),
        good=Example(_script("#SBATCH --signal=USR1@120", "srun python train.py")),
    ),
    Rule(
        code="exit-in-grace",
        severity=Severity.WARNING,
        otherwise="before Slurm 24.05 a script that ends within the grace time of a preemption is COMPLETED, and not "
        "requeued",
        sources=("docs/slurm-versions.md, measured on Slurm 22.05.8 and 24.11.5",),
        find=_exit_in_grace,
        bad=Example(
            _script("#SBATCH --open-mode=append", "trap 'touch stop; exit 0' TERM", "srun python train.py & wait $!")
        ),
        good=Example(_script("#SBATCH --open-mode=append", "trap 'touch stop' TERM", "srun python train.py & wait $!")),
    ),
    Rule(
        code="secret-in-script",
        severity=Severity.ERROR,
        otherwise="Slurm keeps the script, and shows it to its administrators; who copies the script copies the secret",
        sources=("scontrol(1), write batch_script", "slurm.conf(5), AccountingStoreFlags"),
        find=_written_secret,
        bad=Example(_script("export WANDB_API_KEY=0123456789abcdef0123", "srun python train.py")),
        good=Example(_script('export WANDB_API_KEY=$(cat "$HOME/.wandb")', "srun python train.py")),
    ),
    Rule(
        code="traced-secret",
        severity=Severity.ERROR,
        otherwise="the log holds the secret, and others may read the log",
        sources=("bash(1), set -x",),
        find=_traced_secret,
        bad=Example(
            _script("set -ex", 'curl -H "Authorization: Bearer $HF_TOKEN" https://example.org', "srun python train.py")
        ),
        good=Example(
            _script("set -e", 'curl -H "Authorization: Bearer $HF_TOKEN" https://example.org', "srun python train.py")
        ),
    ),
    Rule(
        code="requeue-starts-over",
        severity=Severity.NOTE,
        otherwise="a program that does not resume repeats all of its steps after each requeue",
        sources=("sbatch(1), --requeue",),
        find=_starts_over,
        bad=Example(_script("#SBATCH --requeue", "#SBATCH --open-mode=append", "srun python train.py")),
        good=Example(_script("#SBATCH --requeue", "#SBATCH --open-mode=append", "srun python train.py --resume auto")),
    ),
    Rule(
        code="expedited-exit",
        severity=Severity.WARNING,
        otherwise="since Slurm 25.11 the job is requeued and held after any exit code but 0, and runs again only when "
        "somebody releases it",
        sources=("sbatch(1) of 25.11, --requeue",),
        find=_expedited_exit,
        bad=Example(
            _script(
                "#SBATCH --requeue=expedite", "#SBATCH --open-mode=append", "srun python train.py --resume || exit 75"
            )
        ),
        good=Example(
            _script("#SBATCH --requeue", "#SBATCH --open-mode=append", "srun python train.py --resume || exit 75")
        ),
    ),
    Rule(
        code="no-wait",
        severity=Severity.ERROR,
        otherwise="the batch script ends at once, and Slurm ends what it has started",
        sources=("sbatch(1), DESCRIPTION", "slurm.conf(5), KillWait"),
        find=_no_wait,
        bad=Example(_script("srun python train.py &")),
        good=Example(_script("srun python train.py &", "wait $!")),
    ),
    Rule(
        code="lost-exit-code",
        severity=Severity.WARNING,
        otherwise="a training that failed is COMPLETED for Slurm: jobs with --dependency=afterok start, and no mail "
        "tells of the failure",
        sources=("bash(1), EXIT STATUS", "sbatch(1), --dependency"),
        find=_lost_exit_code,
        bad=Example(_script("srun python train.py", "echo done")),
        good=Example(_script("set -e", "srun python train.py", "echo done")),
    ),
)
"""The rules about shell lines."""
