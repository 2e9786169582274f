"""Measure the throughput of ResNet-50 on one GPU beside loops that people write, with the share of its kernels.

    python -m benchmarks.gpu [--rounds 3] [--output FILE] [--small]

Contenders, with images of 224 x 224 and 1,000 classes, each in a process of its own:

    hpcddp     the built-in training: bf16, channels_last
    by hand    a tuned loop: the same, fused SGD, cudnn.benchmark, normalisation on the device, no wait in each step
    reference  the defaults of torchvision's reference script: fp32, the loss read in each step

Cases: synthetic images in the memory of the device, the same with torch.compile (without the reference script, which
has no such option), and JPEG files of 500 x 375 pixels. The value is the time per image of the steps after the first
third, in which kernels are chosen and compiled. ``profile`` is one more training of hpcddp under
torch.profiler: the share of the time in which a kernel runs, the rest being gaps in which the device waits for the
host, and the time for which a save stops the training. ``--small`` runs all of it on the CPU with images of 32 x 32, to
see that it works.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms

from benchmarks.data import MEAN, STD, write_images
from benchmarks.step import train_here
from benchmarks.turns import Case, in_turn, report
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import read_events

WAYS: Final = ("hpcddp", "by hand", "reference")
CLASSES: Final = 1000


class Size:
    """Sizes of the measurement: those of a GPU, or small ones for a CPU."""

    def __init__(self, *, small: bool) -> None:
        self.device = torch.device("cpu" if small else "cuda")
        self.image, self.batch, self.steps, self.workers = (32, 4, 6, 0) if small else (224, 256, 45, 14)
        self.files = self.batch * self.steps


def with_hpcddp(size: Size, source: str, directory: Path, *, compiled: bool) -> list[float]:
    """Train with the built-in training, and return the time at the end of each step."""
    data: dict[str, Any] = (
        {
            "dataset": "synthetic",
            "dataset_args": {
                "samples": size.files, "val_samples": size.batch, "image_size": size.image, "num_classes": CLASSES,
            },
        }
        if source == "synthetic"
        else {"dataset": "imagefolder", "data_dir": source, "dataset_args": {"image_size": size.image}}
    )  # fmt: skip
    document = {
        "name": "gpu",
        "resources": {"gpus_per_node": int(size.device.type == "cuda"), "tasks_per_node": 1},
        "batch": {"global_batch_size": size.batch},
        "learning_rate": {"base": 0.1},
        "trackers": {"use": []},
        "train": {
            "model": "resnet50", "num_classes": CLASSES, **data, "num_workers": size.workers, "precision": "bf16",
            "channels_last": True, "compile": compiled, "optimizer": {"name": "sgd", "momentum": 0.9},
        },
    }  # fmt: skip
    run = RunDirectory(directory)
    train_here(document, run, size.device)
    records = map(json.loads, run.metrics.read_text().splitlines())
    return [record["time"] for record in records if "loss" in record]


def by_hand(size: Size, source: str, *, compiled: bool, tuned: bool) -> list[float]:
    """Train in a loop, and return the time at the end of each step."""
    torch.backends.cudnn.benchmark = tuned
    layout = torch.channels_last if tuned else torch.contiguous_format
    model: nn.Module = models.resnet50(num_classes=CLASSES).to(size.device, memory_format=layout)
    forward: Callable[[Tensor], Tensor] = torch.compile(model) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=tuned)
    mean, std = (torch.tensor(values, device=size.device).view(1, 3, 1, 1) for values in (MEAN, STD))
    times = []
    for inputs, labels in batches(size, source, as_bytes=tuned):
        images, targets = (part.to(size.device, non_blocking=True) for part in (inputs, labels))
        if images.dtype == torch.uint8:
            images = (images.float() / 255 - mean) / std
        images = images.to(memory_format=layout)
        optimizer.zero_grad()
        with torch.autocast(size.device.type, torch.bfloat16, enabled=tuned):
            loss = functional.cross_entropy(forward(images), targets)
        torch.autograd.backward(loss)
        optimizer.step()
        if not tuned:
            loss.item()
        times.append(time.time())
    if size.device.type == "cuda":
        torch.cuda.synchronize()
    times[-1] = time.time()
    return times


def batches(size: Size, source: str, *, as_bytes: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of an epoch."""
    if source == "synthetic":
        images = torch.randn(size.batch, 3, size.image, size.image, device=size.device)
        labels = torch.arange(size.batch, device=size.device) % CLASSES
        yield from ((images, labels) for _ in range(size.steps))
        return
    to_tensor = [transforms.PILToTensor()] if as_bytes else [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    transform = transforms.Compose(
        [transforms.RandomResizedCrop(size.image), transforms.RandomHorizontalFlip(), *to_tensor]
    )
    data = datasets.ImageFolder(str(Path(source) / "train"), transform)
    yield from DataLoader(
        data, batch_size=size.batch, shuffle=True, drop_last=True, num_workers=size.workers,
        pin_memory=size.device.type == "cuda", persistent_workers=size.workers > 0,
    )  # fmt: skip


def run_one(way: str, size: Size, source: str, *, compiled: bool, profiled: bool) -> None:
    """Run a contender in this process, and print its result as JSON."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with tempfile.TemporaryDirectory() as name:
        dist.init_process_group("nccl" if size.device.type == "cuda" else "gloo")
        if way != "hpcddp":
            times = by_hand(size, source, compiled=compiled, tuned=way == "by hand")
            found: dict[str, Any] = {}
        elif profiled:
            times, found = _profiled(size, source, Path(name), compiled=compiled)
        else:
            times, found = with_hpcddp(size, source, Path(name), compiled=compiled), {}
    first = len(times) // 3
    seconds = (times[-1] - times[first]) / (len(times) - 1 - first)
    print(json.dumps({"ms_per_image": seconds / size.batch * 1e3, **found}))
    sys.stdout.flush()
    os._exit(0)


def _profiled(size: Size, source: str, directory: Path, *, compiled: bool) -> tuple[list[float], dict[str, Any]]:
    """Train under the profiler, and return the times, the share of kernels, and what a save costs."""
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CPU, *([activity.CUDA] if size.device.type == "cuda" else [])]
    with torch.profiler.profile(activities=activities) as profile:
        times = with_hpcddp(size, source, directory, compiled=compiled)
    events = list(profile.events() or ())
    updates = [event.time_range.start for event in events if event.name.startswith("Optimizer.step#")]
    # Not the first third of the steps, in which cudnn tries its algorithms, nor the evaluation and the save after them.
    first, last = updates[len(updates) // 3], updates[-1]
    busy = 0.0
    counted_until = first
    for start, stop in sorted(_kernel_spans(events)):
        busy += max(0.0, min(stop, last) - max(start, counted_until))
        counted_until = max(counted_until, stop)
    saves = [event for event in read_events(RunDirectory(directory).events) if event.kind == "save"]
    return times, {
        "share_of_kernels": busy / (last - first),
        "save_blocked_s": [event.facts.get("blocked_s") for event in saves],
    }


def _kernel_spans(events: Iterable[Any]) -> Iterator[tuple[float, float]]:
    """Yield when each kernel began and ended, in microseconds since the profile began."""
    for event in events:
        if event.device_type.name == "CUDA":
            yield event.time_range.start, event.time_range.end


def measure(way: str, *, source: str, compiled: bool, small: bool, profiled: bool = False) -> dict[str, Any]:
    """Run a contender in a process of its own, and return its result."""
    words = [sys.executable, "-m", "benchmarks.gpu", "--run", way, "--source", source]
    words += ["--compiled"] * compiled + ["--small"] * small + ["--profiled"] * profiled
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{way} ended with {done.returncode}:\n{done.stderr}")
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def cases(rounds: int, images: str, *, small: bool) -> Iterator[Case]:
    """Yield the comparisons."""
    for name, source, compiled, ways in (
        ("ResNet-50, synthetic", "synthetic", False, WAYS),
        ("ResNet-50, synthetic, compiled", "synthetic", True, WAYS[:2]),
        ("ResNet-50, JPEG", images, False, WAYS),
    ):
        measured = {way: partial(_time_per_image, way, source=source, compiled=compiled, small=small) for way in ways}
        # Each contender starts a new process, so a round before would warm nothing.
        yield in_turn(name, measured, base="by hand", unit="ms per image", rounds=rounds, warm_up=False)


def _time_per_image(way: str, *, source: str, compiled: bool, small: bool) -> float:
    return float(measure(way, source=source, compiled=compiled, small=small)["ms_per_image"])


def main() -> None:
    """Measure and print, or run one contender."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="a file for the result")
    parser.add_argument("--small", action="store_true", help="on the CPU, with small images")
    for name in ("--run", "--source"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--compiled", "--profiled"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = Size(small=options.small)
    if options.run:
        return run_one(options.run, size, options.source, compiled=options.compiled, profiled=options.profiled)
    if not options.small and not torch.cuda.is_available():
        sys.exit("there is no GPU here; --small runs on the CPU")
    with tempfile.TemporaryDirectory() as images:
        write_images(Path(images), size.files)
        document = report(lambda: cases(options.rounds, images, small=options.small))
        profile = measure("hpcddp", source="synthetic", compiled=False, small=options.small, profiled=True)
    document |= {"device": "cpu" if options.small else torch.cuda.get_device_name(), "profile": profile}
    text = json.dumps(document, indent=2) + "\n"
    sys.stdout.write(text)
    if options.output is not None:
        options.output.write_text(text)
    return None


if __name__ == "__main__":
    main()
