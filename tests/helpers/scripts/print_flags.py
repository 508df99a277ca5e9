"""In place of `main`: prints the flags that a chapter has understood."""

import runpy
import sys

sys.argv = sys.argv[1:]
flags = runpy.run_path(sys.argv[0])["parse_args"]()
for name, value in flags.as_dict().items():
    print(f"{name}={value}")
