"""The nodes of a job that keeps running when it loses some: whether enough are left, and which spare one is next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from hpcddp.slurm.rank_env import task_on_other_node


class JobNodes:
    """The nodes of a job.

    Args:
        names: their names in Slurm.
        min_nodes: how many must be left, spare ones included.
        slurm_answers: whether slurmctld answers, as on the side of a broken network that keeps the job.
    """

    def __init__(self, names: Sequence[str], *, min_nodes: int, slurm_answers: Callable[[], bool]) -> None:
        self._min_nodes = min_nodes
        self._slurm_answers = slurm_answers
        self._used: set[str] = set()
        self._spare = list(names)
        self._replaced: dict[str, str] = {}
        self._lost: set[str] = set()

    def use(self, node: str) -> None:
        """Note that a rank runs on a node, which is then not a spare one."""
        self._used.add(node)
        if node in self._spare:
            self._spare.remove(node)

    def lose(self, nodes: Collection[str]) -> None:
        """Note that nodes are lost."""
        self._lost.update(nodes)

    def why_too_few(self, answering: Collection[str]) -> str | None:
        """Return why the ranks that are left must not go on, or None if they may.

        Args:
            answering: their nodes. All ranks of another node may have died, which is not lost for that.
        """
        nodes = self._used.union(self._replaced.values())
        left = nodes - self._lost
        if len(left) + len(self._spare) < self._min_nodes:
            return f"a node was lost, and {len(left)} of {len(nodes)} are too few"
        is_majority = 2 * len(answering) > len(self._used)
        if not is_majority and not self._slurm_answers():
            return "other nodes do not answer, nor does Slurm: these may be the nodes that the job has lost"
        return None

    def task_elsewhere(self, task: Mapping[str, str]) -> Mapping[str, str] | None:
        """Return the task on the spare node that takes the place of its lost node; None if no spare node is left.

        Args:
            task: the variables of srun of the task.
        """
        node = task["SLURMD_NODENAME"]
        if node not in self._replaced:
            if not self._spare:
                return None
            self._replaced[node] = self._spare.pop(0)
        return task_on_other_node(task, self._replaced[node])
