"""Writing a file takes as long as a file of this name is missing."""

import os
import time

import torch.distributed.checkpoint.filesystem as files
from helpers.patches import in_place_of


@in_place_of(files, "_write_item")
def write(original, *args, **options):
    while not os.path.exists(os.environ["GO"]):
        time.sleep(0.01)
    return original(*args, **options)
