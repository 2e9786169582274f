from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import pytest

from hpcddp.jobfile.read import ResolvedJob
from hpcddp.jobfile.write import dump_job, parse_resolved
from hpcddp.stop import faults
from tests.facts import assert_facts

Refuse = Callable[..., list[str]]
Load = Callable[..., ResolvedJob]

TOP = "name: a\nbatch: {global_batch_size: 64}\n"


def train(more: str) -> str:
    return f"{TOP}train: {{model: resnet18, dataset: digits, {more}}}\n"


BETWEEN = {
    "resources: {gpus_per_node: 4, tasks_per_node: 2}": (
        "resources.tasks_per_node: is 2",
        "resources.gpus_per_node is 4",
        "write 4, or leave it out",
    ),
    "resources: {gpu_type: a100}": ("resources.gpu_type: is a100", "set resources.gpus_per_node"),
    "resources: {mem_per_gpu: 8G}": ("resources.mem_per_gpu: is 8G", "set resources.gpus_per_node"),
    "resources: {gpus_per_node: 2, gpu_request: none, mem_per_gpu: 8G}": (
        "resources.mem_per_gpu: is 8G",
        "resources.gpu_request is none",
        "leave one of the two out",
    ),
    "resources: {mem: 8G, mem_per_cpu: 1G}": ("resources.mem_per_cpu: is 1G", "resources.mem", "keep one of them"),
    "requeue: {signal_lead: 20h}": ("requeue.signal_lead: is 20h", "65535s", "write less"),
    "requeue: {signal_lead: 5min}\nresources: {time_limit: 5}": (
        "requeue.signal_lead: is 5min",
        "00:05:00 (resources.time_limit)",
        "write requeue.signal_lead: 150s or null",
    ),
    "resources: {nodes: 2, min_nodes: 1}": (
        "resources.min_nodes: is given",
        "no job goes on without a lost node yet",
        "leave it out: the job is requeued",
    ),
    "resources: {nodes: 2, spare_nodes: 1}": (
        "resources.spare_nodes: is given",
        "no job goes on without a lost node yet",
        "leave it out: the job is requeued",
    ),
    "learning_rate: {schedule: step}": ("learning_rate.milestones: is empty", "write the epochs", "[30, 60, 80]"),
    "learning_rate: {milestones: [3]}": (
        "learning_rate.milestones: is given",
        "constant",
        "remove it, or write schedule: step",
    ),
    "learning_rate: {gamma: 0.5}": ("learning_rate.gamma: is given", "constant", "remove it, or write schedule: step"),
    "learning_rate: {schedule: step, milestones: [60, 30]}": (
        "learning_rate.milestones: is [60, 30]",
        "increasing epochs of at least 1",
        "sort them",
    ),
    "learning_rate: {min: 0.01}": ("learning_rate.min: is given", "remove it, or write schedule: cosine"),
    "learning_rate: {schedule: cosine, min: 0.5}": (
        "learning_rate.min: is 0.5, above learning_rate.base 0.1",
        "write less than that",
    ),
    "environment: {pass_env: [UID]}": ("environment.pass_env: names UID", "remove it"),
    "environment: {env: {hpcddp_code: x}}": ("environment.env.hpcddp_code: names hpcddp_code", "rename it"),
    "environment: {env: {HPCDDP_X: x}}": ("environment.env.HPCDDP_X: names HPCDDP_X", "rename it"),
    "environment: {env: {A: x}, pass_env: [A]}": (
        "environment.pass_env: names A",
        "environment.env",
        "keep one of the two",
    ),
}
IN_TRAIN = {
    "device: cuda": ("train.device: is cuda", "set resources.gpus_per_node, or write cpu"),
    "precision: fp16": ("train.precision: is fp16", "write bf16 or fp32", "ask for GPUs"),
    "precision: tf32": ("train.precision: is tf32", "write bf16 or fp32", "ask for GPUs"),
    "num_classes: 5": ("train.num_classes: is 5", "digits has 10 classes", "write 10 or more", "leave it out"),
    "model_args: {num_classes: 10}": ("train.model_args.num_classes: is given", "write train.num_classes"),
    "dataset_args: {size: 3}": ("train.dataset_args.size: is not an argument of dataset digits", "remove it"),
    "optimizer: {nesterov: true}": (
        "train.optimizer.nesterov: is true",
        "momentum is 0",
        "set train.optimizer.momentum, for example 0.9",
    ),
    "optimizer: {name: adamw, momentum: 0.9}": ("train.optimizer.momentum: is given", "remove it, or write name: sgd"),
    "optimizer: {eps: 1e-6}": ("train.optimizer.eps: is given", "remove it, or write name: adamw"),
    "loss_reduction: sum": ("train.loss_reduction: is sum", "train.loss", "name one"),
    "loss: 'a.b:c', label_smoothing: 0.2": (
        "train.label_smoothing: is 0.2",
        "train.loss",
        "smooth labels in it, and write 0",
    ),
}


