"""A process of the tests has torch, so it does by itself what Python does at its start."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).parents[3] / "tools" / "watch" / "sitecustomize.py"))
