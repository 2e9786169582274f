"""Ranks that compile nothing do not load torch's compiler, which takes as long as torch itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import rank
from tests.distributed.training import job_document, run_ranks

_LOADED = 50
LEFT_OUT = pytest.mark.depends_on(
    "hpcddp/train/model/replica.py", "tests/distributed/test_compiler.py", "pyproject.toml"
)
# Code that compiles something gets the compiler itself, also after a training has left it out.
_COMPILES = """
import torch
from hpcddp.train.model.replica import leave_compiler_out

leave_compiler_out()
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.AdamW(model.parameters())
graphs = []

def backend(graph, inputs):
    graphs.append(graph)
    return graph

@torch.compiler.disable
def opaque(x):
    return x

compiled = torch.compile(lambda x: opaque(model(x)) + 1, backend=backend)
compiled(torch.ones(2, 3)).sum().backward()
optimizer.step()
assert torch._dynamo.utils.counters["graph_break"], "disable() had no effect"
print(len(graphs))
"""


def train_and_look(plan: Path, number: int) -> int:
    code = rank.main(plan, number)
    return _LOADED if "torch._dynamo.eval_frame" in sys.modules else code


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_two_ranks_train_stop_and_resume_without_the_compiler(name: str, tmp_path: Path) -> None:
    job = {"run": tmp_path / "run", "spec": job_document(train__optimizer={"name": name}, train__epochs=2)}
    outcome = run_ranks(
        tmp_path / "ranks", 2, [{**job, "stop_after_calls": 1}, {**job, "attempt": 1}], main=train_and_look
    )
    assert outcome.codes == [0, 0], outcome.outputs
    assert "all ranks stopped after step 3" in outcome.outputs[0]
    assert "finished: 8 steps" in outcome.outputs[0]


# A rank whose peers have died opens a second process group, and must not wait for the compiler to load.
_OPENS_TWO_GROUPS = """
import sys
import torch.distributed as dist
from hpcddp.train.model.replica import leave_compiler_out

leave_compiler_out()
for _ in range(2):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
print("torch._dynamo.eval_frame" in sys.modules)
"""


@LEFT_OUT
def test_a_second_process_group_does_not_load_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", _OPENS_TWO_GROUPS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


_LOOKS_AT_ALL_MODULES = """
import inspect, sys, unittest, warnings
from hpcddp.train.model.replica import leave_compiler_out

leave_compiler_out()
inspect.getmodule(sys._getframe())
with unittest.TestCase().assertWarns(UserWarning):
    warnings.warn("noticed")
print("torch._dynamo.eval_frame" in sys.modules)
# This looks at all modules while it is imported: the compiler would be a circular import.
import torch.distributed.tensor
"""


@LEFT_OUT
def test_who_looks_at_all_modules_does_not_load_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", _LOOKS_AT_ALL_MODULES], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@LEFT_OUT
def test_code_that_compiles_finds_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", _COMPILES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2\n"
