"""Rank 1 is on a node with another clock, without the shared folder, and with another seed."""

import os
import sys
import time

if os.environ["RANK"] == "1":
    clock = time.time
    time.time = lambda: clock() + 100
    os.makedirs("other", exist_ok=True)
    os.chdir("other")
    sys.argv += ["--seed", "1"]
