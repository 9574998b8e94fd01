"""What pyproject.toml cannot say: the files in configs/ are installed inside the package."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithConfigs(build_py):
    """Adds configs/ to the package; an editable installation reads them where they are."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree("configs", Path(self.build_lib, "granite_scu", "configs"), dirs_exist_ok=True)


setup(cmdclass={"build_py": WithConfigs})
