"""A scaler as in fp16, which runs on GPUs alone."""

import torch


class Scaler(torch.amp.GradScaler):
    def __init__(self, device, enabled):
        super().__init__(device, enabled=True)


torch.amp.GradScaler = Scaler
