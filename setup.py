"""The packages of the wheel: all of flashgen/, and the repository's generated/, templates/ and
configs/ mapped inside it. Everything else stands in pyproject.toml.
"""

from setuptools import find_packages, setup
from setuptools.command.editable_wheel import editable_wheel

PACKAGES = find_packages(include=["flashgen", "flashgen.*"])
MAPPED = {
    "flashgen._generated": "generated",
    "flashgen._generated.kernels": "generated/kernels",
    "flashgen._generated.tables": "generated/tables",
    "flashgen._templates": "templates",
    "flashgen._configs": "configs",
}


class PathEntry(editable_wheel):
    """Makes an editable install one entry of sys.path, which it is if nothing is mapped.

    Otherwise setuptools adds a finder that Python asks last. Above a clone named flashgen that is
    too late: the clone itself is found before it, as a namespace package without a name in it.
    """

    def finalize_options(self) -> None:
        """Map nothing: paths.py finds the folders of a clone next to flashgen/."""
        self.distribution.packages = PACKAGES
        self.distribution.package_dir = {"": "."}
        super().finalize_options()


setup(
    packages=[*PACKAGES, *MAPPED],
    package_dir=MAPPED,
    package_data={
        "flashgen": ["py.typed"],
        "flashgen.report": ["*.jinja"],
        "flashgen._generated": ["*.txt"],
        "flashgen._templates": ["*.jinja"],
        "flashgen._configs": ["*.yaml", "evidence/*.jsonl"],
    },
    cmdclass={"editable_wheel": PathEntry},
)
