"""A process that cannot import these, as where only the packages of the site are installed."""

import runpy
import sys

sys.modules |= dict.fromkeys(["torch", "transformers", "numpy", "matplotlib"])
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
