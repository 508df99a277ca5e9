"""Prints the peak memory of the process, in GB. DuckDB frees what it has cached."""

import os
import resource
import runpy
import sys

sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)
