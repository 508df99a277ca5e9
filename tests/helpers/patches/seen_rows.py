"""Each rank writes the labels that it was trained on, in their order."""

import os

import torch

from helpers.patches import at_end

seen = []


def to_empty(self, *, device, recurse=True):
    original_to_empty(self, device=device)
    forward = self.forward

    def watched(input_ids, labels, **options):
        if self.training:
            seen.append(labels.clone())
        return forward(input_ids=input_ids, labels=labels, **options)

    self.forward = watched
    return self


original_to_empty = torch.nn.Module.to_empty
torch.nn.Module.to_empty = to_empty


@at_end
def tell():
    torch.save(torch.stack(seen), os.environ["SEEN"] + os.environ["RANK"])
