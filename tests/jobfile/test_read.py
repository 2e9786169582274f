from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from hpcddp.jobfile.fields import Every
from hpcddp.jobfile.job import leaf_paths
from hpcddp.jobfile.problems import JobFileError
from hpcddp.jobfile.read import ResolvedJob, load_job
from hpcddp.jobfile.units import TimeLimit
from tests.facts import assert_facts
from tests.messages import GoldenMessages

Load = Callable[..., ResolvedJob]
Refuse = Callable[..., list[str]]

# The block of the product's description.
PRODUCT = """\
name: resnet50-imagenet
run_root: runs                  # on a file system that every node sees
profile: null                   # a cluster profile's name; null = the default one
resources:
  nodes: 2
  gpus_per_node: 4              # 0 = CPU job (gloo)
  gpu_type: null                # a100 -> --gres=gpu:a100:4
  tasks_per_node: null
  cpus_per_task: 8
  mem: 64G                      # or mem_per_cpu, or mem_per_gpu; one of them, or none
  time_limit: "12:00:00"
  partition: null
  sbatch: {}                    # any other sbatch flag, e.g. {switches: 1}
environment:
  modules: []
  setup: []
  env: {}
  pass_env: [WANDB_API_KEY]     # secrets: by name only, never written into the script
  python: null
  container: null
batch:
  global_batch_size: 1024
  max_per_device_batch_size: null
  grad_accum_steps: null
  per_device_batch_size: null
  tail: keep
  split: exact
  order: keyed
  unit: sample
learning_rate:
  base: 0.1
  base_global_batch_size: 256
  rule: none
  warmup_epochs: 5
  schedule: cosine
  min: 0.0
train:
  model: resnet50
  model_args: {}
  dataset: imagefolder
  dataset_args: {}
  num_classes: null
  data_dir: /data/imagenet
  epochs: 90
  optimizer: {name: sgd, momentum: 0.9, weight_decay: 5.0e-5, nesterov: false}
  device: null
  precision: fp32
  batch_norm: local
  compile: false
  channels_last: true
  label_smoothing: 0.0
  clip_grad_norm: null
  ema_decay: null
  num_workers: null
  eval_every: 1
  nonfinite_loss: stop
  deterministic: false
  replica_check_every: null
  seed: 0
checkpoint:
  every: 10min
  keep: 3
requeue:
  causes: [preemption, time_limit, node_failure]
  signal_lead: 120s
  command_signal: null
  max_preemptions: null
  max_time_limits: 50
  max_failures: 0
  max_attempts_without_progress: 2
  avoid_failed_nodes: false
launch: {rendezvous_timeout: 5min, hang_timeout: 5min}
sweep: null
"""


def test_the_whole_job_file_of_the_product_is_accepted(load: Load) -> None:
    spec = load(good=PRODUCT).spec
    assert (spec.world_size, spec.tasks_per_node, spec.device, spec.uses_gpus) == (8, 4, "cuda", True)
    assert spec.resources.time_limit == TimeLimit(12 * 3600)
    assert spec.requeue.signal_lead == timedelta(seconds=120)
    assert spec.checkpoint.every == Every(duration=timedelta(minutes=10))
    assert spec.train is not None
    assert spec.train.optimizer.weight_decay == 5e-5


def test_every_leaf_field_has_an_origin(load: Load, tmp_path: Path) -> None:
    (tmp_path / "default.yaml").write_text("resources: {partition: gpu}\n", encoding="utf-8")
    job = load("resources: {nodes: 2}\n", sets=("train.epochs=3",), profiles=tmp_path)
    assert set(job.origins) == {".".join(path) for path, _ in leaf_paths(job.spec)}
    assert job.origins["name"] == "job file"
    assert job.origins["resources.nodes"] == "job file"
    assert job.origins["resources.partition"] == "profile default"
    assert job.origins["train.epochs"] == "--set"
    assert job.origins["train.seed"] == "default"


def test_every_name_in_an_open_mapping_has_an_origin_of_its_own(load: Load, tmp_path: Path) -> None:
    (tmp_path / "default.yaml").write_text('environment: {env: {A: "1", B: "1"}}\n', encoding="utf-8")
    job = load("environment: {env: {B: '2'}}\n", sets=('environment.env.C="3"',), profiles=tmp_path)
    assert job.spec.environment.env == {"A": "1", "B": "2", "C": "3"}
    origins = {key: origin for key, origin in job.origins.items() if key.startswith("environment.env.")}
    assert origins == {
        "environment.env.A": "profile default",
        "environment.env.B": "job file",
        "environment.env.C": "--set",
    }


def test_a_section_whose_lines_are_commented_out_is_empty(load: Load) -> None:
    spec = load("resources:\n  # nodes: 2\nenvironment:\n  modules:\n  env:\n").spec
    assert (spec.resources.nodes, spec.environment.modules, spec.environment.env) == (1, (), {})


