"""Where a chapter's numbers come from: code, model, settings, machine, versions, and the command that repeats them."""

import datetime
import platform
import re
import shlex
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import loky
import torch
import yaml
from IPython.display import Markdown

from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import USUAL
from kvrepro.experiment.settings import Settings, injected
from kvrepro.paths import ROOT

PACKAGES = ("kvrepro", "torch", "transformers", "triton", "numpy", "pandas", "scipy", "statsmodels")


def provenance(chapter: str, loaded: Loaded | None = None, settings: Settings = USUAL) -> Markdown:
    """The last cell of a chapter: commit, date, model, profile, seed, machine, versions, and the command that computes
    the same again. loaded: None for a chapter that runs no model."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    versions = {f"{package.name} {package.version}" for package in metadata.distributions() if package.name in PACKAGES}
    facts = {"Code": f"commit `{commit}`", "Date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"}
    if loaded is not None:
        facts["Model"] = f"{loaded.name}, {loaded.dtype} on {loaded.device}, hash `{loaded.hash}`"
        facts["Profile"] = f"{settings.profile}, seed {settings.seed}"
    again = [".venv/bin/papermill", "--cwd", ".", f"notebooks/{chapter}.ipynb", f"{chapter}-again.ipynb"]
    if given := injected():
        again += ["-y", yaml.safe_dump(given, default_flow_style=True, width=1000).strip()]
    facts["Machine"] = machine()
    facts["Versions"] = ", ".join([f"Python {platform.python_version()}", *sorted(versions)])
    facts["Again"] = f"`{shlex.join(again)}`"
    return Markdown("\n".join(f"- **{name}**: {text}" for name, text in facts.items()))


def machine() -> str:
    """Processor, cores, and GPUs."""
    info = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.*)", info.read_text() if info.exists() else "")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    processor = name[1] if name else platform.machine()
    return f"{platform.system()}, {processor}, {loky.cpu_count()} cores, {', '.join(gpus) or 'no GPU'}"
