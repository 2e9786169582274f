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

    def use(self, node: str) -> None:
        """Note that a rank runs on a node, which is no spare one then."""
        self._used.add(node)
        if node in self._spare:
            self._spare.remove(node)

    def why_too_few(self, left: Collection[str]) -> str | None:
        """Return why the ranks on the nodes that are left must not go on, or None if they may.

        Args:
            left: the nodes with ranks that are left.
        """
        if len(left) + len(self._spare) < self._min_nodes:
            return f"a node was lost, and {len(left)} of {len(self._used)} are too few"
        is_majority = 2 * len(left) > len(self._used)
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
