"""Python imports this file when it starts, if this folder is on PYTHONPATH.

So tools/first-difference.py and tools/where-it-hangs.py watch a script without any change to it.
A script may set variables before it imports torch, so nothing here imports torch. As soon as the
script has imported torch, `steps.py` is imported. `hangs.py` needs no torch to begin.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


class AfterTorch:
    """A finder that lets others find torch, and imports a module when torch is complete."""

    def __init__(self, module):
        self.module = module
        self.searching = False

    def find_spec(self, name, path=None, target=None):
        if name != "torch" or self.searching:
            return None
        self.searching = True
        spec = importlib.util.find_spec("torch")
        self.searching = False
        if spec:
            execute = spec.loader.exec_module

            def execute_and_watch(module):
                execute(module)
                sys.meta_path.remove(self)
                importlib.import_module(self.module)

            spec.loader.exec_module = execute_and_watch
        return spec


def run_the_other_sitecustomize():
    """The one that this file hides, if there is one."""
    folders = [folder for folder in sys.path if os.path.abspath(folder) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", folders)
    if spec and spec.loader:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    run_the_other_sitecustomize()
if HERE not in sys.path:
    sys.path.append(HERE)
if "HANG_DUMPS" in os.environ:
    importlib.import_module("hangs")
# To find the lines of calls, PyTorch imports its compiler. In the thread of hangs.py, this would
# disturb the imports of the script.
modules = {"FIRST_DIFFERENCE": "steps", "HANG_DUMPS": "torch._inductor.codecache"}
for module in [module for variable, module in modules.items() if variable in os.environ]:
    if "torch" in sys.modules:
        importlib.import_module(module)
    else:
        sys.meta_path.insert(0, AfterTorch(module))
