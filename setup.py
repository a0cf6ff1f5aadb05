"""Folders of the checkout that a wheel carries too: `xlatrain tpu` and `xlatrain examples` find them in `xlatrain/shipped`."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("tpu_scripts", "examples")


class BuildWithFolders(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # the folders are where they are
            return
        for name in SHIPPED:
            target = Path(self.build_lib, "xlatrain", "shipped", name)
            self.mkpath(str(target))
            for path in sorted(Path(name).iterdir()):
                if path.is_file():
                    self.copy_file(str(path), str(target / path.name))


setup(cmdclass={"build_py": BuildWithFolders})
