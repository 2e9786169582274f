"""The text of small models, which tests write into a file beside the job file."""

SMALL_MODEL = """
from torch import nn

def build(num_classes, width=32):
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, width), nn.ReLU(), nn.Linear(width, num_classes))
"""
# What a task sees: written down by the model of a training, or by a program that the tasks are.
SEE = """
import json, os, shutil, socket, sys
from pathlib import Path

seen = {
    "prefix": sys.prefix, "python": shutil.which("python"), "host": socket.gethostname(),
    "variables": dict(os.environ), "root": sorted(os.listdir("/")), "cwd": os.getcwd(),
    "here": sorted(os.listdir(".")), "data": sorted(os.listdir("/data")) if os.path.isdir("/data") else None,
}
Path(f"seen-{os.environ['RANK']}.json").write_text(json.dumps(seen))
"""
# It imports the program above, which the test writes to see.py.
SLOW_MODEL = """
import time
from torch import nn

class Slow(nn.Module):
    def __init__(self, num_classes, seconds):
        super().__init__()
        self.net = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, num_classes))
        self.seconds = seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return self.net(x)

def build(num_classes, seconds=0.0):
    import see
    return Slow(num_classes, seconds)
"""
