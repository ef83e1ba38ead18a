# Each target sets up what it needs; a second run starts at once.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# Compiled modules are kept, whatever the environment says: without them each process compiles 1,400 again as it starts.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: book test suite lint size lab dist check-book clean
.DELETE_ON_ERROR:

book: $(READY)        ## re-execute the chapters, build the book (make book ARGS="-p profile full")
	@$(PY) book/build.py $(ARGS)

test: $(READY)        ## lint, type check and tests, side by side: the type checker keeps only one core busy
	@$(MAKE) --no-print-directory --keep-going --jobs=2 lint suite

suite: $(READY)       ## the tests alone
	@$(PY) -m pytest -n auto $(ARGS)

lint: $(READY)        ## ruff, mypy, and who may import whom
	@$(PY) -m ruff check .
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports --no-logo --no-cache

size:                 ## lines by folder beside their bounds; fails where one is passed
	@$(PYTHON) studies/size.py

lab: $(READY)         ## open the notebooks, with the package beside them (as root: make lab ARGS=--allow-root)
	@JUPYTER_PREFER_ENV_PATH=1 $(PY) -m jupyterlab --ServerApp.root_dir=$(CURDIR) --LabApp.default_url=/lab/tree/notebooks $(ARGS)

dist: $(READY)        ## wheel and source archive, into dist/
	@rm -rf build dist kvrepro.egg-info
	@$(PY) -m build --no-isolation -v . >/dev/null && ls -sh dist

check-book: $(READY)  ## the built book in a browser: errors, links, weight, overflow, accessibility, search; pictures in _build/browser
	@$(PY) -m pytest -n 2 -rs -m browser tests/browser $(ARGS)

clean:                ## remove what the book wrote; results and the environment stay
	rm -rf _build book/executed

# The .pth file is for scripts beside the clone: there the clone's own folder would pass for the package of the same name.
# Torch is pinned like everything else: unpinned, it could bring another CUDA build of several gigabytes.
$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "'$(PYTHON)' not found: install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$$($(PYTHON) -V 2>&1) is too old: kvrepro needs 3.11 or newer; name one: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "'$(PYTHON)' cannot make virtual environments: install them (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "setting up $(VENV): pinned packages, about 3 GB; a few minutes, once"
	@start=$$(date +%s); \
	  $(PYTHON) -m venv $(VENV) && \
	  $(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt pip setuptools wheel && \
	  $(PY) -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[book,hub,cluster,dev]' && \
	  printf '%s\n' '$(CURDIR)' '$(CURDIR)/kernels' > "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kvrepro-clone.pth" && \
	  echo "set up in $$(( $$(date +%s) - start )) s"
	@touch $@
