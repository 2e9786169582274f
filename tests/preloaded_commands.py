"""Imported last by the process from which tests fork: the commands, and what they build at its first use."""

from __future__ import annotations

import gc
import importlib
import pkgutil

import hpcddp.cli
import hpcddp.manage
import hpcddp.submission
from hpcddp.jobfile.job import JobSpec
from hpcddp.packages import shipped_directory
from hpcddp.submission import template

for package in (hpcddp.cli, hpcddp.manage, hpcddp.submission):
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
JobSpec.model_rebuild()
template._environment(shipped_directory("templates")).get_template(f"{template.DEFAULT_TEMPLATE}{template.SUFFIX}")
# A collection in a forked process leaves out what was there before: it would take a tenth of a second, and copy memory.
gc.collect()
gc.freeze()
