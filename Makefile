# make train   install into .venv what that takes, then train the embedded default and let the model answer
# make test    install into .venv, then the gate: clean, export, no difference, notebook tests, pytest
# make notebooks  install into .venv, then open the notebooks in Jupyter
# make readme  write README.md from nbs/index.ipynb, and the pictures of the home page
# make docs    build the site in _docs with Quarto, and check its links
# make demo    train the embedded default, and put the page of its model in _demo, from where `make docs` takes it; needs npm
# make figures make the saved figures of the notebooks small
# make fold    close in Jupyter the cells that the site hides or folds
# PYTHON=python3.13 chooses an interpreter; where none fits, uv fetches one. Without a GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu saves gigabytes.

fits := import sys; sys.exit(not (3,10) <= sys.version_info[:2] <= (3,13))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do $$p -c '$(fits)' 2>/dev/null && echo $$p && break; done)
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
# of the gate: one more than cores, since each waits now and then for processes that it has started; at most four
WORKERS := $(shell echo $$(( $(CORES)<4 ? $(CORES)+1 : 4 )))
# what a training needs, and what the gate needs besides
BASE := .venv/.trains
STAMP := .venv/.installed
VENV := $(if $(PYTHON),$(PYTHON) -m venv,uv venv --seed --python 3.13)
PIP := .venv/bin/python -m pip install --no-compile --disable-pip-version-check -c constraints.txt
ADDRESS := $(shell sed -n 's/^ *site-url: "\(.*\)"/\1/p' nbs/nbdev.yml)
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# what one process has compiled the others load, also where the environment says otherwise
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train test notebooks gate generated install readme docs demo figures fold clean
.NOTPARALLEL:

train: $(BASE)
	nanovlm train $(ARGS)
	@$(if $(ARGS),true,echo 'paste this: .venv/bin/nanovlm ask')

test: install
	@$(MAKE) --no-print-directory gate

notebooks: install
	$(PIP) -q --no-build-isolation -e '.[notebooks]'
	jupyter lab --ServerApp.root_dir=. $(ARGS) nbs/00_one_page.ipynb

install: $(STAMP)

$(BASE): settings.ini setup.py constraints.txt
	@test -n "$(PYTHON)" || command -v uv >/dev/null || { echo "missing: Python 3.10 to 3.13. Install one and give make PYTHON=/path/to/it, or install uv, with which this fetches one: https://docs.astral.sh/uv"; exit 1; }
	@test -z "$(PYTHON)" || $(PYTHON) -c '$(fits)' 2>/dev/null || { echo "missing: Python 3.10 to 3.13, $(PYTHON) is not one of them"; exit 1; }
	@test -z "$(PYTHON)" || $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "missing: the venv module of $(PYTHON) (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	test -x .venv/bin/python || $(VENV) .venv
	@.venv/bin/python -c '$(fits)' || { echo "wrong: the Python of .venv is not 3.10 to 3.13: remove it (make clean) and try again"; exit 1; }
	$(PIP) -q pip setuptools wheel || { echo "missing: a package index that pip can reach (pip config list)"; exit 1; }
	@echo "PyTorch, transformers, datasets and what they need are installed into .venv: some minutes, once"
	$(PIP) --no-build-isolation -e .
	.venv/bin/python -c 'import nanovlm_nb.runs.run, torch._dynamo' # compiles what is used, a sixth of all
	touch $@

$(STAMP): $(BASE)
	$(PIP) --no-build-isolation -e '.[dev,test]'
	touch $@

gate: generated
	OMP_NUM_THREADS=1 nbdev_test --n_workers $(WORKERS)
	OMP_NUM_THREADS=1 python -m pytest -q -n $(WORKERS) --dist loadfile

# what is generated must be committed as it is generated; an edit of a module is shown before the export would undo it
generated:
	@git rev-parse --is-inside-work-tree >/dev/null 2>&1 || { echo "missing: a git checkout, the gate compares with what is committed"; exit 1; }
	git --no-pager diff --exit-code nanovlm_nb
	nbdev_clean
	python .ci/fold.py
	nbdev_export
	git --no-pager diff --exit-code
	@new=$$(git ls-files --others --exclude-standard nanovlm_nb nbs); test -z "$$new" || { echo "not committed:" $$new; exit 1; }

readme:
	python .ci/pictures.py
	python .ci/readme.py

docs:
	rm -rf _proc  # nbdev takes what changed during a build for done
	nbdev_docs
	python .ci/site.py _docs $(ADDRESS)
	rm -rf _docs/demo
	if test -d _demo; then cp -r _demo _docs/demo; else mkdir _docs/demo && echo '<!DOCTYPE html><title>No demo</title><p>This copy of the site was built without <code>make demo</code>.</p>' > _docs/demo/index.html; fi
	python .ci/check_links.py _docs $(ADDRESS)

demo: install
	rm -rf _demo
	nanovlm train --run_name demo --resume True $(ARGS)
	nanovlm export checkpoints/demo _demo --format web

figures:
	python .ci/figures.py

fold:
	python .ci/fold.py

clean:
	rm -rf .venv _docs _demo _proc *.egg-info
