# `just` lists the recipes; each is a command that works without just as well.

default:
    @just --list

# Lint, formatting and types.
check:
    ruff check .
    ruff format --check .
    mypy

# The tests; `just test tests/core` runs a part, `just test -m "not slow"` the quick ones.
test *arguments:
    python -m pytest -n auto {{arguments}}

# The tests that `just test` leaves out: more models, sizes and random schedules, for an hour; `just long tests/devices/cuda` runs a part.
long *arguments:
    python -m pytest -m long -n auto {{arguments}}

# Thousands of random schedules, for minutes.
fuzz *arguments:
    python -m pytest -m long tests/scheduler tests/e2e tests/kv_transfer {{arguments}}

# Measure the scheduler and the engine on the model that ships with octavo.
bench:
    python -m benchmarks.scheduler
    octavo bench throughput
    octavo bench latency
    octavo bench startup

# Make the reference pages and the site (into site/); `just docs https://HOST/PATH` names the repository to link to.
docs *repository:
    .ci/site {{repository}}

# Wheels for every Python and any Linux from glibc 2.28 on, into dist/; needs docker or podman.
wheels:
    pipx run cibuildwheel --platform linux --output-dir dist

# A wheel for this Python and machines like this one, into dist/, installed and tried where no compiler is.
wheel:
    .ci/wheel

# Everything that a change must pass, in a virtual environment of its own.
ci:
    .ci/run
