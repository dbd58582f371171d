# ricercar: `make reproduce` runs the experiments, `make test` checks the project. `make help` lists the rest.

TIER ?= laptop
EXTRA ?=
PYTHON ?=
CORES ?= all
TARGETS ?=
PYTEST_ARGS ?=

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

BIN := $(CURDIR)/.venv/bin
# Caches of the tools stay in the environment's folder; one BLAS thread per process, ranks are the parallelism.
ENV := env PATH="$(BIN):$$PATH" MPLCONFIGDIR="$(CURDIR)/.venv/cache/matplotlib" \
    PYRIGHT_PYTHON_CACHE_DIR="$(CURDIR)/.venv/cache/pyright" PYRIGHT_PYTHON_IGNORE_WARNINGS=1 \
    OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
# What every start needs (keep going, finish what was interrupted) is in profiles/default.
SNAKEMAKE := $(ENV) snakemake --cores $(CORES) --config tier=$(TIER) --quiet host
RESULTS := results/generated/$(TIER)
CODE := impl baselines paper_figures tests

.PHONY: help
help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' \
	    | while IFS='|' read -r name text; do printf '  make %-11s %s\n' "$$name" "$$text"; done
	@printf '\n  TIER=ci|laptop|gpu1|node8|cluster (now %s)   EXTRA=gpu for CUDA machines   PYTHON=python3.12\n' "$(TIER)"

.PHONY: venv
venv: ## make .venv with the pinned requirements (EXTRA=gpu: for CUDA machines)
	@scripts/make_venv.sh "$(EXTRA)" "$(PYTHON)"

.PHONY: reproduce
reproduce: venv ## run the experiments of TIER, then show the main tables; the same command goes on after a crash
	@$(SNAKEMAKE) -- $(TARGETS)
	@$(ENV) python -m paper_figures show --results "$(RESULTS)"

.PHONY: full
full: venv ## everything: sweeps, deep pipelines and ablations too (hours; continues where it was)
	@$(SNAKEMAKE) -- full
	@$(ENV) python -m paper_figures show --results "$(RESULTS)"

.PHONY: report
report: venv ## one offline page of the claims, all tables and figures, and the files for a paper in paper_figures/out
	@$(SNAKEMAKE) --report results/report.html -- $(TARGETS)
	@$(ENV) python -m paper_figures paper --results "$(RESULTS)" --out paper_figures/out

.PHONY: status
status: venv ## how far the runs of TIER are; WATCH=5 goes on showing it
	@$(ENV) python -m impl status --tier "$(TIER)" --results "$(RESULTS)" $(if $(WATCH),--watch $(WATCH)) $(TARGETS)

.PHONY: why
why: venv ## what `make reproduce` would run again, and why
	@$(ENV) python -m impl why --tier "$(TIER)" $(TARGETS)

.PHONY: cost
cost: venv ## what the experiments of TIER cost: jobs, hours, disk; HARDWARE=h100 to see whether they fit
	@$(ENV) python -m impl cost --tier "$(TIER)" --results "$(RESULTS)" $(if $(HARDWARE),--hardware $(HARDWARE)) $(TARGETS)

.PHONY: tables
tables: venv ## tables and figures of what is there, while runs are missing
	@$(ENV) python -m paper_figures partial --experiments experiments --tier "$(TIER)" --results "$(RESULTS)" \
	    --published results/published

.PHONY: reference
reference: venv ## copy the tables and figures of the latest laptop run to results/laptop, to be committed
	@$(ENV) python -m paper_figures reference --results results/generated/laptop --out results/laptop --readme README.md
	@$(ENV) python -m impl cost --tier laptop --record results/laptop/seconds.csv

.PHONY: dry-run
dry-run: venv ## list what `make reproduce` would run
	@$(SNAKEMAKE) --dryrun -- $(TARGETS)

.PHONY: retry
retry: venv ## forget the failed runs of TIER, so that `make reproduce` runs them again
	@$(ENV) python -m impl retry --results "$(RESULTS)"

.PHONY: lint
lint: venv ## ruff, snakefmt and pyright
	@$(ENV) ruff check $(CODE)
	@$(ENV) ruff format --check $(CODE)
	@$(ENV) snakefmt --check Snakefile workflows
	@$(ENV) pyright

.PHONY: test
test: lint ## lint, types and every test, with the whole workflow on the smallest tier
	@$(ENV) python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

.PHONY: clean
clean: ## remove everything that was generated, results included (published, gpu and laptop references stay)
	rm -rf results/generated results/claims.* results/report.html logs .snakemake .pytest_cache .ruff_cache .hypothesis build dist paper_figures/out
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
