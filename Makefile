# make book    execute every notebook and build the site: _build/html/index.html
# make test    lint, what may import what, tests, every notebook in the smoke profile, the site, and a browser on it
# make lab     a JupyterLab on the notebooks
# make record  measure anew what ships in data/measurements: make record NAME=untrained
# make atlas   make the table of what transformers returns by type anew: data/transformers_outputs.csv; a run that was stopped goes on
# make setup   what they need: the environment and the pinned packages
# make newest  a wheel in an empty environment, with the newest of everything that its bounds allow (downloads 1.5 GB)
#
# PROFILE=paper make book, or P="-p model NAME -p data FILE:COLUMN", chooses what the book shows.

PYTHON ?= python3.11
PROFILE ?= default
P ?=
NAME ?=
BIN := .venv/bin
# A thread that waits sleeps: it would else keep a core from the one that it waits for.
PYTEST := OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: book lab test newest record atlas kernels setup packages clean
.DELETE_ON_ERROR:

book: setup
	$(BIN)/python -m analysis_lib book --profile $(PROFILE) $(P)

# The whole suite comes last, so that the last summary is its own.
test: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(MAKE) --jobs=2 --output-sync kernels
	$(PYTEST)

# Many processes import the library: it is compiled once, also where Python is told to keep nothing.
test: export PYTHONDONTWRITEBYTECODE =

# What is measured must not depend on the processor: tests marked `kernels` run with the kernels of other processors, too.
kernels: kernels-avx2 kernels-default
kernels-avx2: export MKL_ENABLE_INSTRUCTIONS = AVX2
kernels-default: export MKL_CBWR = COMPATIBLE
kernels-%: setup
	ATEN_CPU_CAPABILITY=$* $(BIN)/python -m pytest -m kernels tests/capture

record: setup
	$(BIN)/python data/measurements/record.py $(NAME)

# In a process per type, which has a limit of time and of memory. `make atlas TRANSFORMERS=5.24.0` makes the rows of another version, and keeps the others.
atlas: export HF_HUB_OFFLINE = 1
atlas: setup .venv/.vision $(TRANSFORMERS:%=.venv/.transformers-%)
	PYTHONPATH=$(TRANSFORMERS:%=.venv/.transformers-%:).venv/.vision $(BIN)/python -m analysis_book.atlas.building data/transformers_outputs.csv

# What some types need, of which there is no build for this PyTorch: the parts in Python. torchvision is imported only if its kernels are declared.
.venv/.vision: .venv/.installed
	rm -rf $@ $@.part
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --target $@.part torchvision==0.28.0 torchaudio==2.11.1 timm==1.0.31 num2words==0.5.14 docopt==0.6.2 \
	    mistral-common==1.13.1 tiktoken==0.14.0 pydantic-extra-types==2.11.1 pycountry==26.2.16
	rm -rf $@.part/torchaudio/lib $@.part/torchvision/*.so
	cp tests/declared_kernels.py $@.part/sitecustomize.py
	mv $@.part $@

.venv/.transformers-%: .venv/.installed
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --target $@ transformers==$*

# Not in `make test`, which needs no network: what pip finds today may break what ran yesterday.
newest: setup
	ANALYSIS_LIB_NEWEST=1 $(BIN)/python -m pytest -n 0 tests/packaging/test_newest.py

# What JupyterLab needs is installed when it is first asked for.
lab: setup .venv/.lab
	$(BIN)/jupyter lab --notebook-dir=book

.venv/.lab: .venv/.installed
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[lab]'
	@touch $@

# A wheel that somebody has deleted since comes down again.
setup: .venv/.installed packages

# A stamp is written last, so a set-up that was killed half-way starts again.
.venv/.installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 is needed (make PYTHON=/path/to/python3.11)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[all,test]'
	@touch $@

# The library downloads what it needs when it needs it; here, so that no test or notebook waits for the network.
packages: .venv/.installed
	@[ $$(ls data/packages/*.whl data/packages/*.tar.gz 2>/dev/null | wc -l) -ge \
		$$(grep == data/packages.txt | grep -vc "on demand") ] \
		|| $(BIN)/python -c "from analysis_lib.corpora import packages; packages.download()"

clean:
	rm -rf _build
