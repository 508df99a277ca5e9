"""The name of a checkpoint is written when all ranks have written their files."""

import json
import pathlib

from helpers.patches import in_place_of, print


@in_place_of(pathlib.Path, "write_text")
def write_text(original, path, text):
    if path.name == "run.new":
        print("the record names a checkpoint")
        checkpoint = pathlib.Path(json.loads(text)["checkpoint"])
        files = {file.name for file in checkpoint.iterdir()}
        assert {"trainer_state.json", "rng_state_0.pth", "rng_state_1.pth"} <= files, files
    return original(path, text)
