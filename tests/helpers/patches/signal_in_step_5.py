"""Rank 1 has a signal in step 5."""

import os
import signal

import transformers
from helpers.patches import in_place_of


@in_place_of(transformers.Trainer, "training_step")
def stop(training_step, self, *args, **kwargs):
    if self.state.global_step == 4 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGUSR2)
    return training_step(self, *args, **kwargs)
