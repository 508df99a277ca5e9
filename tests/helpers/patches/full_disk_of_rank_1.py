"""Rank 1 cannot write more than a part of a file, as on a full disk."""

import os
import resource

if os.environ["RANK"] == "1":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
