"""Which code version is recorded where there is no git: in an image."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reflux.components import environment


@pytest.mark.parametrize("said", ["", "0123abc+changed"])
def test_an_installed_package_has_the_version_that_its_image_says(tmp_path: Path, said: str) -> None:
    shutil.copy(environment.__file__, tmp_path / "installed.py")
    shown = [sys.executable, "-c", "import installed; print(installed.commit())"]
    clean = {"PATH": "/usr/bin:/bin", "REFLUX_CODE_VERSION": said}
    assert subprocess.check_output(shown, cwd=tmp_path, env=clean, text=True).strip() == said