@pytest.mark.parametrize(("more", "facts"), BETWEEN.items(), ids=BETWEEN)
def test_fields_that_do_not_fit_together_are_refused(more: str, facts: tuple[str, ...], refuse: Refuse) -> None:
    (line,) = refuse(f"{more}\n")
    assert_facts(line, *facts)


@pytest.mark.parametrize(
    ("work", "facts"),
    [
        (
            "train: {model: resnet18, dataset: digits}\nbatch: {global_batch_size: 8}",
            ("checkpoint.best: is val_acc", "did you mean val_accuracy?"),
        ),
        (
            "command: [python, a.py]",
            ("checkpoint.best: is val_acc", "remove it", "hpcddp.Checkpointer", "best='val_acc'"),
        ),
    ],
)
def test_best_of_a_metric_that_does_not_exist_is_refused(work: str, facts: tuple[str, ...], refuse: Refuse) -> None:
    (line,) = refuse(good=f"name: a\n{work}\ncheckpoint: {{best: val_acc}}\n")
    assert_facts(line, *facts)


def test_best_is_written_as_it_was_given(load: Load) -> None:
    for written in ("val_loss", {"metric": "val_f1", "mode": "max"}):
        job = f"name: a\nentrypoint: a.b:c\ncheckpoint: {{best: {json.dumps(written)}}}\n"
        spec = load(good=job).spec
        text = dump_job(spec, environment_values=True)
        assert spec.model_dump(mode="json")["checkpoint"]["best"] == written
        assert parse_resolved(text) == spec


def test_a_command_may_name_trackers(load: Load) -> None:
    assert load(good="name: a\ncommand: [a]\ntrackers: {use: [wandb]}\n").spec.trackers.use == ("wandb",)


OF_LAUNCHERS = {
    "launcher: torchrun\ncommand: [python, a.py]": (
        "launcher: is torchrun",
        "write for example command: [torchrun, train.py]",
        "leave launcher out",
    ),
    "launcher: accelerate\ncommand: [torchrun, a.py]": (
        "launcher: is accelerate",
        "write for example command: [accelerate, launch, train.py]",
        "leave launcher out",
    ),
    "launcher: torchrun\ncommand: [torchrun, --standalone, a.py]": (
        "launcher: is torchrun",
        "--standalone",
        "leave one of the two out",
    ),
    "command: [torchrun, --nproc-per-node, '2', a.py]\nresources: {gpus_per_node: 4}": (
        "command: has --nproc-per-node 2",
        "4 ranks on each node",
        "write --nproc-per-node 4, or leave it out",
    ),
    "command: [torchrun, --nproc-per-node=gpu, a.py]\nresources: {tasks_per_node: 2}": (
        "command: has --nproc-per-node gpu",
        "2 ranks on each node",
        "write --nproc-per-node 2, or leave it out",
    ),
    "command: [torchrun, --nnodes=1, a.py]\nresources: {nodes: 2}": (
        "command: has --nnodes 1",
        "resources.nodes is 2",
        "write the same number",
        "leave --nnodes out",
    ),
    "command: [accelerate, launch, --num_processes, '3', a.py]\nresources: {nodes: 2}": (
        "command: has --num_processes 3",
        "2 ranks in all",
        "write --num_processes 2, or leave it out",
    ),
}


@pytest.mark.parametrize(("more", "facts"), OF_LAUNCHERS.items(), ids=OF_LAUNCHERS)
def test_a_launcher_that_does_not_fit_the_job_is_refused(more: str, facts: tuple[str, ...], refuse: Refuse) -> None:
    (line,) = refuse(good=f"name: a\n{more}\n")
    assert_facts(line, *facts)


