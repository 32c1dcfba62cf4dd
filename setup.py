"""The packages of the wheel: all of flashgen/, and the repository's generated/, templates/ and
configs/ mapped inside it. Everything else stands in pyproject.toml.
"""

from setuptools import find_packages, setup

MAPPED = {
    "flashgen._generated": "generated",
    "flashgen._generated.kernels": "generated/kernels",
    "flashgen._generated.tables": "generated/tables",
    "flashgen._templates": "templates",
    "flashgen._configs": "configs",
}

setup(
    packages=[*find_packages(include=["flashgen", "flashgen.*"]), *MAPPED],
    package_dir=MAPPED,
    package_data={
        "flashgen": ["py.typed"],
        "flashgen.paper": ["*.jinja"],
        "flashgen.report": ["*.jinja"],
        "flashgen._generated": ["*.txt"],
        "flashgen._templates": ["*.jinja"],
        "flashgen._configs": ["*.yaml", "evidence/*.jsonl"],
    },
)
