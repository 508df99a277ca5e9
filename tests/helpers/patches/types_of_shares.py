"""Prints the types of the tensors that the experts get, behind all hooks of FSDP."""

import torch
from helpers.patches import in_place_of, print


def tell(module, inputs):
    print("\ntypes", *(x.dtype for x in inputs if isinstance(x, torch.Tensor)))


@in_place_of(torch.nn.Module, "train")
def train(original, self, mode=True):
    for name, module in self.named_modules():
        if name.split(".")[-1] == "experts":
            module.register_forward_pre_hook(tell)
    return original(self, mode)
