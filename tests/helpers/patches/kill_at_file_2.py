"""Rank 1 is killed before it writes its second layer."""

import os
import signal

import safetensors.torch


def counted(*arguments, **options):
    files.append(arguments)
    if len(files) == 2 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return save_file(*arguments, **options)


files, save_file = [], safetensors.torch.save_file
safetensors.torch.save_file = counted
