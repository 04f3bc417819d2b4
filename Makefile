# make demo   SmolLM2 answers a prompt, with a drafter and without     make test   everything that is checked
# Both set up .venv by themselves. Another Python: PYTHON=python3.12 make test
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
SETUP := pyproject.toml constraints.txt
INSTALL = $(RUN) -m pip install --disable-pip-version-check --constraint constraints.txt --editable

# With instructions for bfloat16, a processor verifies a tree in little more than the time of one token; without, float32
# is faster.
DEMO_DTYPE ?= $(shell grep -qsE 'amx_bf16|avx512_bf16' /proc/cpuinfo && echo bfloat16 || echo float32)
DEMO_PROMPT ?= Write a Python function that returns the n-th Fibonacci number, and explain it.

.PHONY: demo test lint clean

demo: $(VENV)/.installed-$(VERSION)
	$(RUN) -m data.smollm2
	$(RUN) -m infer.generate prompt="$(DEMO_PROMPT)" compare=true max_new_tokens=96 dtype=$(DEMO_DTYPE)

test: lint
	$(RUN) -m pytest

lint: $(VENV)/.installed-test-$(VERSION)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# The environment is made anew when it is of another Python or was left half-made.
$(VENV)/.installed-$(VERSION): $(SETUP)
	$(VENV)/bin/python$(VERSION) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(INSTALL) .
	touch $@

$(VENV)/.installed-test-$(VERSION): $(VENV)/.installed-$(VERSION)
	$(INSTALL) '.[test]'
	touch $@