@pytest.mark.parametrize(("more", "facts"), IN_TRAIN.items(), ids=IN_TRAIN)
def test_a_training_that_cannot_be_is_refused(more: str, facts: tuple[str, ...], refuse: Refuse) -> None:
    (line,) = refuse(good=train(more))
    assert_facts(line, f"job.yaml:3: {facts[0]}", *facts[1:])


def test_a_synthetic_data_set_names_its_arguments(refuse: Refuse) -> None:
    good = f"{TOP}train: {{model: resnet18, dataset: synthetic, dataset_args: {{sample: 3, x: 1}}}}\n"
    nearly, unknown = refuse(good=good)
    assert_facts(nearly, "job.yaml:3: train.dataset_args.sample", "dataset synthetic", "did you mean samples?")
    assert_facts(unknown, "job.yaml:3: train.dataset_args.x", "samples, val_samples, image_size, num_classes")


@pytest.mark.parametrize("value", ["0", "-3", "1.5", "true", "'3'", "null"])
@pytest.mark.parametrize("name", ["samples", "num_classes"])
def test_a_size_of_a_data_set_is_a_whole_number_from_1_on(name: str, value: str, refuse: Refuse) -> None:
    good = f"{TOP}train: {{model: resnet18, dataset: synthetic, dataset_args: {{{name}: {value}}}}}\n"
    (line,) = refuse(good=good)
    assert_facts(line, f"job.yaml:3: train.dataset_args.{name}: is no whole number from 1 on", "write one")


def test_a_size_without_a_number_for_its_default_may_be_null(load: Load) -> None:
    train = "{model: resnet18, dataset: imagefolder, data_dir: /data, dataset_args: {resize: null}}"
    assert load(good=f"{TOP}train: {train}\n").spec.train is not None


def test_split_is_not_for_the_user_to_pass(refuse: Refuse) -> None:
    good = f"{TOP}train: {{model: resnet18, dataset: 'a:b', dataset_args: {{split: train}}}}\n"
    (line,) = refuse(good=good)
    assert_facts(line, "job.yaml:3: train.dataset_args.split: is given", "remove it")


@pytest.mark.parametrize(
    "more",
    [
        "resources: {gpus_per_node: 2, tasks_per_node: 2, gpu_type: nvidia_a100_1g.10gb, mem_per_gpu: 8G}",
        "resources: {gpus_per_node: 2, gpu_request: none}",
        "resources: {time_limit: unlimited}",
        "resources: {time_limit: 1}",
        "resources: {time_limit: 1}\nrequeue: {signal_lead: null}",
        "learning_rate: {schedule: step, milestones: [1, 2], gamma: 0.5, min: 0.001}",
        "environment: {env: {A: '', B: \"a\\nb\"}, pass_env: [C]}",
        "checkpoint: {every: {epochs: 1}}",
        "checkpoint: {best: val_top5}",
        "checkpoint: {best: {metric: val_loss, mode: max}}",
    ],
)
def test_fields_that_fit_together_pass(more: str, load: Load) -> None:
    load(f"{more}\n")


def test_a_training_on_gpus_need_not_request_them_by_number(load: Load) -> None:
    spec = load("resources: {gpus_per_node: 2, gpu_request: none}\n", good=train("epochs: 1, device: cuda")).spec
    assert (spec.world_size, spec.device) == (2, "cuda")


def test_the_default_warning_comes_at_half_of_a_limit_that_is_shorter(load: Load) -> None:
    assert load("resources: {time_limit: 1}\n").spec.signal_lead == timedelta(seconds=30)
    assert load("resources: {time_limit: 3}\n").spec.signal_lead == timedelta(seconds=120)
    assert load("resources: {time_limit: 1}\nrequeue: {signal_lead: null}\n").spec.signal_lead is None


@pytest.mark.parametrize("dataset", ["cifar10", "imagefolder"])
def test_augment_is_true_or_false(dataset: str, refuse: Refuse) -> None:
    good = f"{TOP}train: {{model: resnet18, dataset: {dataset}, data_dir: d, dataset_args: {{augment: 1}}}}\n"
    (line,) = refuse(good=good)
    assert_facts(line, "job.yaml:3: train.dataset_args.augment: is neither true nor false", "write one of them")


def test_faults_on_purpose_are_the_one_variable_of_ours_that_a_job_file_may_set(load: Load) -> None:
    job = load("environment: {env: {HPCDDP_FAULTS: 'kill@step:3'}}\n")
    assert job.spec.environment.env == {faults.VARIABLE: "kill@step:3"}
