"""Rank 1 has a signal in step 5."""

import os
import signal

import transformers

training_step = transformers.Trainer.training_step


def stop(self, *args, **kwargs):
    if self.state.global_step == 4 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGUSR2)
    return training_step(self, *args, **kwargs)


transformers.Trainer.training_step = stop
