"""Where a chapter's numbers come from: code, model, settings, machine, versions, and the command that repeats them."""

import datetime
import os
import platform
import shlex
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml
from IPython.display import Markdown

from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import USUAL
from kvrepro.experiment.settings import Settings, injected
from kvrepro.paths import INSTALLED, ROOT

PACKAGES = ("torch", "transformers", "triton", "numpy", "pandas", "scipy", "statsmodels")
STARTED = time.monotonic()  # a notebook imports this first


def provenance(chapter: str, loaded: Loaded | None = None, settings: Settings = USUAL) -> Markdown:
    """The last cell of a chapter: commit, date, model and its hash, profile, seed, machine, versions, seconds, and the
    command that computes the same again. loaded: None for a chapter that runs no model."""
    installed = {package.name.lower() for package in metadata.distributions() if package.name}
    versions = [f"{name} {metadata.version(name)}" for name in PACKAGES if name in installed]
    seconds = f"{time.monotonic() - STARTED:.0f} s for this execution"
    facts = {"Code": commit(), "Date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"}
    if loaded is not None:
        facts["Model"] = f"{loaded.name}, {loaded.dtype} on {loaded.device}, hash `{loaded.hash}`"
        facts["Profile"] = f"{settings.profile}, seed {settings.seed}"
    facts |= {
        "Machine": machine(),
        "Versions": ", ".join([f"Python {platform.python_version()}", *versions]),
        "Time": f"{seconds}; what was stored before is not computed again",
        "Again": f"`{command(chapter, injected())}`",
    }
    return Markdown("\n".join(f"- **{name}**: {text}" for name, text in facts.items()))


def commit() -> str:
    """The version of the package; in a clone with the commit, and whether files were changed since."""
    installed = any(package.name == "kvrepro" for package in metadata.distributions())
    version = f"kvrepro {metadata.version('kvrepro')}" if installed else "kvrepro, not installed"
    if not (ROOT / ".git").exists():
        return version
    git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        head = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return version
    changed = ", with changes that are not committed" if head.endswith("-dirty") else ""
    return f"{version}, commit `{head.removesuffix('-dirty')}`{changed}"


def machine() -> str:
    """Processor, cores that this process may use, and GPUs."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    processor = names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{platform.system()}, {processor}, {cores} cores, {', '.join(gpus) or 'no GPU'}"


def command(chapter: str, parameters: dict[str, Any]) -> str:
    """The command that executes a chapter with these parameters."""
    papermill = "papermill" if INSTALLED else ".venv/bin/papermill"
    words = [papermill, "--cwd", ".", f"notebooks/{chapter}.ipynb", f"{chapter}-again.ipynb"]
    if parameters:
        words += ["-y", yaml.safe_dump(parameters, default_flow_style=True, width=1000).strip()]
    return shlex.join(words)
