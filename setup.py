"""Maps the repository's folders under one import root: components/ is reflux.components."""

from setuptools import find_packages, setup

FOLDERS = ("components", "kernels", "pipelines")
setup(
    package_dir={f"reflux.{folder}": folder for folder in FOLDERS},
    packages=[f"reflux.{name}" for name in find_packages(include=[glob for f in FOLDERS for glob in (f, f"{f}.*")])],
)