def test_a_byte_order_mark_is_no_part_of_the_first_key(load: Load) -> None:
    good = "\ufeffname: a\nbatch: {global_batch_size: 8}\ntrain: {model: vgg11, dataset: digits}\n"
    assert load(good=good).spec.name == "a"


def test_all_errors_are_found_at_once_those_of_types_and_those_between_fields(refuse: Refuse) -> None:
    more = (
        "resources:\n  nodes: 16\n  gpus: 4\n  cpus_per_task: none\n"
        "train:\n  model: resnet18\n  dataset: cifar10\n  epochs: 0\n  precision: fp16\n"
    )
    lines = refuse(more, good="name: a job\nbatch: {global_batch_size: 8}\n", sets=("train.sed=1",))
    *in_file, override = lines
    assert [line.split(": ")[:2] for line in in_file] == [
        ["job.yaml:1", "name"],
        ["job.yaml:2", "batch.global_batch_size"],
        ["job.yaml:5", "resources.gpus"],
        ["job.yaml:6", "resources.cpus_per_task"],
        ["job.yaml:7", "train.data_dir"],
        ["job.yaml:10", "train.epochs"],
        ["job.yaml:11", "train.precision"],
    ]
    assert_facts(override, "--set train.sed", "did you mean train.seed?")


def test_a_rule_says_nothing_about_a_field_that_is_wrong_already(refuse: Refuse) -> None:
    good = "name: a\nbatch: {global_batch_size: -1}\ntrain: {model: resnet18, dataset: digits}\n"
    (line,) = refuse("resources: {nodes: 3}\n", good=good)
    assert_facts(line, "job.yaml:2: batch.global_batch_size: is -1", "write 1 or more")


@pytest.mark.parametrize(
    "more",
    [
        "environment: {env: {TOKEN: 31415926}}\n",
        "environment: {env: {1TOKEN: hunter2}}\n",
        "environment: {env: TOKEN=hunter2}\n",
        "environment: TOKEN=hunter2\n",
        "environment: {setup: export TOKEN=hunter2}\n",
        'environment: {env: {TOKEN: "hunter2\\0"}}\n',
        "environment: {env: {TOKEN: *hunter2}}\n",
        "environment: {env: {TOKEN: &hunter2}}\n",
        "environment: {env: {TOKEN: !hunter2}}\n",
        "environment: {env: {TOKEN: @hunter2}}\n",
        "environmnt: {env: {TOKEN: hunter2}}\n",
        "env: {TOKEN: hunter2}\n",
    ],
)
def test_a_value_of_the_environment_is_never_repeated(more: str, load: Load) -> None:
    with pytest.raises(JobFileError) as caught:
        load(more)
    printed = f"{caught.value} {caught.value.as_json()}"
    assert "hunter2" not in printed
    assert "31415926" not in printed


def test_a_problem_is_one_line_whatever_its_key_holds(refuse: Refuse) -> None:
    (line,) = refuse('"a\\n\\e[31m": 1\n')
    assert line.startswith("job.yaml:4: a\\n\\x1b[31m: ")


def test_the_error_survives_a_process_border(load: Load) -> None:
    with pytest.raises(JobFileError) as caught:
        load("epochs: 3\n")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.problems) == (str(caught.value), caught.value.problems)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, golden: GoldenMessages) -> None:
    with pytest.raises(JobFileError) as caught:
        load_job(tmp_path / ("n" * 300))
    assert_facts(golden.message(caught.value), "File name too long", "check the path")
    with pytest.raises(JobFileError) as caught:
        load_job(Path("/nowhere/job.yaml"))
    assert_facts(golden.message(caught.value), "/nowhere/job.yaml: does not exist", "check the path")
    with pytest.raises(JobFileError) as caught:
        load_job(Path("a\0b"))
    assert_facts(golden.message(caught.value), "a\\x00b: is not a valid path", "check it")


def test_a_script_is_told_from_a_job_file(tmp_path: Path, golden: GoldenMessages) -> None:
    script = tmp_path / "old.sbatch"
    script.write_text("#!/bin/bash\nsrun x\n")
    with pytest.raises(JobFileError) as refused:
        load_job(script)
    assert f"as in: -- bash {script}" in golden.message(refused.value)


@pytest.mark.parametrize("text", ["#!/bin/bash\n#SBATCH -N 2\nsrun x\n", "#SBATCH -N 2\nsrun x\n"])
def test_a_script_for_sbatch_is_answered_with_the_command_that_reads_it(
    tmp_path: Path, text: str, golden: GoldenMessages
) -> None:
    script = tmp_path / "old job.sbatch"
    script.write_text(text)
    with pytest.raises(JobFileError) as refused:
        load_job(script)
    assert f"hpcddp init --from '{script}'" in golden.message(refused.value)
