"""A rank on a node of its own: --save-dir is a folder that no other rank sees."""

import os

os.makedirs(os.environ["DISKS"] + os.environ["RANK"], exist_ok=True)
os.chdir(os.environ["DISKS"] + os.environ["RANK"])
