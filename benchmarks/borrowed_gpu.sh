#!/bin/sh
# Uses a GPU that is lent for minutes at a time: prepare here, run there, bring one file back.
#
#   benchmarks/borrowed_gpu.sh wheels [PYTHON]              here: .wheels/, for a Python (3.12) on Linux, x86-64
#   benchmarks/borrowed_gpu.sh run MINUTES FILE [EARLIER]   there: resume from EARLIER, else FILE, and write FILE
#
# The machine needs a python3 with torch and Triton. `run` rewrites FILE (tar.gz) every minute, so that
# it is there even if the machine goes away. Compiled kernels stay out of it: they are large, and
# compiled again. The exit code is that of gpu_campaign.py: 1 means that steps are left for another run.
set -eu
cd "$(dirname "$0")/.."

# Of flashgen and its extras tune and dev, with what these need; the machine's own packages come first.
# torch does not require numpy. Without numba, which is too large to carry, kernels have no estimates
# and searches measure more; without matplotlib, reports have no charts.
packages='numpy Jinja2 optuna alembic colorlog Mako MarkupSafe SQLAlchemy tqdm PyYAML packaging
    typer click rich shellingham annotated-doc markdown-it-py mdurl Pygments
    scipy nvidia-ml-py pytest iniconfig pluggy pytest-timeout pytest-xdist execnet'

wheels() {
    rm -rf .wheels
    # shellcheck disable=SC2086
    for package in $packages; do
        python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest .wheels \
            --constraint constraints.txt --only-binary=:all: --implementation cp \
            --python-version "$1" --platform any --platform manylinux1_x86_64 \
            --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 \
            --platform manylinux_2_27_x86_64 --platform manylinux_2_28_x86_64 "$package"
    done
    du -sh .wheels
}

# Installs the wheels whose distribution is missing, and prints the folder.
install_missing() {
    site=$(mktemp -d)
    python3 - .wheels <<'PY' > "$site/missing"
import importlib.metadata, pathlib, sys

for wheel in sorted(pathlib.Path(sys.argv[1]).glob("*.whl")):
    try:
        importlib.metadata.distribution(wheel.name.split("-")[0])
    except importlib.metadata.PackageNotFoundError:
        print(wheel)
PY
    if [ -s "$site/missing" ]; then
        xargs python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
            --no-compile --target "$site" < "$site/missing" >&2
    fi
    echo "$site"
}

pack() {
    [ -d campaign ] || return 0
    # A file may change while it is packed, which is tar's exit code 1: the next pack has it whole.
    tar -czf "$1.part" --exclude='campaign/.flashgen/compiled' --exclude='campaign/.flashgen/kernels' campaign || [ $? -eq 1 ]
    mv "$1.part" "$1"
}

run() {
    earlier=${3:-$2}
    if [ -f "$earlier" ]; then tar -xzf "$earlier" --keep-newer-files; fi
    PYTHONPATH=$(install_missing)${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONPATH
    # Its output goes nowhere, or the sleep that outlives it would keep a pipe open.
    (while sleep 60; do pack "$2"; done) > /dev/null 2>&1 &
    packing=$!
    code=0
    python3 benchmarks/gpu_campaign.py --minutes "$1" --out campaign || code=$?
    kill "$packing" 2> /dev/null || true
    wait "$packing" 2> /dev/null || true
    if [ ! -s campaign/doctor.json ]; then
        python3 -m flashgen doctor --json > campaign/doctor.json || true
    fi
    pack "$2"
    return "$code"
}

case "${1-}:$#" in
    wheels:1 | wheels:2) wheels "${2:-3.12}" ;;
    run:3 | run:4) shift && run "$@" ;;
    *) sed -n '2,/^set/{/^# /s/^# //p;}' "$0" && exit 2 ;;
esac
