# Everything runs in .venv with the versions pinned in constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help install demo alluxio demo-alluxio test lint format clean

help:
	@echo "make demo   encode the sample clips, train on 2 processes, sample, write runs/demo/report.html"
	@echo "make demo-alluxio   the same with the latents in a local Alluxio; first: make alluxio"
	@echo "make test   install what the tests need and run them all"
	@echo "make lint   ruff, mypy and the import contract"

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

install: .venv/installed

demo: install
	tools/demo.sh

# The jars of a local Alluxio, from Maven Central (about 200 MB); not needed where ALLUXIO_JARS names them.
alluxio:
	mvn --quiet --file tools/alluxio/pom.xml dependency:copy-dependencies -DincludeScope=runtime \
		-DoutputDirectory=$(CURDIR)/tools/alluxio/jars -DexcludeArtifactIds=log4j-slf4j-impl

demo-alluxio: install
	tools/alluxio/demo.sh

test: install
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv runs
